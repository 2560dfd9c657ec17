"""`train --profile`: a few steps under torch's profiler, told as a trace and as a table.

The run is the one without a profile: the same weights, and after these steps the same speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ropewalk.base.files import committed_folder, read_json, write_json
from ropewalk.base.progress import Progress
from ropewalk.config.quiet import quiet_profiler
from ropewalk.config.ranks import ranks
from ropewalk.parallel.labels import label
from ropewalk.parallel.mesh import pick_device

from ..hooks.hook import Hook
from ..loop import train
from ..settings import read_settings
from .trace import step_time

FOLDER = "profile"
FORMAT = 1
WARMUP_STEPS = 2
"""Steps before the profiled ones: the first ask the system for memory and a GPU for its libraries."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """What came of a training with a profile."""

    figures: dict[str, float]
    """As `train` returns them."""
    table: dict[str, Any] | None
    """`profile/table.json`; None when no step was left to profile."""


def train_profiled(run: Path, *, steps: int, progress: Progress) -> Profiled:
    """`train`, and `profile/` of `steps` of its steps (or of those that are left)."""
    settings = read_settings(run)
    device = pick_device(settings.planned.phases[0].plan, ranks())
    hook = Profile(run / FOLDER, steps=steps, last_step=settings.planned.steps, device=device, progress=progress)
    with contextlib.closing(hook):
        figures = train(run, progress=progress, hooks=[hook])
    return Profiled(figures, hook.table)


class Profile(Hook):
    """Profiles the steps of a run after `WARMUP_STEPS`, counted from where it goes on, and commits `folder`."""

    def __init__(self, folder: Path, *, steps: int, last_step: int, device: torch.device, progress: Progress) -> None:
        self._folder, self._steps, self._last_step = folder, steps, last_step
        self._device, self._progress = device, progress
        self._profiler: profile | None = None
        self._warmup_left = WARMUP_STEPS
        self._step = 0
        self.table: dict[str, Any] | None = None
        """What was written, None until then."""

    def before_training(self, step: int) -> None:
        left = self._last_step - step
        self._warmup_left = warmup = min(WARMUP_STEPS, left - 1)
        quiet_profiler()
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])],
            schedule=schedule(wait=0, warmup=warmup, active=min(self._steps, left - warmup), repeat=1),
            on_trace_ready=self._write,
            acc_events=True,  # there is one cycle; without this torch 2.11 warns about those before it
        )
        self._profiler.start()

    def after_step(self, step: int) -> None:
        if self._profiler is None:
            return
        if self._device.type == "cuda":
            # The host runs ahead of a GPU: without waiting, a step would seem to take the time of its launches.
            with label("device wait"):
                torch.cuda.synchronize(self._device)
        self._step = step
        self._warmup_left -= 1
        self._profiler.step()
        if self.table:
            self.close()

    def close(self) -> None:
        """Ends the profile, with the steps that there are; called at the latest when training ends, by whatever."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()

    def _write(self, profiler: profile) -> None:
        """Commits trace and table; called by the profiler when it has its steps or is stopped before."""
        if self._warmup_left >= 0:
            return
        with committed_folder(self._folder) as folder:
            profiler.export_chrome_trace(str(folder / "trace.json"))
            with open(folder / "trace.json", "rb") as file:
                os.fsync(file.fileno())
            time = step_time(read_json(folder / "trace.json", what="trace"))
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
