"""How fast the step of a run is: on a batch that lies ready, or fed by its loader under other settings."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ropewalk.config.ranks import ranks
from ropewalk.load.batch import Batch
from ropewalk.load.config import Load
from ropewalk.load.loader import Loader
from ropewalk.load.stalls import Stalls
from ropewalk.parallel.executor import Points
from ropewalk.parallel.mesh import pick_device

from ..active_phase import ActivePhase
from ..data import open_data
from ..settings import Settings

WARMUP_STEPS = 2
"""The first steps ask the system for memory and a GPU for its libraries."""
LEAST_STEPS, MOST_STEPS = 5, 200


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPace:
    """Steps, one after the other."""

    tokens_per_s: float
    jitter: float
    """Standard deviation of a step's seconds over their mean."""
    steps: int


def device_of(settings: Settings) -> torch.device:
    """Where the run trains."""
    return pick_device(settings.planned.phases[0].plan, ranks())


def open_loader(settings: Settings, load: Load, *, stalls: Stalls) -> Loader:
    """The batches of the first phase as training would read them with the settings `load`; nothing is verified."""
    changed = dataclasses.replace(settings, load=load)
    data = open_data(changed, changed.phases[0], verify=False, device=device_of(settings), stalls=stalls)
    return data.loader


class Bench:
    """The model and optimizer of a run's first phase with fresh weights, for measuring; nothing is kept."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        if settings.train.threads:
            torch.set_num_threads(settings.train.threads)
        self._running = ActivePhase(settings, 0, device=device_of(settings), points=Points(), verify=False)

    def alone(self, *, seconds: float) -> StepPace:
        """The step by itself."""
        batch = self._running.data.loader.next()
        return self._measure(lambda: batch, seconds=seconds)

    def fed(self, load: Load, *, seconds: float) -> StepPace:
        """The step with the batches of its loader."""
        with contextlib.closing(open_loader(self._settings, load, stalls=Stalls())) as loader:
            return self._measure(loader.next, seconds=seconds)

    def close(self) -> None:
        """Stops the reading thread."""
        self._running.close()

    def _measure(self, batch_of: Callable[[], Batch], *, seconds: float) -> StepPace:
        times: list[float] = []
        tokens = 0
        while len(times) < LEAST_STEPS + WARMUP_STEPS or (sum(times) < seconds and len(times) < MOST_STEPS):
            start = time.perf_counter()
            batch = batch_of()
            self._running.executor.step(batch, lr=0.0).loss.item()  # reading the loss waits for the device
            times.append(time.perf_counter() - start)
            tokens = batch.tokens.numel()
        measured = times[WARMUP_STEPS:]
        median = statistics.median(measured)
        low, _, high = statistics.quantiles(measured, n=4)
        return StepPace(tokens_per_s=tokens / median, jitter=(high - low) / 1.349 / median, steps=len(measured))
