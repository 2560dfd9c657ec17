"""Training as a story: phases, steps, one step. Everything that observes or reacts is a hook (hooks/order.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from ropewalk.base.events import read_events, steps
from ropewalk.base.files import point
from ropewalk.base.progress import Progress, Silent, duration
from ropewalk.base.rendezvous import Rendezvous
from ropewalk.checkpoint.disk import Disk
from ropewalk.load.batch import Batch
from ropewalk.parallel.compat import version_warning
from ropewalk.parallel.mesh import leave

from .hooks.anomaly import RollBack
from .hooks.hook import Hook, named_hooks
from .hooks.order import ordered_hooks
from .settings import read_settings
from .training_run import TrainingRun


def train(
    folder: Path,
    *,
    progress: Progress | None = None,
    hooks: Iterable[Hook] = (),
    disk: Disk | None = None,
    rendezvous: Rendezvous | None = None,
    stays: bool = False,
) -> dict[str, float]:
    """Trains the run in `folder` from its newest complete checkpoint to its last step; returns its last metrics.

    `hooks` are called beside ropewalk's own and those of `train.hooks`. Checkpoints go to `disk`, by default this
    machine's. A failure is reported to the other ranks by `rendezvous`. With `stays` the ranks keep their process
    group, for what follows.
    """
    run = TrainingRun(folder, read_settings(folder), progress or Silent(), disk=disk)
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(run.close)
            stack.enter_context(run.interrupt)
            run.use(ordered_hooks(run, [*named_hooks(run.settings.train.hooks), *hooks]))
            for hook in reversed(run.hooks):
                stack.callback(hook.close)
            if rendezvous:
                # Reported before anything is closed, which may wait for the others.
                stack.enter_context(rendezvous.reporting(lambda: run.step))
            return train_run(run)
    finally:
        # Not when training failed: the others may be in the middle of a collective, and to leave takes all ranks.
        if run.ends_together and not stays:
            leave()


def train_run(run: TrainingRun) -> dict[str, float]:
    """Restores the run, trains its phases one after the other and ends it."""
    restore(run)
    first, start = run.step, _begin(run)
    while True:
        try:
            while run.phases.running and not run.requests.stop:
                _announce_phase(run)
                train_phase(run)
                if not run.requests.stop:
                    with run.during("restore"):
                        run.phases.advance()
            return _end(run, first=first, start=start)
        except RollBack as failure:
            _roll_back(run, failure)


def train_phase(run: TrainingRun) -> None:
    """Trains the remaining steps of the current phase."""
    for hook in run.hooks:
        hook.before_phase(run)
    run.phase_ended = run.in_step = False
    while not run.phase_ended:
        run.exchange_requests()
        if run.requests.interrupt:
            _leave(run)
        if run.requests.rollback:
            raise run.take_rollback(run.requests.rollback)
        if run.requests.stop:
            return
        train_step(run)
    for hook in run.hooks:
        hook.after_phase(run)


def train_step(run: TrainingRun) -> None:
    """One step: reads a batch, updates the weights, calls the hooks."""
    run.in_step = True
    for hook in run.hooks:
        hook.before_step(run)
    with run.during("data"):
        batch = _next_batch(run)
    for hook in run.hooks:
        hook.before_forward(run, batch)
    run.lr = run.phase.learning_rate(run.at.phase_step)
    with run.during("step"), run.same_bits():
        result = run.executor.step(batch, lr=run.lr)
    run.advance(batch)
    run.progress.advance(run.step)
    point(f"train.step:{run.step}")
    for hook in run.hooks:
        hook.after_step(run, result)
    for hook in run.hooks:
        hook.end_step(run)


def _next_batch(run: TrainingRun) -> Batch:
    """The batch of the next step, cut to the sequence length of a length ramp."""
    phase, step = run.phase.phase, run.at.phase_step
    batch = run.phase.data.loader.next(phase.rows(step)).cut(phase.length(step))
    for hook in run.hooks:
        batch = hook.on_batch(run, batch)
    return batch


def restore(run: TrainingRun, *, rolling_back: bool = False) -> None:
    """Continues from the newest whole checkpoint, or begins the first phase."""
    start = time.perf_counter()
    with run.during("restore"):
        path = run.phases.restore()
    if path or rolling_back:
        seconds = time.perf_counter() - start
        run.events.write("restored", step=run.step, path=str(path or ""), seconds=seconds)
    found = run.checkpointer.found
    if found and path:
        run.events.write("gathered", **dataclasses.asdict(found))
        sources = ", ".join(f"{size} bytes from {source}" for source, size in found.sources.items())
        run.say(f"step {found.step}: {sources}")
    if path and not rolling_back:
        run.say(f"continuing from {path}")


def _roll_back(run: TrainingRun, failure: RollBack) -> None:
    """Returns to the newest checkpoint, or to the beginning."""
    run.drop_rollback_requests()
    for hook in run.hooks:
        hook.before_rollback(run, failure.anomaly)
    restore(run, rolling_back=True)
    for hook in run.hooks:
        hook.after_rollback(run, failure.anomaly)
    run.progress.advance(run.step)


def _begin(run: TrainingRun) -> float:
    """Announces the run; when its first step begins."""
    planned = run.settings.planned
    run.checkpointer.spare(run.phases.stable_step)
    run.checkpointer.retain(best_step=run.phase.stopper.best_step if run.phases.running else 0)
    run.events.write(
        "train_started",
        step=run.step,
        device=str(run.device),
        world=planned.phases[0].plan.world,
        torch=torch.__version__,
        peak_flops=run.peak_flops,
        parameters=planned.phases[0].spec.parameters(),
        flops_per_token=planned.phases[0].spec.flops_per_token(),
    )
    warning = version_warning()
    if warning:
        run.warn(warning)
    run.progress.begin("train", planned.steps, "steps")
    run.progress.advance(run.step)
    if run.phases.running:
        for hook in run.hooks:
            hook.before_training(run)
    return time.perf_counter()


def _announce_phase(run: TrainingRun) -> None:
    """Announces that a phase begins or continues."""
    spec, start = run.phase.phase, run.phase.start
    if run.at.phase_step == 0:
        run.events.write("phase_started", step=run.step, phase=spec.index, name=spec.name, start_from=start)
        if start:
            run.say(f"starting from {start}")
        if len(run.settings.phases) > 1:
            run.say(f"phase {spec.name}: {spec.steps} steps of sequences of {spec.sequence_length} tokens")
    for contest in run.executor.contests:
        run.events.write("kernel_chosen", step=run.step, what=contest.what, milliseconds=contest.milliseconds)


def _leave(run: TrainingRun) -> None:
    """Ends as Ctrl-C does, or normally when a scheduler asked; the same command continues."""
    with run.during("leave"):
        for hook in run.hooks:
            hook.on_interrupt(run)
    run.ends_together = True
    raise KeyboardInterrupt


def _end(run: TrainingRun, *, first: int, start: float) -> dict[str, float]:
    for hook in run.hooks:
        hook.before_end(run)
    seconds = time.perf_counter() - start
    run.events.write("train_finished", step=run.step, seconds=seconds)
    trained = f"steps {first + 1} to {run.step}" if 0 < first < run.step else f"{run.step - first} steps"
    run.progress.end(f"{trained} in {duration(seconds)}")
    for hook in run.hooks:
        hook.after_training(run)
    run.ends_together = True
    return {"step": run.step, "tokens": run.at.tokens, **_last_losses(run)}


def _last_losses(run: TrainingRun) -> dict[str, float]:
    """The last training and validation loss, from the event log: there may have been nothing left to train."""
    events = list(read_events(run.events.path))
    found = {"train_loss": steps(events), "validation_loss": steps(events, "validation")}
    return {name: records[-1]["loss"] for name, records in found.items() if records}
