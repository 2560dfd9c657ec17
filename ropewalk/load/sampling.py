"""Sequences drawn by importance instead of each once an epoch (iCache, HPCA 2023): the reading side. No torch.

A sample is a row of a source, numbered over all sources whatever the order; what is held of it are its bytes as a batch
wants them. An epoch is `draws` rows of the phase, and its draws are a function of the seed, the epoch and the
importance that was recorded when it began. Both are part of a checkpoint, so a run that goes on reads what it would
have read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ropewalk.store.items import Item

from .cache.importance import Draws, Floats, Importance, Indices
from .cache.packages import Packages
from .cache.sampled import HighRegion, Sampled
from .config import ImportanceSampling

Bytes = npt.NDArray[np.uint8]
Gather = Callable[[Indices, Bytes], None]
"""Writes the rows of these samples into a buffer, a line each."""


class Undrawn(Exception):
    """These rows belong to an epoch that has not begun."""


class Sampler:
    """Which samples the rows of a phase are, and their bytes.

    All ranks must see the same losses and begin epochs at the same rows; each reads and holds rows of its own.
    """

    def __init__(
        self,
        gather: Gather,
        *,
        samples: int,
        row_bytes: int,
        batch_size: int,
        settings: ImportanceSampling,
        folder: Path,
        seed: int,
    ) -> None:
        """`folder` is this rank's, for packages. Epochs are whole batches."""
        wanted = settings.draws or samples
        self.draws_per_epoch = max(1, wanted // batch_size) * batch_size
        self.importance = Importance(samples, smoothing=settings.smoothing)
        self.epoch = -1
        """The epoch that is being read; -1 before the first."""
        self._samples, self._row_bytes, self._settings = samples, row_bytes, settings
        items = [Item("sequence", number * row_bytes, (number + 1) * row_bytes) for number in range(samples)]
        behind = _Rows(gather, row_bytes)
        self._high = HighRegion(behind, items, budget_bytes=settings.memory_bytes)
        self._packages = Packages(
            behind,
            items,
            folder,
            package_bytes=settings.package_bytes,
            memory_bytes=settings.package_memory_bytes,
            seed=seed,
        )
        self._sampled = Sampled(items, self._high, self._packages, seed=seed)
        self._draws = Draws(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
        self._lock = threading.Lock()
        self._asked = 0

    @property
    def samples(self) -> int:
        """Sequences of the corpus."""
        return self._samples

    def epoch_of(self, row: int) -> int:
        """The epoch to which a row of the phase belongs."""
        return row // self.draws_per_epoch

    def begin(self, epoch: int, *, shared: Floats | None = None) -> None:
        """Draws an epoch by the importance as it is now; `shared`, the combined one of several runs, decides what is
        held."""
        values, floor = self.importance.values(), self._settings.floor
        self._draws = self._sampled.begin(epoch, values, count=self.draws_per_epoch, shared=shared, floor=floor)
        self.epoch = epoch

    def samples_of(self, first: int, rows: int) -> Indices:
        """The samples that `rows` rows from row `first` on of the current epoch are."""
        return self._draws.given[self._places(first, rows, 1)]

    def read(self, first: int, buffer: Bytes, *, stride: int) -> Floats:
        """Writes rows `first`, `first + stride`, ... into `buffer`; how much each counts."""
        draws, places = self._draws, self._places(first, len(buffer), stride)
        found = self._sampled.fetch(draws.given[places])
        for line, data in zip(buffer, found, strict=True):
            line[:] = np.frombuffer(data, np.uint8)
        with self._lock:
            self._asked += len(buffer)
        return draws.weights[places]

    def counts(self) -> dict[str, float]:
        """What was asked for so far and where it came from. A hit is a sequence for which nothing was read: neither by
        itself, if only to be packed, nor the package that it lies in. Also what a cache of the same size that keeps
        what came first gives when every sequence is read once an epoch, from the second epoch on."""
        high, low = self._high.ram.counts(), self._sampled.low_counts()
        room = self._settings.memory_bytes + self._settings.package_memory_bytes
        with self._lock:
            asked = self._asked
        random = high.misses + low.samples_collected
        hits = max(0, asked - random - low.packages_read)
        return {
            "asked": asked,
            "hits": hits,
            "hit_rate": hits / asked if asked else 0.0,
            "high_hits": high.hits,
            "package_hits": low.hits,
            "sequential_reads": low.packages_read,
            "random_reads": random,
            "uniform_hit_rate": min(1.0, room / (self._samples * self._row_bytes)),
        }

    def figures(self) -> dict[str, float]:
        """The epoch that is being read, for people."""
        return {
            "epoch": self.epoch,
            "draws": len(self._draws.given),
            "distinct": len(np.unique(self._draws.given)),
            "high": int(self._sampled.high.sum()),
            "substituted": self._draws.substituted,
            "largest_weight": float(self._draws.weights.max(initial=0.0)),
        }

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """What to remember besides `epoch` to go on in the middle of it, the same on every rank."""
        package_of, place = self._packages.membership()
        return {
            "losses": self.importance.seen,
            "given": _padded(self._draws.given, self.draws_per_epoch),
            "weights": _padded(self._draws.weights, self.draws_per_epoch),
            "high": self._sampled.high.astype(np.uint8),
            "package_of": package_of,
            "place": place,
        }

    def load(self, state: Mapping[str, npt.NDArray[Any]], *, epoch: int) -> None:
        """Goes on from what `state` gave."""
        self.importance.remember(state["losses"])
        self._packages.restore(state["package_of"], state["place"])
        self._sampled.resume(state["high"].astype(np.bool_), self.importance.values())
        given = state["given"].copy()
        self._draws, self.epoch = Draws(given, given, state["weights"].copy()), epoch

    def close(self) -> None:
        """Removes the packages."""
        self._packages.close()

    def _places(self, first: int, rows: int, stride: int) -> Indices:
        places = first - self.epoch * self.draws_per_epoch + stride * np.arange(rows)
        if not rows or places[0] < 0 or places[-1] >= len(self._draws.given):
            raise Undrawn(f"rows {first} to {first + stride * rows} are not all of epoch {self.epoch}")
        return places


class _Rows:
    """Rows of samples as a `Fetch`."""

    def __init__(self, gather: Gather, row_bytes: int) -> None:
        self._gather, self._row_bytes = gather, row_bytes

    def fetch(self, items: Sequence[Item]) -> list[bytes | memoryview]:
        """The bytes of each sample."""
        buffer = np.empty((len(items), self._row_bytes), np.uint8)
        self._gather(np.array([item.start // self._row_bytes for item in items], np.int64), buffer)
        return [line.tobytes() for line in buffer]

    def close(self) -> None:
        """Nothing: the loader closes what it reads from."""


def _padded(values: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    return np.concatenate([values, np.zeros(size - len(values), values.dtype)])
