"""`--timeline`: what every rank computed, sent and waited for during a few steps, side by side (as Horovod's timeline).

In Chrome's trace format, which https://ui.perfetto.dev opens: one process per rank, with a row of steps, a row of their
parts, and a row per group of ranks with its collectives. A collective lasts from its launch until its result has been
waited for; one that overlaps with compute therefore ends late without being slow. On a GPU, collectives have the times
of its stream, while steps and parts have those of the host, which queues them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.base.files import read_json, write_json
from ropewalk.parallel.comm import Moment
from ropewalk.parallel.labels import LabelSpan, keep_spans

from ..measure.step_profiler import StepWindow
from .hook import Hook

if TYPE_CHECKING:
    from ..training_run import TrainingRun

FOLDER, ALL = "timeline", "all.json"
STEPS_ROW, PARTS_ROW = 0, 1
ROWS = {STEPS_ROW: "steps", PARTS_ROW: "parts"}


@dataclass(slots=True)
class TimelineStep:
    """One step as this rank saw it; seconds of `time.perf_counter`."""

    number: int
    begin: float
    end: float = 0.0
    parts: list[LabelSpan] = field(default_factory=list)
    collectives: list[Moment] = field(default_factory=list)


class Timeline(Hook):
    """Records `steps` steps of this rank after a warm-up. Every rank commits `timeline/rank-00000.json`, rank 0 also
    `timeline/all.json`. Costs nothing before and after."""

    def __init__(self, steps: int) -> None:
        self._window = StepWindow(steps)
        self._steps: list[TimelineStep] = []
        self._zero = 0.0

    def before_training(self, run: TrainingRun) -> None:
        self._window.place(remaining=run.settings.planned.steps - run.step)

    def before_step(self, run: TrainingRun) -> None:
        if not self._window.is_open:
            return
        if not self._steps:
            # Clocks of machines agree on the time of day only; rank 0's is the origin for all.
            self._zero = run.coordinator.broadcast(time.time()) - (time.time() - time.perf_counter())
        now = TimelineStep(run.step + 1, time.perf_counter())
        self._steps.append(now)
        run.mesh.traffic.timeline = now.collectives
        keep_spans(now.parts)

    def end_step(self, run: TrainingRun) -> None:
        """Writes the files after the last recorded step."""
        if self._window.is_open:
            self._steps[-1].end = time.perf_counter()
        self._window.step_ended()
        if self._steps and not self._window.left:
            self._write(run)

    def before_end(self, run: TrainingRun) -> None:
        """Writes the steps recorded so far, when the run ends before the window does."""
        if any(step.end for step in self._steps):
            self._write(run)

    def _write(self, run: TrainingRun) -> None:
        run.mesh.traffic.timeline = None
        run.mesh.traffic.settle(wait=True)
        keep_spans(None)
        # A step that was rolled back has no end.
        steps, self._steps = [step for step in self._steps if step.end], []
        folder, rank = run.folder / FOLDER, run.place.rank
        write_json(_file(folder, rank), trace(steps, rank=rank, zero=self._zero))
        run.coordinator.barrier()
        if rank == 0:
            write_json(folder / ALL, merged(folder, ranks=run.mesh.world.size))
            first, last = steps[0].number, steps[-1].number
            run.say(f"timeline of steps {first} to {last}: https://ui.perfetto.dev opens {folder / ALL}")


def trace(steps: list[TimelineStep], *, rank: int, zero: float) -> dict[str, Any]:
    """The steps of a rank in Chrome's format; `zero` is the origin of time."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
        *(
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
            for row, name in ROWS.items()
        ),
    ]
    for step in steps:
        events.append(_block(f"step {step.number}", step.begin, step.end, rank=rank, row=STEPS_ROW, zero=zero))
        events += [_block(s.part, s.begin, s.end, rank=rank, row=PARTS_ROW, zero=zero) for s in step.parts]
        for number, moment in enumerate(step.collectives):
            events += _collective(moment, step=step.number, rank=rank, name=f"{rank}.{step.number}.{number}", zero=zero)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def merged(folder: Path, *, ranks: int) -> dict[str, Any]:
    """The files of all ranks in `folder` as one."""
    files = [read_json(_file(folder, rank), what="timeline") for rank in range(ranks)]
    events = [event for file in files for event in file["traceEvents"]]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _block(name: str, begin: float, end: float, *, rank: int, row: int, zero: float) -> dict[str, Any]:
    span = {"ts": _microseconds(begin - zero), "dur": _microseconds(end - begin)}
    return {"ph": "X", "name": name, "cat": ROWS[row], "pid": rank, "tid": row, **span}


def _collective(moment: Moment, *, step: int, rank: int, name: str, zero: float) -> Iterator[dict[str, Any]]:
    """Begin and end events: collectives of one group may overlap, which blocks in one row cannot show."""
    for phase, at in (("b", moment.begin), ("e", moment.end)):
        event = {"ph": phase, "name": moment.kind, "cat": moment.group, "id": name, "pid": rank, "tid": PARTS_ROW}
        yield {**event, "ts": _microseconds(at - zero), "args": {"bytes": moment.bytes, "step": step}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"
