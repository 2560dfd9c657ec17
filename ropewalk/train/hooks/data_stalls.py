"""Data loading metrics: stalls by cause, skipped damage, retuned settings, changed mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ropewalk.load.adapt import Adapt
from ropewalk.load.config import Load
from ropewalk.load.loader import Loader
from ropewalk.load.stalls import CAUSES, Cause, Stalls, binding_cause, warning

from .hook import Hook

if TYPE_CHECKING:
    from ropewalk.parallel.executor import StepResult

    from ..training_run import TrainingRun

LEAST_WAIT_S = 0.1
"""Shorter waits between two log lines are not reported."""


def packages_folder(run: Path, load: Load) -> Path:
    """The folder for packs of rarely drawn sequences."""
    named = load.importance.packages if load.importance else ""
    return Path(named) if named else run / "packages"


class DataStalls(Hook):
    """Monitors the loader of the active phase; with `adapt`, retunes it."""

    def __init__(self, stalls: Stalls, *, adapt: bool) -> None:
        self._stalls, self._adapts = stalls, adapt
        self._adapt: Adapt | None = None
        self._reported: Cause | None = None
        self._begins = True

    def before_phase(self, run: TrainingRun) -> None:
        """Resets stall counters: opening the phase does not count."""
        loader, self._reported, self._begins = run.phase.data.loader, None, True
        self._adapt = Adapt(loader.knobs()) if self._adapts else None
        if loader.mixture_changed_at is not None:
            mixture = loader.order.mixture.to_json()[-1]
            run.events.write("mixture_changed", step=run.step, row=loader.mixture_changed_at, mixture=mixture)
            run.say(f"step {run.step}: the shares of the sources are others from here on: {mixture['weights']}")
        _report_damage(run, loader)
        self._stalls.take()

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        """Passes the losses of a step's sequences to importance sampling, if configured."""
        importance, read = run.phase.importance, run.phase.data.loader.last_read
        if importance:
            importance.after_step(result.sequence_losses, first=read.start, rows=len(read))
            for epoch in importance.take_drawn():
                run.events.write("importance", step=run.step, **epoch)

    def read_metrics(self, run: TrainingRun) -> Mapping[str, float | None]:
        """Stalls per step by cause since the last call, and the hit rate of importance sampling."""
        waited, loader = self._stalls.take(), run.phase.data.loader
        self._report_stall(run, waited)
        _report_damage(run, loader)
        if self._adapt and (change := self._adapt.observe(waited)):
            run.events.write("load_adapted", step=run.step, **change)
        waits = {f"data_{cause}_s": waited[f"{cause}_s"] / max(1.0, waited["batches"]) for cause in CAUSES}
        return {**waits, "importance_hit_rate": loader.sampler.counts()["hit_rate"] if loader.sampler else None}

    def after_phase(self, run: TrainingRun) -> None:
        counts = run.phase.data.loader.cache_counts()
        if counts:
            run.events.write("load_cached", step=run.step, **counts)

    def _report_stall(self, run: TrainingRun, waited: dict[str, float]) -> None:
        """Reports each cause once, with remedy; not at the first call of a phase, before anything was prefetched."""
        begins, self._begins = self._begins, False
        message = warning(waited) if waited["wait_s"] > LEAST_WAIT_S and not begins else None
        cause = binding_cause(waited) if message else None
        if message and cause != self._reported:
            run.warn(message)
        self._reported = cause


def _report_damage(run: TrainingRun, loader: Loader) -> None:
    for message in loader.take_warnings():
        run.warn(message)
