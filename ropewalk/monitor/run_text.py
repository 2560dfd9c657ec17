"""The status of a run in a few aligned lines, for a terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.metric import titled
from ropewalk.base.progress import amount, duration

from .headline import progress, recent_pace, save_interval, seconds_left, total_steps, verdict
from .report.run_report import FILE
from .run_view import NOT_YET, RunView, Stage

WORKER_LOG = "worker.log"
"""Output of a detached worker; launch/worker.py writes it."""
_REACHED = {
    "prepare": ("prepared", "trains it"),
    "plan": ("planned", "trains it"),
    "train": ("trained", "evaluates it"),
    "evaluate": ("evaluated", "draws its report"),
}
"""By the last stage of a stopped run: the name of its state, and what `ropewalk run` does next."""


def status_lines(view: RunView) -> list[str]:
    """Run stages with their time, the last step, the time left, and the path of the report."""
    rows = [("stage " + stage.name, _stage(stage)) for stage in view.stages]
    rows += _training(view)
    rows += [("warning", str(event.get("message", ""))) for event in view.notable if event["kind"] == "warning"][-3:]
    rows += [("damaged", line) for line in view.missing if not line.endswith(NOT_YET)]
    log = view.folder / WORKER_LOG
    if log.exists() and not view.finished:
        rows.append(("worker", f"see {log}; it ends with: {_last_line(log)}"))
    report = view.folder / FILE
    rows.append(("report", str(report) if report.exists() else f"{report} (not written yet)"))
    width = max(len(name) for name, _ in rows)
    return [f"{view.name}: {_state(view)}", *(f"  {name:<{width}}  {value}" for name, value in rows)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """The status of a run, for a line of any width."""

    task: str
    share: float | None
    """Finished share of the task."""
    first: list[str]
    """The most important figures."""
    others: list[str]

    def __str__(self) -> str:
        share = [] if self.share is None else [f"{self.share:4.0%}"]
        return "  ".join([self.task, *share, *self.first, *self.others])


def moment(view: RunView) -> RunStatus:
    """The current stage of the run, and the progress of training."""
    task = "finished" if view.finished else next((stage.name for stage in reversed(view.stages)), "start")
    total = total_steps(view)
    if not view.steps:
        return RunStatus(task=task, share=None, first=[], others=[])
    last, pace = view.steps[-1], recent_pace(view)
    left = seconds_left(view) if view.process else None
    first = [f"loss {last.loss:.4f}", f"{pace:,.0f} tokens/s" if pace is not None else ""]
    first.append(f"ETA {duration(left)}" if left is not None else "")
    others = [f"step {last.step:,} of {total:,}" if total else f"step {last.step:,}"]
    if view.validations:
        others.append(f"validation loss {view.validations[-1].loss:.4f}")
    share = last.step / total if total and task in ("train", "finished") else None
    return RunStatus(task=task, share=share, first=[figure for figure in first if figure], others=others)


def _state(view: RunView) -> str:
    if view.finished:
        return f"finished; {verdict(view)}"
    age = view.read_at - view.last_time
    seen = f", last event {duration(max(0.0, age))} ago" if math.isfinite(age) else ""
    if view.process:
        return f"running (process {view.process}), {progress(view)}{seen}"
    if view.stages and all(stage.state != "unfinished" for stage in view.stages):
        done, rest = _REACHED.get(view.stages[-1].name, ("stopped", "continues it"))
        return f"{done}, {progress(view)}{seen}; `ropewalk run` {rest}"
    return f"stopped, {progress(view)}{seen}; the command that started it continues it"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing yet"


def _stage(stage: Stage) -> str:
    if stage.seconds is None:
        return "not finished"
    return duration(stage.seconds) + (" (kept from before)" if stage.state == "skipped" else "")


def _training(view: RunView) -> list[tuple[str, str]]:
    rows = []
    if view.steps:
        last = view.steps[-1]
        pace = recent_pace(view)
        parts = [f"loss {last.loss:.4f}", f"{amount(pace)} tokens/s" if pace is not None else ""]
        parts.append(f"{100 * last.wait_share:.1f} % data wait" if math.isfinite(last.wait_share) else "")
        rows.append((f"step {last.step}", ", ".join(filter(None, parts))))
    if view.validations:
        point = view.validations[-1]
        rows.append(("validation loss", f"{point.loss:.4f} ({point.measured_on}), step {point.step}"))
    if view.evaluations:
        measured = view.evaluations[-1]
        heads = [f"{titled(task, found[0])} {found[0].text()}" for task, found in measured.tasks.items() if found]
        rows.append(("evaluation", f"{', '.join(heads)}, step {measured.step}"))
    if view.saved_step is not None:
        rows.append(("checkpoint", f"step {view.saved_step}"))
    if interval := save_interval(view):
        rows.append(("saves", interval))
    if view.process and (left := seconds_left(view)) is not None:
        rows.append(("left", f"about {duration(left)} of training at this pace"))
    return rows
