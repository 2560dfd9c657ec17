"""The step profiler: warm up, run steps, record how long they take and where the time goes.

Given a step function, `time_steps` times it (`doctor data`) and `profile_steps` also traces it (`profile`,
`bench train`). In a run, hooks record a window of its steps: `train --profile` a trace (hooks/profiler.py),
`--timeline` what every rank does (hooks/timeline.py).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from ropewalk.base.files import read_json
from ropewalk.config.quiet import quiet_profiler
from ropewalk.parallel.compat import peak_memory_bytes
from ropewalk.parallel.labels import label
from ropewalk.plan.roofline import Kind

from .trace import kind_times

WARMUP_STEPS = 2
"""Steps before the recorded ones: the first allocate memory and load a GPU's libraries."""
COLD_WARMUP_STEPS = 3
"""The same for a step function in a new process, which may also compile kernels."""
TRACED_STEPS = 3
MIN_STEPS, MAX_STEPS = 5, 200
"""Steps of a timing that is limited by seconds."""

StepFunction = Callable[[], Tensor]
"""Runs one step and returns its loss, without waiting for the device."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Timed steps, warm-up excluded."""

    seconds: tuple[float, ...]
    """Of each step."""
    loss: float
    """Of the last step."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range over the median; 0 for a single step."""
        if len(self.seconds) == 1:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / self.median_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """What was measured of a step function."""

    steps: int
    step_ms: float
    """Median."""
    spread: float
    """Half of the interquartile range, over the median."""
    kinds: dict[Kind, float]
    """Milliseconds by op class; they add up to `step_ms`."""
    profiled_ms: float
    """A step under torch's profiler, which slows the host down."""
    memory_bytes: int
    """Peak memory: allocated on a GPU, resident in this process on a CPU."""
    loss: float


class StepWindow:
    """The steps of a run that a hook records: `steps` after `WARMUP_STEPS`."""

    def __init__(self, steps: int) -> None:
        self.warmup_left = self.left = self.recorded = 0
        self._steps = steps

    def place(self, *, remaining: int) -> None:
        """Begins the warm-up. Of `remaining` steps of the run at least the last is recorded."""
        self.warmup_left = min(WARMUP_STEPS, remaining - 1)
        self.left = min(self._steps, remaining - self.warmup_left)

    @property
    def is_open(self) -> bool:
        """Whether the current step is recorded."""
        return self.left > 0 and not self.warmup_left

    def step_ended(self) -> None:
        """Call after every step."""
        if self.is_open:
            self.left, self.recorded = self.left - 1, self.recorded + 1
        elif self.warmup_left:
            self.warmup_left -= 1


class TraceRecorder:
    """torch's profiler over `steps` steps after `warmup` steps; `on_trace` gets the profiler when they are complete, or
    when it is closed before. Call `step_ended` after every step."""

    def __init__(self, *, device: torch.device, warmup: int, steps: int, on_trace: Callable[[profile], object]) -> None:
        self._device = device
        quiet_profiler()
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
            schedule=schedule(wait=0, warmup=warmup, active=steps, repeat=1),
            on_trace_ready=on_trace,
            acc_events=True,  # there is one cycle; without this torch 2.11 warns about the cycles before it
        )
        self._profiler.start()

    def step_ended(self) -> None:
        if self._device.type == "cuda":
            # The host runs ahead of a GPU: without waiting, a step would seem to take only the time of its launches.
            with label("device wait"):
                torch.cuda.synchronize(self._device)
        self._profiler.step()

    def close(self) -> None:
        self._profiler.stop()


def save_trace(profiler: profile, path: Path) -> dict[str, Any]:
    """Writes a profiler's trace durably and returns its contents."""
    profiler.export_chrome_trace(str(path))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    trace: dict[str, Any] = read_json(path, what="trace")
    return trace


def profile_steps(step: StepFunction, *, device: torch.device, steps: int) -> StepProfile:
    """Times `steps` steps after a warm-up, then traces a few more."""
    for _ in range(COLD_WARMUP_STEPS):
        step()
    times = time_steps(step, device=device, steps=steps)
    memory_bytes = peak_memory_bytes(device)
    kinds = kind_times(_trace(step, device=device))
    step_ms = 1e3 * times.median_s
    return StepProfile(
        steps=steps,
        step_ms=step_ms,
        spread=times.spread / 2,
        kinds=scale_times(kinds, step_ms=step_ms, on_gpu=device.type == "cuda"),
        profiled_ms=sum(kinds.values()),
        memory_bytes=memory_bytes,
        loss=times.loss,
    )


def time_steps(step: StepFunction, *, device: torch.device, steps: int) -> StepTimes:
    """Times steps as training runs them: nothing waits for a GPU after each step, so its own clock is read."""
    if device.type != "cuda":
        return _time_on_host(step, lambda seconds: len(seconds) == steps)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        loss = step()
        event.record()
    torch.cuda.synchronize(device)
    return StepTimes(tuple(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)), loss.item())


def time_steps_for(step: StepFunction, *, seconds: float) -> StepTimes:
    """Times `MIN_STEPS` to `MAX_STEPS` steps within about `seconds` after a warm-up; waits for the device after each
    step."""
    for _ in range(WARMUP_STEPS):
        step().item()
    return _time_on_host(step, lambda done: len(done) >= MIN_STEPS and (sum(done) >= seconds or len(done) == MAX_STEPS))


def scale_times(times: Mapping[Kind, float], *, step_ms: float, on_gpu: bool) -> dict[Kind, float]:
    """The op classes of a profiled step, scaled to a step without the profiler.

    A profiler slows down the host, not a GPU: GPU work keeps its time, and the GPU is idle for the rest of the step.
    Without a GPU all op classes shrink by the same factor.
    """
    busy = sum(time for kind, time in times.items() if kind != "idle")
    factor = min(1.0, step_ms / busy) if on_gpu else step_ms / busy
    worked: dict[Kind, float] = {kind: factor * time for kind, time in times.items() if kind != "idle"}
    return {**worked, "idle": max(0.0, step_ms - factor * busy) if on_gpu else 0.0}


def _time_on_host(step: StepFunction, is_enough: Callable[[Sequence[float]], bool]) -> StepTimes:
    seconds: list[float] = []
    while not is_enough(seconds):
        start = time.perf_counter()
        loss = step().item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return StepTimes(tuple(seconds), loss)


def _trace(step: StepFunction, *, device: torch.device) -> dict[str, Any]:
    """The trace of a few steps."""
    traces: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        recorder = TraceRecorder(
            device=device,
            warmup=1,
            steps=TRACED_STEPS,
            on_trace=lambda profiler: traces.append(save_trace(profiler, Path(folder) / "trace.json")),
        )
        with contextlib.closing(recorder):
            for _ in range(1 + TRACED_STEPS):
                step()
                recorder.step_ended()
    return traces[0]
