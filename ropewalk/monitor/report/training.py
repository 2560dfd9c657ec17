"""Report sections about training: loss, and optimizer and machine figures per step."""

from __future__ import annotations

import math
from collections.abc import Callable

from ropewalk.base.metric import SHARE, titled
from ropewalk.base.progress import amount

from ..draw.chart import HALF, Chart, Point, Series, better_x, figure
from ..draw.markup import Markup, element
from ..run_view import RunView, StepRecord
from ..values import finite, whole
from .page import empty, section

MOST_TASK_CHARTS = 24


def loss_section(view: RunView) -> Markup:
    """Training and validation loss over steps, with marks where the run was restored."""
    if not view.steps:
        return section("Loss", empty("Training has not logged a step yet."))
    train = _points(view, lambda step: step.loss)
    held_out = [(float(point.step), point.loss) for point in view.validations]
    chart = Chart(
        title="Cross-entropy",
        unit="nats per token",
        series=[
            Series(name="training", points=train, tone="tone-0"),
            Series(name=_validation_name(view), points=held_out, tone="tone-2", marks="dots"),
        ],
        x_kind=better_x(train),
        show=lambda value: f"{value:.4f}",
        moments=[(float(step), name) for step, name in _moments(view)],
        note=_loss_note(view),
    )
    return section("Loss", figure(chart))


def live_tasks_section(view: RunView) -> Markup | None:
    """The headline metric of each task over the steps of training; nothing if none was measured."""
    if not view.evaluations:
        return None
    names = list(dict.fromkeys(task for point in view.evaluations for task in point.tasks))
    charts = [chart for task in names[:MOST_TASK_CHARTS] if (chart := _task_chart(view, task))]
    drawn = element("div", [figure(chart, HALF) for chart in charts], class_="pair")
    return section("Tasks during training", drawn) if charts else None


def _task_chart(view: RunView, task: str) -> Chart | None:
    points = [(point.step, metrics[0]) for point in view.evaluations if (metrics := point.tasks.get(task))]
    if not points:
        return None
    last = points[-1][1]
    scale = 100 if last.unit == SHARE else 1
    measured = f" (n = {last.n:,})" if last.n else ""
    return Chart(
        title=titled(task, last).capitalize(),
        unit=f"{'%' if last.unit == SHARE else last.unit}{measured}; {last.better} is better",
        series=[Series(name="", points=[(float(s), scale * m.value) for s, m in points], tone="tone-2", marks="dots")],
        show=lambda value: last.text(value / scale),
    )


def _validation_name(view: RunView) -> str:
    return f"validation ({view.validations[-1].measured_on})" if view.validations else "validation"


def pace_section(view: RunView) -> Markup:
    """Small charts over steps: throughput, data wait, learning rate, gradient norm."""
    if not view.steps:
        return section("Steps", empty("Training has not logged a step yet."))
    clip = finite(view.setting("train.clip_norm"))
    charts = [
        Chart(
            title="Throughput",
            unit="tokens per second",
            series=[Series(name="", points=_points(view, lambda step: step.tokens_per_s))],
            from_zero=True,
            show=amount,
        ),
        Chart(
            title="Data wait",
            unit="% of step time",
            series=[Series(name="", points=_points(view, lambda step: 100 * step.wait_share), tone="tone-1")],
            from_zero=True,
            show=lambda value: f"{value:.2f} %",
        ),
        Chart(
            title="Learning rate",
            unit="from the schedule",
            series=[Series(name="", points=_points(view, lambda step: step.lr), tone="tone-3")],
            from_zero=True,
            show=lambda value: f"{value:.3g}",
        ),
        Chart(
            title="Gradient norm",
            unit="before clipping",
            series=[Series(name="", points=_points(view, lambda step: step.grad_norm), tone="tone-4")],
            from_zero=True,
            show=lambda value: f"{value:.3g}",
            levels=[(clip, f"clipped above {clip:g}")] if clip else [],
        ),
    ]
    charts += _hit_rate_charts(view)
    return section("Steps", element("div", [figure(chart, HALF) for chart in charts], class_="pair"))


def _hit_rate_charts(view: RunView) -> list[Chart]:
    """Cache hit rate of sequences drawn by importance, compared with that of reading each once per epoch from a cache
    of the same size."""
    if not any(math.isfinite(step.importance_hit_rate) for step in view.steps):
        return []
    told = view.summary.get("importance")
    uniform = finite(told.get("uniform_hit_rate")) if isinstance(told, dict) else None
    drawn = _points(view, lambda step: 100 * step.importance_hit_rate)
    series = [Series(name="by importance", points=drawn, tone="tone-2")]
    if uniform is not None:
        # From the second epoch on; the first fills the cache.
        series.append(Series(name="each once per epoch", points=[(x, 100 * uniform) for x, _ in drawn], tone="tone-1"))
    return [
        Chart(
            title="Cache hit rate",
            unit="% of sequences drawn so far",
            series=series,
            from_zero=True,
            show=lambda value: f"{value:.1f} %",
        )
    ]


def _points(view: RunView, value: Callable[[StepRecord], float]) -> list[Point]:
    return [(float(step.step), value(step)) for step in view.steps]


def _moments(view: RunView) -> list[tuple[int, str]]:
    """The steps after which the run was restored, or continued with more steps or phases."""
    fields = {"restored": "step", "continued": "from_step"}
    found = [
        (step, event["kind"])
        for event in view.notable
        if event["kind"] in fields and (step := whole(event.get(fields[event["kind"]]))) is not None
    ]
    continued = {step for step, kind in found if kind == "continued"}
    return sorted({pair for pair in found if pair[1] == "continued" or pair[0] not in continued})


def _loss_note(view: RunView) -> str:
    every = whole(view.setting("train.log_every_steps"))
    notes = [f"Each training point is the mean over {every} steps."] if every and every > 1 else []
    if view.logged_steps > len(view.steps):
        notes.append(f"{len(view.steps):,} of {view.logged_steps:,} logged steps are drawn, evenly spaced.")
    lost = view.lost_steps
    if lost:
        notes.append(f"The loss was not finite at {len(lost)} points, first at step {lost[0]}; they are not drawn.")
    return " ".join(notes)
