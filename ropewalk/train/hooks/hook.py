"""The moments of a training run at which something may be observed or added without touching the loop."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ropewalk.config.registry import Kind, Registry

if TYPE_CHECKING:
    from torch import Tensor

    from ropewalk.checkpoint.run_state import State
    from ropewalk.checkpoint.write.persist import SaveResult
    from ropewalk.load.batch import Batch
    from ropewalk.parallel.executor import StepResult

    from ..training_run import TrainingRun
    from .anomaly import Anomaly

HOOKS: Registry[Kind] = Registry("hook", {})
"""Hooks that `train.hooks` may name: a user's own."""
Activity = Literal["data", "step", "log", "probe", "validate", "evaluate", "save", "copy", "restore", "leave"]


class Hook:
    """Does nothing; override the moments you need, listed in the order of a step. Every rank calls every hook, in the
    order of hooks/order.py. `run` holds the position, the phase with its executor and data, the mesh, the event log;
    `run.request_save()`, `request_stop()` and `request_rollback()` may be called at any moment, on any rank."""

    def before_training(self, run: TrainingRun) -> None:
        """State is restored; `run.step` steps are complete. Not called when no step is left."""

    def before_phase(self, run: TrainingRun) -> None:
        """A phase begins or continues; its model and data are ready."""

    def before_step(self, run: TrainingRun) -> None:
        """Step `run.step + 1` begins; its batch is not read yet."""

    def on_batch(self, run: TrainingRun, batch: Batch) -> Batch:
        """The batch is read; the step trains on what is returned."""
        return batch

    def before_forward(self, run: TrainingRun, batch: Batch) -> None:
        """The batch is final, the weights are those before the step."""

    def on_gradients(self, run: TrainingRun, gradients: Mapping[str, Tensor]) -> None:
        """All gradients of step `run.step + 1` are computed, not yet clipped; they may be changed in place. Must not
        wait for the device. An optimizer on the host starts after this moment, not during the backward pass."""

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        """`run.step` steps are complete, perhaps still queued on the device. Reading a value of `result` waits for the
        device and slows training."""

    def end_step(self, run: TrainingRun) -> None:
        """The last moment of a step: here metrics are logged, the model is validated and saved. May wait."""

    def on_sync(self, run: TrainingRun) -> None:
        """The device has completed all steps: metrics are about to be read, the model to be validated or saved."""

    def read_metrics(self, run: TrainingRun) -> Mapping[str, Any]:
        """Further fields of the event `step`, which is about to be written."""
        return {}

    def on_metrics(self, run: TrainingRun, metrics: dict[str, Any]) -> None:
        """The event `step` was written, with these fields (docs/formats.md)."""

    def on_validation(self, run: TrainingRun, loss: float) -> None:
        """The validation loss was measured, in nats per token."""

    def on_anomaly(self, run: TrainingRun, anomaly: Anomaly) -> None:
        """A step went wrong, and the guard reacts as `anomaly.action` says."""

    def before_rollback(self, run: TrainingRun, anomaly: Anomaly) -> None:
        """The run is about to return to its newest checkpoint."""

    def after_rollback(self, run: TrainingRun, anomaly: Anomaly) -> None:
        """The run is back at an earlier step."""

    def on_save(self, run: TrainingRun, state: State) -> None:
        """A checkpoint of `state` is being written, in the background."""

    def after_save(self, run: TrainingRun, saved: SaveResult) -> None:
        """The checkpoint of step `saved.step` in `saved.path` is durable. Called on the first rank only."""

    def on_interrupt(self, run: TrainingRun) -> None:
        """Ctrl-C or a scheduler ends the process after the last complete step."""

    def after_phase(self, run: TrainingRun) -> None:
        """The last step of the phase is complete and saved."""

    def before_end(self, run: TrainingRun) -> None:
        """No step follows: what runs in the background is completed."""

    def after_training(self, run: TrainingRun) -> None:
        """The run has ended normally, or was stopped by a hook, and is saved."""

    def during(self, run: TrainingRun, activity: Activity) -> contextlib.AbstractContextManager[Any]:
        """A context that the loop enters around an activity."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Training has ended, normally or by an error; the last call of a hook."""


def problem_of(name: str) -> str:
    """What is wrong with a name in `train.hooks`, and what to do about it; empty if nothing is."""
    target = HOOKS[name].load()
    if not (isinstance(target, type) and issubclass(target, Hook)):
        return f'"{name}" is no hook; derive the class from `ropewalk.train.hooks.hook.Hook`'
    for method in sorted({*vars(target)} - {*vars(Hook)}):
        if method.startswith(("before_", "after_", "on_")) and callable(getattr(target, method)):
            near = difflib.get_close_matches(method, vars(Hook), n=1)
            remedy = f"did you mean `{near[0]}`?" if near else "rename it; `ropewalk.train.hooks.hook.Hook` lists them"
            return f'"{name}" defines `{method}`, which is not a moment of training; {remedy}'
    for method in sorted({*vars(target)} & {*vars(Hook)}):
        if inspect.isfunction(moment := vars(Hook)[method]) and inspect.isfunction(own := vars(target)[method]):
            wanted = [*inspect.signature(moment).parameters]
            try:
                inspect.signature(own).bind(*wanted)
            except TypeError:
                return f'`{method}` of "{name}" has other arguments; write `def {method}({", ".join(wanted)})`'
    try:
        inspect.signature(target).bind()
    except TypeError as error:
        return f'"{name}" cannot be made: {error}; give every argument of its constructor a default'
    return ""


def named_hooks(names: Iterable[str]) -> list[Hook]:
    """The hooks of `train.hooks`."""
    return [HOOKS[name].load()() for name in names]
