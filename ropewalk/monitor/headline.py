"""Summarizes a run in one sentence and a dozen key figures, for the head of page and console."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from ropewalk.base.metric import Metric, headline, titled
from ropewalk.base.progress import amount, counted, duration

from .run_view import RunView
from .values import finite, mapping, text, whole

RECENT = 20
"""Step records from which the current speed is computed."""
MOST_TASKS = 6
"""Evaluation tasks among the key figures."""
SMOKE = "smoke test"
"""Stands in the note of tasks with a few items of our own."""


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """One key figure: its name, its value as text, and a note for comparison."""

    name: str
    value: str
    note: str = ""


def verdict(view: RunView) -> str:
    """One line: model size, training tokens and the main result."""
    parts = []
    if (count := parameters(view)) is not None:
        parts.append(f"{amount(count)} parameters")
    if (count := tokens(view)) is not None:
        parts.append(f"{amount(count)} tokens")
    first = headline(view.tasks)
    if first is None:
        parts.append(progress(view))
        if view.steps:
            parts.append(f"training loss {view.steps[-1].loss:.3f}")
        return ", ".join(parts) + "; not evaluated yet"
    task, metric = first
    beside = ", ".join(f"{name} {metric.text(value, digits=2)}" for name, value in metric.references.items())
    return ", ".join([*parts, f"{metric.text(digits=2)} {titled(task, metric)}"]) + (f"; {beside}" if beside else "")


def progress(view: RunView) -> str:
    """Progress of training: "step 180 of 300"."""
    total = total_steps(view)
    if not view.steps:
        return "training has not begun"
    return f"step {view.steps[-1].step:,}" + (f" of {total:,}" if total else "")


def key_figures(view: RunView) -> list[KeyFigure]:
    """The figures of the tiles, in reading order; a dash stands for an unknown value."""
    return [
        *(_evaluation(view) or [KeyFigure("Evaluation", "–", "not evaluated yet")]),
        _validation(view),
        KeyFigure("Parameters", _amount(parameters(view)), _vocabulary(view)),
        KeyFigure("Tokens trained on", _amount(tokens(view)), _seen(view)),
        KeyFigure("Throughput", _amount(median_pace(view)), "tokens per second, median" + _mfu(view)),
        _time(view),
        *_saves(view),
    ]


def parameters(view: RunView) -> float | None:
    """Parameters of the model, from the first file that has them."""
    return _first(view.summary.get("parameters"), view.training.get("parameters"))


def tokens(view: RunView) -> float | None:
    """Tokens trained on so far."""
    return _first(view.summary.get("tokens"), view.steps[-1].tokens if view.steps else None)


def total_steps(view: RunView) -> int | None:
    """Total steps of the run, unless a phase stops early."""
    return whole(mapping(view.plan.get("derived")).get("steps")) or whole(view.setting("train.steps"))


def median_pace(view: RunView) -> float | None:
    """Median tokens per second."""
    paces = [step.tokens_per_s for step in view.steps if math.isfinite(step.tokens_per_s)]
    return _first(view.summary.get("tokens_per_s"), statistics.median(paces) if paces else None)


def recent_pace(view: RunView) -> float | None:
    """Tokens per second over the last steps; over all steps of a finished run."""
    paces = [step.tokens_per_s for step in view.steps[-RECENT:] if math.isfinite(step.tokens_per_s)]
    return statistics.median(paces) if paces and not view.finished else median_pace(view)


def total_seconds(view: RunView) -> float | None:
    """Seconds of the whole run, else of its finished stages."""
    known = [stage.seconds for stage in view.stages if stage.seconds is not None]
    return _first(mapping(view.summary.get("seconds")).get("total"), math.fsum(known) if known else None)


def seconds_left(view: RunView) -> float | None:
    """Remaining seconds of training at the speed of the last steps; None if unknown."""
    total = total_steps(view)
    recent = [step.step_s for step in view.steps[-RECENT:] if math.isfinite(step.step_s)]
    if not total or not recent or view.finished or view.steps[-1].step >= total:
        return None
    return (total - view.steps[-1].step) * statistics.median(recent)


def save_interval(view: RunView) -> str:
    """How often `checkpoint.save_every = "auto"` saves, and why; empty if it has not decided."""
    bound = _BOUNDS.get(text(view.saving.get("bound")))
    steps, seconds = whole(view.saving.get("steps")), finite(view.saving.get("interval_s"))
    if bound is None or steps is None or seconds is None:
        return ""
    costs = [finite(view.saving.get(name)) or 0.0 for name in ("blocked_s", "slowed_s")]
    parts = [f"every {counted(steps, 'step')} ({duration(seconds)}), {bound}", f"each costs {sum(costs):.3g} s"]
    if (between := finite(view.saving.get("mtbf_s"))) is not None:
        failures = whole(view.saving.get("failures"))
        seen = counted(failures, "failure") + " seen" if failures else "expected"
        parts.append(f"{_hours(between)} between failures ({seen})")
    return "; ".join(parts)


def _hours(seconds: float) -> str:
    return duration(seconds) if seconds < 360_000 else f"{seconds / 3600:,.0f} h"


def _saves(view: RunView) -> list[KeyFigure]:
    first, _, rest = save_interval(view).partition("; ")
    every, _, bound = first.partition(", ")
    return [KeyFigure("Checkpoint", every, f"{bound}; {rest}")] if every else []


_BOUNDS = {
    "overhead": "as often as the budget allows",
    "failures": "as failures demand",
    "persist": "as fast as they become durable",
}


def _first(*values: object) -> float | None:
    return next((found for value in values if (found := finite(value)) is not None), None)


def _amount(value: float | None) -> str:
    return "–" if value is None else amount(value)


def _evaluation(view: RunView) -> list[KeyFigure]:
    """Of each task the first metric and those with a note, each with those that follow it without one; the very first
    also beside its best reference. Of many tasks the first that are no smoke tests; the others stand in the table."""
    found: list[KeyFigure] = []
    tasks = view.tasks
    if len(tasks) > MOST_TASKS:
        real = [task for task, metrics in tasks.items() if not (metrics and SMOKE in metrics[0].note)]
        tasks = {task: tasks[task] for task in (real or [*tasks])[:MOST_TASKS]}
    for task, metrics in tasks.items():
        for place, metric in enumerate(each for each in metrics if not each.group):
            title = with_capital(titled(task, metric))
            if metric.note or place == 0:
                found.append(KeyFigure(title, metric.text(), metric.note))
            else:
                before = found[-1]
                size = metric.better == "neither"
                more = metric.text() if size else f"{metric.label} {metric.text()}"
                found[-1] = KeyFigure(before.name, before.value, ", ".join(filter(None, (before.note, more))))
    first = headline(view.tasks)
    return [found[0], *_beside(first[1]), *found[1:]] if first else found


def with_capital(text: str) -> str:
    """With a capital at the beginning; the rest stays, as in `ROUGE`."""
    return text[:1].upper() + text[1:]


def _beside(metric: Metric) -> list[KeyFigure]:
    """Difference from the best reference."""
    references = {name: value for name, value in metric.references.items() if value}
    if not references:
        return []
    best = (min if metric.better == "lower" else max)(references, key=lambda name: references[name])
    change = f"{100 * (metric.value / references[best] - 1):+.1f} %".replace("-", "−")
    return [KeyFigure(f"Beside {best}", change, f"{best} has {metric.text(references[best])} {metric.label}")]


def _validation(view: RunView) -> KeyFigure:
    """The last validation loss of training; evaluation measures other text."""
    last = view.validations[-1] if view.validations else None
    loss = _first(last.loss if last else None, view.summary.get("validation_loss"))
    if loss is None:
        return KeyFigure("Validation loss", "–", "not measured yet")
    measured = f", {last.measured_on}, step {last.step:,}" if last else ""
    return KeyFigure("Validation loss", f"{loss:.3f}", f"nats per token{measured}")


def _vocabulary(view: RunView) -> str:
    size = whole(mapping(view.manifest.get("tokenizer")).get("vocabulary"))
    return f"vocabulary of {size:,}" if size else ""


def _seen(view: RunView) -> str:
    """Epochs: training tokens divided by the tokens of the corpus."""
    shards = view.manifest.get("shards")
    rows = [mapping(shard) for shard in shards] if isinstance(shards, list) else []
    size = sum(whole(row.get("tokens")) or 0 for row in rows if row.get("split") == "train")
    seen = tokens(view)
    return f"{seen / size:.2f} epochs of {amount(size)}" if size and seen else ""


def _mfu(view: RunView) -> str:
    shares = [step.mfu for step in view.steps if math.isfinite(step.mfu)]
    return f", {100 * statistics.median(shares):.0f} % of peak FLOP/s" if shares else ""


def _time(view: RunView) -> KeyFigure:
    seconds = total_seconds(view)
    memory = [step.memory_bytes for step in view.steps if math.isfinite(step.memory_bytes)]
    notes = [] if view.finished else ["finished stages"]
    notes += [f"peak memory {amount(max(memory), 'B')}"] if memory else []
    return KeyFigure("Time", "–" if seconds is None else duration(seconds), ", ".join(notes))
