"""Continues a run with more steps or phases.

A change is accepted if the finished steps are the same under the new settings, or if the following steps can begin
elsewhere:

- In the same schedule: `constant`, `step` and `adaptive` at any step, `wsd` before its decay, every shape within its
  warm-up. The weights equal those of a run with that many steps from the start, bit for bit.
- `wsd` after its decay: from the checkpoint at the end of its stable part, which is kept for this. The
  checkpoints of the decay move to `checkpoints/decayed`.
- A schedule that has decayed (`cosine`, `linear`, `wsd` without that checkpoint, a phase that stopped early): finished
  steps stay, and a new cycle follows. `train.schedule.restarts` records where it began.
- Further `[[train.phases]]`, and changes to phases that have not begun.

Anything else is refused; `train.start_from` starts another run from the weights.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ropewalk.base.errors import ConfigError, DamagedCheckpoint, DamagedFile, RunConflict
from ropewalk.base.files import point, storage, sync_folder
from ropewalk.base.progress import counted
from ropewalk.checkpoint.format import list_checkpoints, read_checkpoint_manifest, verify_checkpoint
from ropewalk.checkpoint.policy.lease import retiring
from ropewalk.config.read import DEFAULT, Resolved
from ropewalk.config.resolved import FILE, load_resolved
from ropewalk.train.config import Schedule, Train
from ropewalk.train.hooks.validation import has_stopped
from ropewalk.train.phase_spec import PhaseSpec, common_steps, phases_of, same_but_steps, same_phase

from .recipe import Recipe

KEPT = "kept when the run continued"
"""Origin of settings by which the first steps were trained."""
DECAYED = "decayed"
"""Folder for the checkpoints of a decay that the longer run does not have."""
_KEPT_KEYS = ("warmup_steps", "restarts")

How = Literal["same schedule", "before the decay", "new cycle", "phases"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """How a run continues under new settings."""

    resolved: Resolved[Recipe]
    """The settings, including those that the run keeps."""
    how: How | None = None
    """None: nothing changes."""
    message: str = ""
    """`how` as a sentence."""
    step: int = 0
    """Finished steps."""
    before: int = 0
    """Total steps under the saved settings."""
    aside: tuple[Path, ...] = ()
    """Checkpoints that are not part of the longer run, newest first."""
    from_step: int = 0
    """The step that training continues from."""
    allows: bool = False
    """Whether changes of steps, phases, warm-up and restarts are accepted."""
    refusal: str = ""
    """Why they are refused."""

    def covers(self, key: str) -> bool:
        """Whether a change of the setting `key` is accepted."""
        return self.allows and (
            key == "train.steps"
            or key.startswith("train.phases")
            or key in {f"train.schedule.{name}" for name in _KEPT_KEYS}
        )

    def keeps(self, key: str) -> bool:
        """Whether the run, not the recipe, decides the setting `key`."""
        return self.resolved.origin(key) == KEPT

    def event(self) -> dict[str, Any]:
        """The fields of the event `continued`."""
        return {
            "step": self.step,
            "from_step": self.from_step,
            "before": self.before,
            "steps": self.resolved.value.train.total_steps,
            "how": self.how,
            "message": self.message,
        }

    def move_aside(self) -> None:
        """Moves the checkpoints of a decay away. If killed midway, the next call finds the same ones again."""
        for path in self.aside:
            with retiring(path) as free:
                if not free:
                    raise RunConflict(f"{path}: another process reads this checkpoint; try again later")
                _move(path, path.parent / DECAYED / path.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reached:
    """Position of the newest checkpoint of a run."""

    phase: int
    phase_step: int
    step: int
    ended: bool
    stopped: bool
    """Whether its phase has stopped early."""


def continuation(run: Path, resolved: Resolved[Recipe]) -> Continuation:
    """How the run in `run` continues under `resolved`; changes nothing yet."""
    saved = _saved(run)
    reached = _reached(run, saved.value.train) if saved else None
    if saved is None or reached is None:
        return Continuation(resolved=resolved)
    resolved = _with_kept(resolved, saved)
    before, now = _phases(saved.value), _phases(resolved.value)
    first = next((i for i, pair in enumerate(zip(before, now, strict=False)) if not same_phase(*pair)), None)
    place = min(len(before), len(now)) if first is None else first
    found = Continuation(
        resolved=resolved,
        step=reached.step,
        from_step=reached.step,
        before=saved.value.train.total_steps,
        allows=True,
    )
    if first is None and len(before) == len(now):
        return found
    if place > reached.phase:
        longest = max(phase.sequence_length for phase in before)
        too_long = [phase for phase in now if phase.sequence_length > longest]
        if too_long and resolved.value.model.position == "learned":
            text = f"the sequences of phase {too_long[0].name} are longer than the model's {longest} learned positions"
            return _refused(found, f"{text}; shorten them")
        return dataclasses.replace(found, how="phases", message=_phases_to_come(run, now[place:], reached))
    if place < reached.phase or place >= len(now):
        return _refused(found, f"{counted(reached.step, 'step')} are done and stay as they are")
    return _Change(run, found, saved.value.train, before[place], now[place], reached).decide(
        is_last=place == len(before) - 1
    )


class _Change:
    """A new number of steps for the current phase, or for the last one if it has ended."""

    def __init__(
        self, run: Path, found: Continuation, train: Train, before: PhaseSpec, now: PhaseSpec, reached: _Reached
    ) -> None:
        self._run, self._found, self._before, self._now, self._reached = run, found, before, now, reached
        self._has_phases = bool(train.phases or found.resolved.value.train.phases)

    def decide(self, *, is_last: bool) -> Continuation:
        found, before, now, reached = self._found, self._before, self._now, self._reached
        done = reached.phase_step
        if not same_but_steps(before, now):
            return _refused(found, f"{counted(reached.step, 'step')} were trained with the settings before")
        if now.steps < done or (now.steps == done and not reached.ended):
            return self._fewer()
        if now.steps == done:
            return found
        new_cycle_fits = reached.ended and is_last and not self._has_phases
        if reached.stopped:
            return self._new_cycle(f"it stopped early at step {reached.step}") if new_cycle_fits else self._add_phase()
        kept = self._with_warmup_of_before()
        if done <= common_steps(before, _last(kept, now.index)):
            return self._in_place(kept)
        older = self._before_the_decay(_last(kept, now.index)) if before.schedule.shape == "wsd" else None
        if older:
            return self._rewound(kept, *older)
        if new_cycle_fits:
            return self._new_cycle("")
        return self._add_phase() if reached.ended else self._finish_first()

    def _fewer(self) -> Continuation:
        done = self._reached.phase_step
        text = f"{_steps(done)} are done; {self._now.steps} would be fewer"
        if self._has_phases:
            return _refused(self._found, text)
        remedy = f"write `steps = {self._before.steps}` into the recipe, or name the run in its place, as in"
        return _refused(self._found, f"{text}: {remedy} `ropewalk run {self._run}`")

    def _in_place(self, kept: Recipe) -> Continuation:
        done, more = self._reached.phase_step, self._now.steps - self._reached.phase_step
        text = (
            f"{self._run}: continuing after step {self._reached.step}; {_steps(more)} more follow in the same schedule "
            f"({self._now.schedule.shape}), as in a run of {self._now.steps} steps from the start"
        )
        return self._taken(kept, how="same schedule", message=text + self._warmup_note(kept, done))

    def _rewound(self, kept: Recipe, step: int, aside: tuple[Path, ...]) -> Continuation:
        text = (
            f"{self._run}: continuing from step {step}, before the decay; the steps after it are trained again at the "
            f"peak, and the decay comes at the end of {self._now.steps} steps. The checkpoints of the first decay are "
            f"in checkpoints/{DECAYED}"
        )
        found = self._taken(kept, how="before the decay", message=text + self._warmup_note(kept, step))
        return dataclasses.replace(found, aside=aside, from_step=step)

    def _new_cycle(self, why: str) -> Continuation:
        """A new cycle of the schedule after the finished steps."""
        reached, schedule = self._reached, self._now.schedule
        begun = tuple(restart for restart in schedule.restarts if restart < reached.phase_step)
        train = self._found.resolved.value.train
        restarted = dataclasses.replace(train.schedule, restarts=(*begun, reached.phase_step))
        changed = dataclasses.replace(self._found.resolved.value, train=dataclasses.replace(train, schedule=restarted))
        problems = [what for section in (restarted, changed.train) for _, what in section.check()]
        more = self._now.steps - reached.phase_step
        if problems:
            return _refused(self._found, f"a new cycle of {_steps(more)} would follow: {problems[0]}")
        reason = f" ({why})" if why else ""
        if schedule.shape == "wsd" and not why:
            reason = " (no checkpoint from before its decay is kept)"
        text = (
            f"{self._run}: the first {reached.step} steps stay{reason}; a new {schedule.shape} cycle of {_steps(more)} "
            f"follows: {_phase_runner(schedule, more)}"
        )
        return self._taken(changed, how="new cycle", message=text)

    def _taken(self, recipe: Recipe, *, how: How, message: str) -> Continuation:
        before = self._found.resolved
        origins = dict(before.origins)
        for name in _KEPT_KEYS:
            if getattr(recipe.train.schedule, name) != getattr(before.value.train.schedule, name):
                origins[f"train.schedule.{name}"] = KEPT
        return dataclasses.replace(
            self._found, resolved=dataclasses.replace(before, value=recipe, origins=origins), how=how, message=message
        )

    def _add_phase(self) -> Continuation:
        """The phase has decayed, in a recipe that lists its phases."""
        more = self._now.steps - self._reached.phase_step
        text = (
            f"phase {self._before.name} ({self._before.schedule.shape}) has ended, and other steps would change its "
            f"schedule{self._warmup_remedy()}; add a [[train.phases]] table with `steps = {more}` instead"
        )
        return _refused(self._found, text)

    def _finish_first(self) -> Continuation:
        reached, before = self._reached, self._before
        text = (
            f"the run is at step {reached.step}, and with other steps its schedule ({before.schedule.shape}) would "
            f"have been another one so far{self._warmup_remedy()}; let it end with {_steps(before.steps)}, then "
            "continue: a new cycle follows"
        )
        return _refused(self._found, text)

    def _with_warmup_of_before(self) -> Recipe:
        """The settings with the finished steps' warm-up, if it depends on the number of steps."""
        recipe, before = self._found.resolved.value, self._before
        if self._has_phases or recipe.train.schedule.warmup_steps is not None:
            return recipe
        warmup = before.schedule.warmup(before.schedule.cycles(before.steps)[-1][1])
        kept = dataclasses.replace(recipe.train.schedule, warmup_steps=warmup)
        changed = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, schedule=kept))
        same = same_phase(_last(changed, self._now.index), self._now)
        return recipe if same else changed

    def _warmup_note(self, kept: Recipe, done: int) -> str:
        warmup = kept.train.schedule.warmup_steps
        if warmup == self._found.resolved.value.train.schedule.warmup_steps:
            return ""
        return f" with `train.schedule.warmup_steps={warmup}`, the warm-up of the first {done}"

    def _warmup_remedy(self) -> str:
        """The remedy if only the warm-up differs."""
        before, now = self._before, self._now
        old, new = (phase.schedule.warmup(phase.schedule.cycles(phase.steps)[-1][1]) for phase in (before, now))
        return f" (its warm-up would be {new} steps, not {old}: `warmup_steps = {old}` keeps it)" if old != new else ""

    def _before_the_decay(self, now: PhaseSpec) -> tuple[int, tuple[Path, ...]] | None:
        """The step of the newest whole checkpoint before the decay, and the checkpoints after it, newest first; None if
        there is none, or if a copy elsewhere would be found instead."""
        if self._found.resolved.value.checkpoint.tiers.used:
            return None
        common, after = common_steps(self._before, now), list[Path]()
        for path in reversed(list_checkpoints(self._run / "checkpoints")):
            try:
                manifest = read_checkpoint_manifest(path)
            except DamagedCheckpoint:
                continue
            if manifest.phase == now.index and manifest.phase_step <= common and not verify_checkpoint(path):
                return manifest.step, tuple(after)
            after.append(path)
        return None


def _saved(run: Path) -> Resolved[Recipe] | None:
    """The saved settings of a run; None if there are none or they cannot be read, which `open_run` reports."""
    if not (run / FILE).exists():
        return None
    try:
        return load_resolved(run, Recipe)
    except (ConfigError, DamagedFile):
        return None


def _reached(run: Path, train: Train) -> _Reached | None:
    """Position of the newest checkpoint with a readable manifest."""
    for path in reversed(list_checkpoints(run / "checkpoints")):
        try:
            manifest = read_checkpoint_manifest(path)
        except DamagedCheckpoint:
            continue
        return _Reached(
            phase=manifest.phase,
            phase_step=manifest.phase_step,
            step=manifest.step,
            ended=manifest.phase_ended,
            stopped=manifest.phase_ended and has_stopped(manifest.validation, train.early_stop),
        )
    return None


def _with_kept(resolved: Resolved[Recipe], saved: Resolved[Recipe]) -> Resolved[Recipe]:
    """`resolved` with the settings that the run keeps, where the recipe does not set them."""
    train, before = resolved.value.train, saved.value.train
    if train.phases:
        return resolved
    kept: dict[str, Any] = {}
    for name in _KEPT_KEYS:
        key = f"train.schedule.{name}"
        if saved.origin(key) == KEPT and resolved.origin(key) in (DEFAULT, KEPT):
            kept[name] = getattr(before.schedule, name)
    if "restarts" in kept:
        kept["restarts"] = tuple(restart for restart in kept["restarts"] if restart < train.total_steps)
    schedule = dataclasses.replace(train.schedule, **kept)
    value = dataclasses.replace(resolved.value, train=dataclasses.replace(train, schedule=schedule))
    origins: Mapping[str, str] = {**resolved.origins, **{f"train.schedule.{name}": KEPT for name in kept}}
    return dataclasses.replace(resolved, value=value, origins=origins)


def _phases(recipe: Recipe) -> tuple[PhaseSpec, ...]:
    return phases_of(recipe.train, sequence_length=recipe.load.sequence_length)


def _last(recipe: Recipe, index: int) -> PhaseSpec:
    return _phases(recipe)[index]


def _refused(found: Continuation, why: str) -> Continuation:
    return dataclasses.replace(found, allows=False, refusal=why)


def _phases_to_come(run: Path, phases: tuple[PhaseSpec, ...], reached: _Reached) -> str:
    done = f"{run}: {_steps(reached.step)} are done"
    if not phases:
        return f"{done}; the phases that have not begun are left out"
    listed = ", ".join(f"phase {phase.name} ({_steps(phase.steps)})" for phase in phases)
    return f"{done} and stay as they are; then {listed}"


def _phase_runner(schedule: Schedule, steps: int) -> str:
    """The learning rate in a cycle, in words."""
    warmup = schedule.warmup(steps)
    up = f"learning rate up to {schedule.peak_lr:g} in {_steps(warmup)}" if warmup else f"from {schedule.peak_lr:g}"
    if schedule.shape in ("cosine", "linear", "wsd"):
        return f"{up}, down to {schedule.final_lr_ratio * schedule.peak_lr:g} at the end"
    return f"{up}, then {schedule.shape}"


def _steps(number: int) -> str:
    return counted(number, "step")


def _move(path: Path, target: Path) -> None:
    with storage(f"moving {path}"):
        target.parent.mkdir(exist_ok=True)
        point(f"checkpoint.aside:{path.name}")
        shutil.rmtree(target, ignore_errors=True)
        path.rename(target)
        sync_folder(target.parent)
        sync_folder(path.parent)
