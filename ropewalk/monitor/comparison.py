"""Compares runs: settings that differ, loss curves, results. Only reads files."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ropewalk.base.metric import Metric, PairedDifference, ScoreTable, titled
from ropewalk.base.progress import amount, duration

from .headline import median_pace, parameters, tokens, total_steps
from .run_view import RunView

Axis = Literal["step", "tokens", "flops", "time"]
AXES: tuple[Axis, ...] = get_args(Axis)
UNITS: dict[Axis, str] = {"step": "step", "tokens": "tokens", "flops": "FLOPs", "time": "seconds of training"}
SMOOTHED_STEPS = 20
"""Training losses are means over this many steps, since single batches differ more than runs do. Counted in steps, so
that runs with other logging intervals can be compared; a record averaged over more steps is unchanged."""
_ROWS = 8
"""Rows of a table along the axis."""
_OWN = ("name", "prepare.folder", "prepare.artifacts", "prepare.workers")
"""Settings that do not affect a result."""


@dataclass(frozen=True, slots=True)
class LossCurve:
    """A loss curve with four x axes."""

    x: dict[Axis, tuple[float, ...]]
    loss: tuple[float, ...]

    def at(self, axis: Axis, place: float) -> float | None:
        """The loss at `place`, linearly interpolated; None outside the curve."""
        xs = self.x[axis]
        if not xs or not xs[0] <= place <= xs[-1]:
            return None
        after = bisect_left(xs, place)
        if after == 0 or xs[after] == place:
            return self.loss[after]
        share = (place - xs[after - 1]) / (xs[after] - xs[after - 1])
        return self.loss[after - 1] + share * (self.loss[after] - self.loss[after - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the compared runs."""

    folder: str
    view: RunView
    training: LossCurve
    validation: LossCurve

    @property
    def state(self) -> str:
        """`running`, `finished` or `stopped`."""
        if self.view.process:
            return "running"
        return "finished" if self.view.finished else "stopped"

    @property
    def measured_on(self) -> str:
        """What the validation loss was measured on."""
        return self.view.validations[-1].measured_on if self.view.validations else ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side."""

    sides: tuple[Side, ...]
    settings: dict[str, tuple[Any, ...]]
    """Settings that differ, by dotted key."""
    notes: tuple[str, ...]
    """Reasons why some figures cannot be compared."""
    paired: tuple[PairedDifference, ...] = ()
    """Differences on the items and documents that runs share."""
    standardised: ScoreTable | None = None
    """KoLA's scores, which depend on the models compared."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Column titles: the last part of each folder, or the whole path if that is not unique."""
        return labels_of([side.folder for side in self.sides])

    def tree(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "runs": [_side_tree(side) for side in self.sides],
            "settings": {key: list(values) for key, values in self.settings.items()},
            "notes": list(self.notes),
            "paired": [{**dataclasses.asdict(each), "verdict": each.verdict} for each in self.paired],
            "standardised": dataclasses.asdict(self.standardised) if self.standardised else None,
        }

    def measure(self) -> str:
        """The curve that a table shows: validation if all runs have it, else training."""
        return "validation" if all(len(side.validation.loss) > 1 for side in self.sides) else "training"

    def places(self, axis: Axis) -> list[float]:
        """Up to `_ROWS` places along `axis` that all runs reach, taken from the curve with the fewest values."""
        curves = [getattr(side, self.measure()).x[axis] for side in self.sides]
        if not all(curves):
            return []
        first, last = max(xs[0] for xs in curves), min(xs[-1] for xs in curves)
        if first > last:
            return []
        found = [[x for x in xs if first <= x <= last] for xs in curves]
        inside = min(filter(None, found), key=len)  # `last` lies in one of them
        count = len(inside)
        return inside if count <= _ROWS else [inside[round(i * (count - 1) / (_ROWS - 1))] for i in range(_ROWS)]


def labels_of(folders: Sequence[str]) -> tuple[str, ...]:
    """The last part of each folder, or the whole path if that is not unique."""
    short = tuple(Path(folder).name for folder in folders)
    return short if len({*short}) == len(short) else tuple(folders)


def compare_views(
    views: Sequence[tuple[Path, RunView]],
    *,
    paired: Sequence[PairedDifference] = (),
    standardised: ScoreTable | None = None,
    notes: Sequence[str] = (),
) -> Comparison:
    """Compares runs with their names, in the given order; `paired` and `notes` come from their scored items,
    `standardised` also from other models."""
    sides = tuple(_side(folder, view) for folder, view in views)
    settings = _differences([view for _, view in views])
    return Comparison(sides, settings, (*_notes(sides, paired), *notes), tuple(paired), standardised)


def _side(folder: Path, view: RunView) -> Side:
    training = _training(view)
    return Side(
        folder=str(folder),
        view=view,
        training=training,
        validation=_validation(view, training),
    )


def _training(view: RunView) -> LossCurve:
    """FLOPs and time are summed over records, so that phases of different shapes count correctly."""
    columns: dict[Axis, list[float]] = {axis: [] for axis in AXES}
    losses: list[float] = []
    before = flops = seconds = 0.0
    for record in view.steps:
        if not math.isfinite(record.tokens):
            continue
        read = max(0.0, record.tokens - before)
        before = record.tokens
        if record.tokens_per_s > 0:  # False for nan
            seconds += read / record.tokens_per_s
            flops += read * record.flops_per_s / record.tokens_per_s if math.isfinite(record.flops_per_s) else 0.0
        for axis, value in zip(AXES, (float(record.step), record.tokens, flops, seconds), strict=True):
            columns[axis].append(value)
        losses.append(record.loss)
    return LossCurve(
        {axis: tuple(values) for axis, values in columns.items()}, tuple(_smoothed(columns["step"], losses))
    )


def _smoothed(steps: Sequence[float], losses: Sequence[float]) -> list[float]:
    """The mean of each loss and those logged less than `SMOOTHED_STEPS` before it."""
    found: list[float] = []
    for end, step in enumerate(steps, 1):
        first = bisect_right(steps, step - SMOOTHED_STEPS, hi=end)
        recent = [loss for loss in losses[first:end] if math.isfinite(loss)]
        found.append(math.fsum(recent) / len(recent) if recent else float("nan"))
    return found


def _validation(view: RunView, training: LossCurve) -> LossCurve:
    """Validation losses at the positions of training."""
    columns: dict[Axis, list[float]] = {axis: [] for axis in AXES}
    losses = []
    for point in view.validations:
        places = {axis: LossCurve(training.x, training.x[axis]).at("step", point.step) for axis in AXES}
        if math.isfinite(point.loss) and all(place is not None for place in places.values()):
            for axis, place in places.items():
                columns[axis].append(float(place or 0.0))
            losses.append(point.loss)
    return LossCurve({axis: tuple(values) for axis, values in columns.items()}, tuple(losses))


def _results(view: RunView) -> dict[str, Metric]:
    """The metrics that may be compared, by their titles."""
    return {
        titled(task, metric): metric
        for task, metrics in view.tasks.items()
        for metric in metrics
        if metric.better != "neither" and not metric.group
    }


def _differences(views: Sequence[RunView]) -> dict[str, tuple[Any, ...]]:
    tables = [{setting.key: setting.value for setting in view.settings} for view in views]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    columns = {key: tuple(table.get(key) for table in tables) for key in keys if key not in _OWN}
    return {key: values for key, values in columns.items() if any(value != values[0] for value in values)}


def _notes(sides: Sequence[Side], paired: Sequence[PairedDifference]) -> list[str]:
    found = []
    if len({_data(side.view) for side in sides}) > 1:
        found.append(
            "the runs have different data or tokenizers: losses per token cannot be compared, bits per byte only as "
            "far as the held-out texts are alike"
        )
    if len({side.measured_on for side in sides if side.measured_on}) > 1:
        found.append("validation losses were measured on different numbers of sequences")
    tested = [f"{each.task} {each.metric.replace('_', ' ')}" for each in paired]
    for title in _titles(sides)[:1]:
        if tested.count(title) == len(sides) - 1:
            continue
        metrics = [_results(side.view).get(title) for side in sides]
        intervals = [metric.interval for metric in metrics if metric and metric.interval]
        if len(intervals) == len(sides) and max(low for low, _ in intervals) <= min(high for _, high in intervals):
            found.append(f"the intervals of {title} overlap: this does not show which run is better")
    return found


def _titles(sides: Sequence[Side]) -> list[str]:
    return list(dict.fromkeys(title for side in sides for title in _results(side.view)))


def _data(view: RunView) -> str:
    prepared = next((stage for stage in view.stages if stage.name == "prepare"), None)
    return str(prepared.result.get("hash", "")) if prepared else ""


def _side_tree(side: Side) -> dict[str, Any]:
    last = side.view.steps[-1] if side.view.steps else None
    return {
        "run": side.folder,
        "name": side.view.name,
        "state": side.state,
        "step": last.step if last else None,
        "steps": total_steps(side.view),
        "parameters": parameters(side.view),
        "tokens": tokens(side.view),
        "flops": _last(side.training, "flops"),
        "training_s": _last(side.training, "time"),
        "tokens_per_s": median_pace(side.view),
        "train_loss": side.training.loss[-1] if side.training.loss else None,
        "validation_loss": side.validation.loss[-1] if side.validation.loss else None,
        "results": {metric.name: _result_tree(metric) for metric in reversed(_results(side.view).values())},
        "tasks": {
            task: {metric.name: _result_tree(metric) for metric in metrics if not metric.group}
            for task, metrics in side.view.tasks.items()
        },
        "curves": {
            name: {**{axis: list(values) for axis, values in curve.x.items()}, "loss": list(curve.loss)}
            for name, curve in (("training", side.training), ("validation", side.validation))
        },
    }


def _last(curve: LossCurve, axis: Axis) -> float | None:
    return curve.x[axis][-1] if curve.x[axis] else None


def place_text(place: float, axis: Axis) -> str:
    """A place along an axis as text."""
    if axis == "time":
        return duration(place)
    return f"{round(place):,}" if axis == "step" else amount(place)


def figures(comparison: Comparison) -> list[tuple[str, ...]]:
    """Rows of results: a name, then a cell per run."""
    trees = [_side_tree(side) for side in comparison.sides]

    def row(name: str, show: Any, key: str) -> tuple[str, ...]:
        return (name, *("-" if tree[key] is None else show(tree[key]) for tree in trees))

    progress = [f"{tree['step'] or 0:,}" + (f" of {tree['steps']:,}" if tree["steps"] else "") for tree in trees]
    return [
        ("run", *(tree["run"] for tree in trees)),
        ("state", *(tree["state"] for tree in trees)),
        ("step", *progress),
        row("parameters", amount, "parameters"),
        row("tokens", amount, "tokens"),
        row("FLOPs", amount, "flops"),
        row("training time", duration, "training_s"),
        row("tokens/s", amount, "tokens_per_s"),
        row("training loss", "{:.4f}".format, "train_loss"),
        row("validation loss", "{:.4f}".format, "validation_loss"),
        *(
            (title, *(metric_text(_results(side.view).get(title)) for side in comparison.sides))
            for title in _titles(comparison.sides)
        ),
    ]


PAIRED_NOTE = (
    "Paired on shared items: mean of item scores, or bits per byte of all shared documents, less that of the first "
    "run. p is two-sided; Holm's correction covers all rows. Better and worse need a corrected p below 0.05; figures "
    "that are not paired show no difference."
)


def paired_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The paired differences with a head; empty without any."""
    rows = []
    for each in comparison.paired:
        low, high = map(each.text, each.interval) if each.interval else ("", "")
        rows.append(
            (
                f"{each.task} {each.metric.replace('_', ' ')}",
                f"{comparison.labels[each.runs[1]]} - {comparison.labels[each.runs[0]]}",
                each.text(each.value),
                f"{low} to {high}" if each.interval else "-",
                f"{each.n:,}",
                f"{each.p_value:.2g} ({each.test})",
                f"{each.p_adjusted:.2g}",
                each.verdict,
            )
        )
    return [("paired difference", "runs", "value", "95 % interval", "n", "p", "p (Holm)", ""), *rows] if rows else []


def metric_text(metric: Metric | None) -> str:
    """The value with its interval, if there is one."""
    if metric is None or metric.interval is None:
        return "-" if metric is None else metric.text()
    low, high = map(metric.text, metric.interval)
    return f"{metric.text()} ({low} to {high})"


def _result_tree(metric: Metric) -> dict[str, Any]:
    return {"value": metric.value, "interval": list(metric.interval) if metric.interval else None}
