"""`train --profile`: traces a few steps of a run, as a trace file and a table.

The run is otherwise the same: equal weights, and full speed after these steps.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch.profiler import profile

from ropewalk.base.files import committed_folder, write_json

from ..measure.step_profiler import StepWindow, TraceRecorder, save_trace
from ..measure.trace import step_time
from .hook import Hook

if TYPE_CHECKING:
    from ropewalk.parallel.executor import StepResult

    from ..training_run import TrainingRun

FOLDER = "profile"
FORMAT = 1


class Profiler(Hook):
    """Traces `steps` steps of a run after a warm-up and commits `profile/` in the run directory."""

    def __init__(self, steps: int) -> None:
        self.table: dict[str, Any] | None = None
        """`profile/table.json`; None until it is written, and when no step was left to profile."""
        self._window = StepWindow(steps)
        self._recorder: TraceRecorder | None = None
        self._run: TrainingRun

    def before_training(self, run: TrainingRun) -> None:
        self._run = run
        self._window.place(remaining=run.settings.planned.steps - run.step)
        self._recorder = TraceRecorder(
            device=run.device, warmup=self._window.warmup_left, steps=self._window.left, on_trace=self._write
        )

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if self._recorder is None:
            return
        self._window.step_ended()
        self._recorder.step_ended()
        if self.table:
            self.close()

    def close(self) -> None:
        """Ends the profile with the steps recorded so far."""
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            recorder.close()

    def _write(self, profiler: profile) -> None:
        """Commits trace and table; torch's profiler calls it when the window is complete or it is stopped before."""
        if not self._window.recorded:
            return
        path, step = self._run.folder / FOLDER, self._run.step
        with committed_folder(path) as folder:
            time = step_time(save_trace(profiler, folder / "trace.json"))
            self.table = {
                "format": FORMAT,
                "first_step": step - time.steps + 1,
                "last_step": step,
                "device": str(self._run.device),
                **dataclasses.asdict(time),
            }
            write_json(folder / "table.json", self.table)
        self._run.progress.say(
            f"profiled {time.steps} steps up to {step}: {path / 'table.json'}; "
            f"https://ui.perfetto.dev opens {path / 'trace.json'}"
        )
