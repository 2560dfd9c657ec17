"""Decides when to checkpoint: at a fixed interval, or with `auto` from overhead measured in this run."""

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
"""Steps between decisions with several ranks, because a decision synchronizes them."""

Note = dict[str, Any]
"""What `auto` has learned, as saved beside the checkpoints."""


class Interval:
    """Decides which steps to save. With `auto`, rank 0 measures and decides for all ranks."""

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
        """Saves that are not durable yet, by step: (seconds between steps, seconds of them that blocked training)."""
        self._wrong: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.saved_at = 0
        """The last saved step, or the step resumed from."""

    # Decisions

    def due(self, step: int) -> bool:
        """Whether to save `step`."""
        if not self._is_auto:
            return step % self._settings.save_every_steps == 0
        return step - self.saved_at >= self._decision.steps

    def until_due(self, step: int) -> int:
        """Steps from the completed step `step` to the next save."""
        if not self._is_auto:
            return self._settings.save_every_steps - step % self._settings.save_every_steps
        return max(1, self.saved_at + self._decision.steps - step)

    def decide(self) -> SaveDecision | None:
        """The new interval of `auto` if it changed by at least 10 %, else None. All ranks must call."""
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
        # Rank 0's measurements: with their own clocks, ranks would save different steps.
        found = decided(self._coordinator, lambda: dataclasses.asdict(self._frequency.decide()), leads=self._leads)
        return SaveDecision(**found)

    # Measurements

    def step_began(self) -> None:
        """Marks the start of a step."""
        if self._span_began is None:
            self._span_began = self._clock()
        self._span_steps += 1
        self._span_saves |= bool(self._under_way)

    def steps_settled(self, *, copying: bool) -> None:
        """Records the time of the steps since the last call; the device has completed them. `copying`: a memory-only
        copy is in flight."""
        began, steps, saves, copies = self._span_began, self._span_steps, self._span_saves, self._span_copies
        self._forget_span()
        self._span_copies = copying
        if began is None:
            return
        saves |= bool(self._under_way)
        # The first steps of a process compile and fill caches; steps during a memory copy are not comparable.
        if self._warm and (saves or not (copies or copying)):
            self._frequency.saw_steps(self._clock() - began, steps=steps, writing=saves)
        self._warm = True

    def saving(self, step: int, *, spent_s: float, blocked_s: float) -> None:
        """Records that a save of `step` is in flight. Training was blocked for `spent_s` between two steps, of which
        the save reports `blocked_s`."""
        self._under_way[step] = spent_s, blocked_s

    def saved(self, saved: SaveResult) -> None:
        """Records that a save became durable or failed."""
        spent_s, known_s = self._under_way.pop(saved.step, (saved.blocked_s, saved.blocked_s))
        if saved.error is None:
            inside_s = max(0.0, saved.blocked_s - known_s)
            # The next save can start only after both.
            self._frequency.saw_save(
                blocked_s=spent_s + inside_s, inside_s=inside_s, persist_s=saved.persist_s + saved.after_s
            )

    def _forget_span(self) -> None:
        self._span_began, self._span_steps, self._span_saves = None, 0, False

    # What outlives the process

    def begin(self, *, warn: Callable[[str], Any]) -> None:
        """Loads measurements of earlier launches; a launch without clean shutdown counts as a failure. Later calls only
        reset the current step measurement. All ranks must call."""
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
        """The measurements so far."""
        return self._frequency.state()

    def keep(self, note: Note, *, alive: bool = True) -> None:
        """Saves a note durably; thread-safe. A storage error costs only these measurements."""
        if self._is_auto and self._leads:
            try:
                write_learned(self._folder, note, alive=alive, time=time.time())
            except StorageError as error:
                self._wrong.put(f"what `checkpoint.save_every` has learned was not kept: {error}")

    def stop(self) -> None:
        """Records a clean shutdown: the next launch does not count a failure."""
        if self._begun:
            self.keep(self.note(), alive=False)

    def warnings(self) -> list[str]:
        """Storage errors since the last call."""
        found = []
        while not self._wrong.empty():
            found.append(self._wrong.get())
        return found

    def _lived_since(self, moment: float) -> float:
        """Seconds the last launch continued after `moment`, by its last heartbeat."""
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
