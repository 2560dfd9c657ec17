"""When the next checkpoint is due: at a fixed interval, or as `auto` decides from measurements of this run."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ropewalk.base.errors import StorageError
from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.coordinator import Coordinator, decided
from ropewalk.checkpoint.policy.frequency import Frequency, SaveDecision, read_learned, write_learned
from ropewalk.checkpoint.write.persist import SaveResult
from ropewalk.config.ranks import Ranks

from .hooks.watchdog import heartbeat_path

_DECIDE_EVERY = 16
"""Steps between decisions of several ranks, which must wait for each other to decide."""

Note = dict[str, Any]
"""What `auto` has learned by a moment, as it is kept beside the checkpoints."""


class Interval:
    """Decides which steps are saved. With `auto`, rank 0 measures and decides for all ranks."""

    def __init__(
        self,
        run: Path,
        settings: Checkpoints,
        *,
        place: Ranks,
        coordinator: Coordinator,
        ranks: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._folder, self._heartbeat = run / "checkpoints", heartbeat_path(run, place.rank)
        self._settings, self._place, self._coordinator, self._clock = settings, place, coordinator, clock
        self._frequency = Frequency(
            overhead=settings.max_overhead, mtbf_hours=settings.mtbf_hours, ranks=ranks, clock=clock
        )
        self._decision = self._frequency.decide()
        self._asked, self._begun, self._has_news = 0, False, False
        self._warm = False
        self._span_began: float | None = None
        self._span_steps, self._span_saves, self._span_copies = 0, False, False
        self._under_way: dict[int, tuple[float, float]] = {}
        """By step, of saves that are not durable yet: seconds that they took between steps, and those for which they
        had blocked training by then."""
        self._wrong: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.saved_at = 0
        """The last step that was saved, or that the run continued from."""

    # Decisions

    def due(self, step: int) -> bool:
        """Whether `step` is to be saved."""
        if not self._is_auto:
            return step % self._settings.save_every_steps == 0
        return step - self.saved_at >= self._decision.steps

    def until_due(self, step: int) -> int:
        """Steps from `step`, which is done, to the next one that is to be saved."""
        if not self._is_auto:
            return self._settings.save_every_steps - step % self._settings.save_every_steps
        return max(1, self.saved_at + self._decision.steps - step)

    def decide(self) -> SaveDecision | None:
        """The new interval of `auto`, when it has changed by a tenth or more; None otherwise. All ranks must call."""
        if not self._is_auto:
            return None
        if self._has_news:
            self._has_news = False
            return self._decision
        self._asked += 1
        if self._place.world > 1 and self._asked % _DECIDE_EVERY:
            return None
        new, old = self._decided(), self._decision
        if abs(new.steps - old.steps) < 0.1 * old.steps and new.bound == old.bound:
            return None
        self._decision = new
        return new

    def _decided(self) -> SaveDecision:
        # By what rank 0 measured: ranks that go by their own clocks would save different steps.
        found = decided(self._coordinator, lambda: dataclasses.asdict(self._frequency.decide()), leads=self._leads)
        return SaveDecision(**found)

    # Measurements

    def step_began(self) -> None:
        """A step begins."""
        if self._span_began is None:
            self._span_began = self._clock()
        self._span_steps += 1
        self._span_saves |= bool(self._under_way)

    def steps_settled(self, *, copying: bool) -> None:
        """The device has done all steps so far; takes the time of those since the last call. `copying`: a copy to
        memory alone is under way."""
        began, steps, saves, copies = self._span_began, self._span_steps, self._span_saves, self._span_copies
        self._forget_span()
        self._span_copies = copying
        if began is None:
            return
        saves |= bool(self._under_way)
        # The first steps of a process compile and fill caches; those beside a copy tell nothing of saves.
        if self._warm and (saves or not (copies or copying)):
            self._frequency.saw_steps(self._clock() - began, steps=steps, writing=saves)
        self._warm = True

    def saving(self, step: int, *, spent_s: float, blocked_s: float) -> None:
        """A save of `step` is under way, for which training stood still for `spent_s` between two steps; of this the
        save counts `blocked_s` as waiting."""
        self._under_way[step] = spent_s, blocked_s

    def saved(self, saved: SaveResult) -> None:
        """A save has become durable, or failed."""
        spent_s, known_s = self._under_way.pop(saved.step, (saved.blocked_s, saved.blocked_s))
        if saved.error is None:
            inside_s = max(0.0, saved.blocked_s - known_s)
            # The next one is written when all of it is done.
            self._frequency.saw_save(
                blocked_s=spent_s + inside_s, inside_s=inside_s, persist_s=saved.persist_s + saved.after_s
            )

    def _forget_span(self) -> None:
        self._span_began, self._span_steps, self._span_saves = None, 0, False

    # What outlives the process

    def begin(self, *, warn: Callable[[str], Any]) -> None:
        """Goes on from what earlier launches have learned, of which one that did not stop well has failed. Only the
        first call does anything but forget the steps under way. All ranks must call."""
        self._forget_span()
        if self._begun or not self._is_auto:
            return
        self._begun = True
        if self._leads:
            found = read_learned(self._folder, warn=warn)
            if found:
                self._frequency.load(found)
                if found["alive"]:
                    self._frequency.saw_failure(lived_s=self._lived_since(found["time"]))
            self.keep(self.note())
        self._decision = self._decided()
        self._has_news = self._decision.bound != "first" or self._decision.failures > 0

    def note(self) -> Note:
        """What was learned so far."""
        return self._frequency.state()

    def keep(self, note: Note, *, alive: bool = True) -> None:
        """Makes a note durable; any thread may. A disk that refuses it costs no more than what was learned."""
        if self._is_auto and self._leads:
            try:
                write_learned(self._folder, note, alive=alive, time=time.time())
            except StorageError as error:
                self._wrong.put(f"what `checkpoint.save_every` has learned was not kept: {error}")

    def stop(self) -> None:
        """The run stops with all that it has made saved: the next launch is no restart after a failure."""
        if self._begun:
            self.keep(self.note(), alive=False)

    def warnings(self) -> list[str]:
        """What went wrong since the last call."""
        found = []
        while not self._wrong.empty():
            found.append(self._wrong.get())
        return found

    def _lived_since(self, moment: float) -> float:
        """Seconds for which the last launch went on after `moment`, by its last heartbeat."""
        try:
            return max(0.0, self._heartbeat.stat().st_mtime - moment)
        except OSError:
            return 0.0

    @property
    def _is_auto(self) -> bool:
        return self._settings.save_every == "auto"

    @property
    def _leads(self) -> bool:
        return self._place.rank == 0
