"""Importance sampling: passes the per-sequence losses of a run to its sampler."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ropewalk.load.cache.importance import Floats, combined, publish, published
from ropewalk.load.config import ImportanceSampling
from ropewalk.load.loader import Loader
from ropewalk.load.sampling import Sampler
from ropewalk.parallel.comm import Group
from ropewalk.parallel.placement import LocalShard, whole_placement

KIND = "sampler"
"""Prefix of the sampler's tensors in the optimizer section of a checkpoint."""


class ByImportance:
    """Collects the losses of each step and updates the sampler of `loader` only before an epoch is drawn or a state is
    saved, so steps need no device synchronization. `group` connects all ranks on the host."""

    def __init__(self, loader: Loader, sampler: Sampler, settings: ImportanceSampling, group: Group) -> None:
        self._loader, self._sampler, self._settings, self._group = loader, sampler, settings, group
        self._pending: list[tuple[npt.NDArray[np.int64], Tensor]] = []
        self._drawn: list[dict[str, float]] = []
        self._told = -1
        loader.before_epoch = self._before_epoch

    def after_step(self, losses: Tensor | None, *, first: int, rows: int) -> None:
        """Records the mean losses (identical on all ranks) of `rows` sequences starting at sequence `first`."""
        assert losses is not None, "the executor was not told that rows are drawn"
        if self._sampler.epoch != self._told:
            self._told = self._sampler.epoch
            self._drawn.append(self._sampler.figures())
        self._pending.append((self._sampler.samples_of(first, rows), losses))

    def take_drawn(self) -> list[dict[str, float]]:
        """Statistics of the epochs drawn since the last call."""
        drawn, self._drawn = self._drawn, []
        return drawn

    def state(self) -> dict[str, LocalShard]:
        """The sampler's arrays as checkpoint tensors; rank 0 writes them."""
        self._flush()
        found = {}
        for name, array in self._sampler.state().items():
            tensor = torch.from_numpy(array)
            found[f"{KIND}/{name}"] = LocalShard(
                tensor, whole_placement(tuple(tensor.shape), first=self._group.rank == 0)
            )
        return found

    def load(self, tensors: Mapping[str, Tensor | LocalShard], position: Mapping[str, Any]) -> None:
        """Restores the sampler from `state` and the loader's state."""
        arrays = {}
        for name in self._sampler.state():
            tensor = tensors[f"{KIND}/{name}"]
            arrays[name] = (tensor.local if isinstance(tensor, LocalShard) else tensor).numpy()
        self._sampler.load(arrays, epoch=int(position["epoch"]))

    def _flush(self) -> None:
        for samples, losses in self._pending:
            self._sampler.importance.update(samples, losses.double().cpu().numpy())
        self._pending.clear()

    def _before_epoch(self) -> Floats | None:
        """Updates the sampler; with `shared`, combines importances across runs, as read by rank 0."""
        self._flush()
        if not self._settings.shared:
            return None
        own = self._sampler.importance.values()
        coordinator = torch.from_numpy(own.copy())
        if self._group.rank == 0:
            folder = Path(self._settings.shared)
            folder.mkdir(parents=True, exist_ok=True)
            publish(folder, own, job=self._settings.job)
            coordinator = torch.from_numpy(combined(published(folder, samples=self._sampler.samples)))
        return np.asarray(self._group.broadcast(coordinator).numpy())
