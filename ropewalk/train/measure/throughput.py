"""Throughput of a run's step: on one batch, or fed by its loader with other settings. For `doctor data`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.config.ranks import ranks
from ropewalk.load.batch import Batch
from ropewalk.load.config import Load
from ropewalk.load.loader import Loader
from ropewalk.load.stalls import Stalls
from ropewalk.parallel.executor import StepHooks
from ropewalk.parallel.mesh import pick_device

from ..active_phase import ActivePhase
from ..data import open_data
from ..settings import Settings
from .step_profiler import time_steps_for


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Of consecutive steps."""

    tokens_per_s: float
    jitter: float
    """Standard deviation of the step time over its median, from the quartiles."""
    steps: int


def device_of(settings: Settings) -> torch.device:
    """The device that the run trains on."""
    return pick_device(settings.planned.phases[0].plan, ranks())


def open_loader(settings: Settings, load: Load, *, stalls: Stalls) -> Loader:
    """The loader of the first phase with the settings `load`; skips verification."""
    changed = dataclasses.replace(settings, load=load)
    data = open_data(changed, changed.phases[0], verify=False, device=device_of(settings), stalls=stalls)
    return data.loader


class Bench:
    """The model and optimizer of a run's first phase with fresh weights, to measure its step."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        if settings.train.threads:
            torch.set_num_threads(settings.train.threads)
        self._running = ActivePhase(settings, 0, device=device_of(settings), step_hooks=StepHooks(), verify=False)

    def alone(self, *, seconds: float) -> Throughput:
        """The step on a batch that is ready."""
        batch = self._running.data.loader.next()
        return self._measure(lambda: batch, seconds=seconds)

    def fed(self, load: Load, *, seconds: float) -> Throughput:
        """The step fed by its loader with the settings `load`."""
        with contextlib.closing(open_loader(self._settings, load, stalls=Stalls())) as loader:
            return self._measure(loader.next, seconds=seconds)

    def close(self) -> None:
        """Stops the reader thread."""
        self._running.close()

    def _measure(self, next_batch: Callable[[], Batch], *, seconds: float) -> Throughput:
        tokens = 0

        def step() -> Tensor:
            nonlocal tokens
            batch = next_batch()
            tokens = batch.tokens.numel()
            return self._running.executor.step(batch, lr=0.0).loss

        times = time_steps_for(step, seconds=seconds)
        return Throughput(tokens_per_s=tokens / times.median_s, jitter=times.spread / 1.349, steps=len(times.seconds))
