"""`train --profile`: traces a few steps of a run, as a trace file and a table.

The run is otherwise the same: equal weights, and full speed after these steps.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import profile

from ropewalk.base.files import committed_folder, write_json
from ropewalk.base.progress import Progress
from ropewalk.config.ranks import ranks
from ropewalk.parallel.mesh import pick_device

from ..measure.step_profiler import StepWindow, TraceRecorder, save_trace
from ..measure.trace import step_time
from ..settings import read_settings
from .hook import Hook

if TYPE_CHECKING:
    from ropewalk.parallel.executor import StepResult

    from ..training_run import TrainingRun

FOLDER = "profile"
FORMAT = 1


class Profiler(Hook):
    """Traces `steps` steps of a run after a warm-up and commits `profile/` in the run directory. Close it when training
    ends, even by an error."""

    def __init__(self, run: Path, *, steps: int, progress: Progress) -> None:
        self.table: dict[str, Any] | None = None
        """`profile/table.json`; None until it is written, and when no step was left to profile."""
        self._folder, self._progress = run / FOLDER, progress
        planned = read_settings(run).planned
        self._last_step, self._device = planned.steps, pick_device(planned.phases[0].plan, ranks())
        self._window = StepWindow(steps)
        self._recorder: TraceRecorder | None = None
        self._step = 0

    def before_training(self, run: TrainingRun) -> None:
        self._window.place(remaining=self._last_step - run.step)
        self._recorder = TraceRecorder(
            device=self._device, warmup=self._window.warmup_left, steps=self._window.left, on_trace=self._write
        )

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if self._recorder is None:
            return
        self._step = run.step
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
        with committed_folder(self._folder) as folder:
            time = step_time(save_trace(profiler, folder / "trace.json"))
            self.table = {
                "format": FORMAT,
                "first_step": self._step - time.steps + 1,
                "last_step": self._step,
                "device": str(self._device),
                **dataclasses.asdict(time),
            }
            write_json(folder / "table.json", self.table)
        self._progress.say(
            f"profiled {time.steps} steps up to {self._step}: {self._folder / 'table.json'}; "
            f"https://ui.perfetto.dev opens {self._folder / 'trace.json'}"
        )
