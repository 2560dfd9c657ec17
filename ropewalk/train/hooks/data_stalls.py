"""What a run tells about its reading: waiting by cause, damage that is left out, settings that were retuned, mixtures
that changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ropewalk.base.events import EventLog
from ropewalk.load.adapt import Adapt
from ropewalk.load.config import Load
from ropewalk.load.loader import Loader
from ropewalk.load.stalls import CAUSES, Cause, Stalls, binding_cause, warning

from ..importance import ByImportance

LEAST_WAIT_S = 0.1
"""Waiting between two lines that is not worth a word."""


def packages_folder(run: Path, load: Load) -> Path:
    """Where a run packs the sequences that it draws seldom."""
    named = load.importance.packages if load.importance else ""
    return Path(named) if named else run / "packages"


class ReadingWatch:
    """Follows the loader of the phase at work; with `adapt` it retunes it."""

    def __init__(
        self, events: EventLog, *, say: Callable[[str], None], warn: Callable[[str], None], adapt: bool
    ) -> None:
        self.stalls = Stalls()
        self._events, self._say, self._warn, self._adapts = events, say, warn, adapt
        self._loader: Loader | None = None
        self._adapt: Adapt | None = None
        self._told: Cause | None = None
        self._begins = True

    def enter(self, loader: Loader, *, step: int) -> None:
        """A phase begins or goes on at `step` with `loader`: what was spent on opening it does not count."""
        self._loader, self._told, self._begins = loader, None, True
        self._adapt = Adapt(loader.knobs()) if self._adapts else None
        if loader.mixture_changed_at is not None:
            mixture = loader.order.mixture.to_json()[-1]
            self._events.write("mixture_changed", step=step, row=loader.mixture_changed_at, mixture=mixture)
            self._say(f"step {step}: the shares of the sources are others from here on: {mixture['weights']}")
        self._tell_damage(loader)
        self.stalls.take()

    def read(self, step: int) -> dict[str, float | None]:
        """What a step waited for, on average since the last call, as fields of the event of `step`, and the share of
        drawn sequences that were in memory; warns of what is worth it."""
        assert self._loader, "no phase is at work"
        waited = self.stalls.take()
        self._tell_waiting(waited)
        self._tell_damage(self._loader)
        if self._adapt and (change := self._adapt.observe(waited)):
            self._events.write("load_adapted", step=step, **change)
        figures = {f"data_{cause}_s": waited[f"{cause}_s"] / max(1.0, waited["batches"]) for cause in CAUSES}
        sampler = self._loader.sampler
        return {**figures, "importance_hit_rate": sampler.counts()["hit_rate"] if sampler else None}

    def after_step(self, importance: ByImportance | None, losses: Tensor | None, *, step: int) -> None:
        """Hands the losses of a step's sequences on, where sequences are drawn by them; an epoch that was drawn for it
        is an event."""
        if importance is None:
            return
        assert self._loader, "no phase is at work"
        read = self._loader.last_read
        importance.after_step(losses, first=read.start, rows=len(read))
        for figures in importance.take_drawn():
            self._events.write("importance", step=step, **figures)

    def leave(self, step: int) -> None:
        """The phase has ended: what its caches did is an event."""
        counts = self._loader.cache_counts() if self._loader else {}
        if counts:
            self._events.write("load_cached", step=step, **counts)

    def _tell_waiting(self, waited: dict[str, float]) -> None:
        """With cause and remedy; again only when the cause is another. Not at the first call: the first batches of a
        phase are waited for whatever the settings, nothing could be read ahead."""
        begins, self._begins = self._begins, False
        message = warning(waited) if waited["wait_s"] > LEAST_WAIT_S and not begins else None
        cause = binding_cause(waited) if message else None
        if message and cause != self._told:
            self._warn(message)
        self._told = cause

    def _tell_damage(self, loader: Loader) -> None:
        for message in loader.take_warnings():
            self._warn(message)
