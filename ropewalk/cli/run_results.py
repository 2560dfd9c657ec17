"""Results of runs as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ropewalk.base.metric import Metric, read_tasks, task_line
from ropewalk.base.progress import amount, counted, duration

from .progress_lines import table

WHOLE = "the whole model"
"""What `--verify` compares if it fits."""
MOST_SENTENCES = 4
"""Tasks that are told in a line each; more stand in columns."""
SMOKE = "smoke test"
"""Stands in the note of tasks with a few items of our own."""
SMOKE_NOTE = "A smoke test has a few items of our own and is no benchmark."


def run_text(summary: dict[str, Any]) -> str:
    """A finished run in a few lines."""
    rows = [
        ("parameters", amount(summary["parameters"])),
        ("trained on", f"{amount(summary['tokens'], 'tokens')} in {summary['steps']} steps"),
        *(("evaluation", line) for line in evaluation_text(summary).splitlines()),
        ("time", ", ".join(f"{stage} {duration(value)}" for stage, value in summary["seconds"].items())),
        ("report", summary["report"]),
    ]
    return table(rows)


def trained_text(result: dict[str, Any]) -> str:
    """The result of training, after its profile if there is one."""
    shown = {
        key: f"{value:,}" if isinstance(value, int) else f"{value:g}"
        for key, value in result.items()
        if key != "profile"
    }
    figures = table(list(shown.items()))
    return f"{profile_text(result['profile'])}\n\n{figures}" if "profile" in result else figures


def verdict_text(verdict: dict[str, Any]) -> str:
    """The verdict of `--verify` by phase."""
    lines = []
    for phase in verdict["phases"]:
        name = f"phase {phase['phase']}: " if len(verdict["phases"]) > 1 else ""
        lines.append(f"{name}{_verdict_line(phase, verdict)}")
        limits = verdict["limits"]
        found = [(kind, _scientific(size), _scientific(limits[kind])) for kind, size in phase["largest"].items()]
        lines += aligned([("largest difference", "found", "limit"), *found])
        if phase["left_out"]:
            lines.append(f"without {', '.join(phase['left_out'])}, which rounds on purpose")
    return "\n".join(lines)


def _verdict_line(phase: dict[str, Any], verdict: dict[str, Any]) -> str:
    of = f"{verdict['steps']} steps of {counted(phase['rows'], 'row')} of {phase['tokens']} tokens in float64"
    whole = phase.get("compared", WHOLE) == WHOLE
    of = of if whole else f"{phase['compared']}: {of}"
    first = phase["first"]
    if first is None:
        who, one = verdict["processes"], verdict["processes"] == 1
        return f"equal: {who} {'process computes' if one else 'processes compute'} what one device does ({of})"
    what = f"the {first['what']} of {first['parameter']}" if first["parameter"] else f"the {first['what']}"
    if first["rank"] is None:
        return f"not equal: {what} is on no rank ({of})"
    size = _scientific(first["difference"])
    others = f" of {', '.join(map(str, first['ranks']))}" if len(first["ranks"]) > 1 else ""
    return f"not equal: {what} differs by {size}, most on rank {first['rank']}{others} ({of})"


def _scientific(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1e}"


def profile_text(profile: dict[str, Any]) -> str:
    """Where the time of a step goes, by part and by operator; with a column for the GPU where there is one."""
    busy = profile["device_busy_ms"]
    working = f", of which the GPU works {busy:.2f} ms" if busy is not None else ""
    parts = [
        (part["part"], f"{part['calls']:.4g}", f"{part['host_ms']:.3f}", f"{part['share']:.1%}", *_device(part))
        for part in profile["parts"]
    ]
    operators = [
        (found["name"], f"{found['calls']:.4g}", f"{found['host_ms']:.3f}", *_device(found))
        for found in profile["operators"]
    ]
    gpu = () if busy is None else ("GPU ms",)
    return "\n".join(
        [
            f"steps {profile['first_step']} to {profile['last_step']} on {profile['device']}: "
            f"{profile['step_ms']:.2f} ms a step{working}",
            *aligned([("part", "calls", "ms", "share", *gpu), *parts]),
            "",
            *aligned([("operator, without those it calls", "calls", "ms", *gpu), *operators]),
        ]
    )


def _device(row: dict[str, Any]) -> tuple[str, ...]:
    return () if row["device_ms"] is None else (f"{row['device_ms']:.3f}",)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of a name and numbers, in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def evaluation_text(results: dict[str, Any]) -> str:
    """The key figures of each task in one line; of many tasks in columns."""
    tasks = {task: metrics for task, metrics in read_tasks(results).items() if metrics}
    report = [f"report: {results['report']}"] if "report" in results else []
    if len(tasks) <= MOST_SENTENCES:
        return "\n".join([*(task_line(task, metrics) for task, metrics in tasks.items()), *report])
    rows: list[tuple[str, ...]] = [("task", "metric", "value", "95 % interval", "over", "beside")]
    rows += [_task_cells(task, metrics) for task, metrics in tasks.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) if column in (2, 3) else cell.ljust(width) for column, (cell, width) in each)
        for each in (list(enumerate(zip(row, widths, strict=True))) for row in rows)
    ]
    smoke = any(SMOKE in metric.note for metrics in tasks.values() for metric in metrics)
    return "\n".join([*(line.rstrip() for line in lines), *([SMOKE_NOTE] if smoke else []), *report])


def _task_cells(task: str, metrics: Sequence[Metric]) -> tuple[str, ...]:
    first, *others = [metric for metric in metrics if not metric.group]
    ends = f"{first.text(first.interval[0])} to {first.text(first.interval[1])}" if first.interval else ""
    over = counted(first.n, first.of) if first.n is not None else ""
    beside = [f"{name} {first.text(value)}" for name, value in first.references.items()]
    beside += [f"{metric.label} {metric.text()}" for metric in others if metric.note]
    beside += [SMOKE] if SMOKE in first.note else []
    return task, first.label, first.text(), ends, over, ", ".join(beside)
