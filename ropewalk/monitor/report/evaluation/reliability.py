"""Reliability diagrams: how often a model is right, by how sure it is."""

from __future__ import annotations

from collections.abc import Sequence

from ropewalk.base.metric import Metric

from ...draw.markup import Markup, element, joined
from ...draw.scale import Scale
from ...evaluation_view import RELIABILITY

SIDE, MARGIN, COUNTS = 260, 40, 54
"""Pixels of the square, of its margins, of the bars below that count items."""
CONFIDENCE = "confidence"
"""The reference of each bin: its mean confidence."""


def reliability_figure(task: str, metrics: Sequence[Metric]) -> Markup | None:
    """The reliability diagram of a task, if it was measured."""
    bins = [m for m in metrics if m.name == RELIABILITY and m.group and CONFIDENCE in m.references]
    if not bins:
        return None
    items = sum(metric.n or 0 for metric in bins)
    caption = element(
        "figcaption",
        element("strong", f"{task}: reliability"),
        element("span", f"share of right answers by confidence, {items:,} items", class_="unit"),
    )
    note = "Below the diagonal the model is too sure. Lines are 95 % intervals; bars count the items of a bin."
    return element("figure", caption, _drawing(bins, f"{task}: reliability diagram"), element("p", note, class_="note"))


def _drawing(bins: Sequence[Metric], name: str) -> Markup:
    x, y = Scale(0.0, 1.0, MARGIN, MARGIN + SIDE), Scale(0.0, 1.0, 10 + SIDE, 10)
    floor = 10 + SIDE + 30
    most = max(metric.n or 0 for metric in bins)
    counts = Scale(0.0, float(max(1, most)), floor + COUNTS, floor)
    marks = [_bin(metric, x, y, counts) for metric in bins]
    ticks = (0.0, 0.25, 0.5, 0.75, 1.0)
    grid = [
        joined(
            (
                element("line", x1=x(0), x2=x(1), y1=y(at), y2=y(at), class_="grid"),
                element("text", f"{at:.0%}", x=x(0) - 6, y=y(at) + 4, text_anchor="end"),
                element("text", f"{at:.0%}", x=x(at), y=y(0) + 17, text_anchor="middle"),
            )
        )
        for at in ticks
    ]
    diagonal = element("line", x1=x(0), y1=y(0), x2=x(1), y2=y(1), class_="level")
    path = "M" + "L".join(f"{x(m.references[CONFIDENCE]):.1f},{y(m.value):.1f}" for m in bins)
    line = element("g", element("path", d=path), class_="line tone-0") if len(bins) > 1 else None
    base = element("line", x1=x(0), x2=x(1), y1=counts(0), y2=counts(0), class_="axis")
    label = element("text", "confidence", x=x(1), y=counts(0) + 16, text_anchor="end")
    size = f"0 0 {SIDE + 2 * MARGIN} {floor + COUNTS + 22}"
    return element(
        "svg", grid, diagonal, line, marks, base, label, viewBox=size, role="img", aria_label=name, class_="square"
    )


def _bin(metric: Metric, x: Scale, y: Scale, counts: Scale) -> Markup:
    at = x(min(1.0, max(0.0, metric.references[CONFIDENCE])))
    low, high = metric.interval or (metric.value, metric.value)
    top = counts(float(metric.n or 0))
    return joined(
        (
            element(
                "g",
                element("line", x1=at, x2=at, y1=y(low), y2=y(high), class_="whisker"),
                element("circle", cx=at, cy=y(metric.value), r=3.5),
                class_="dots tone-0",
            ),
            element("rect", x=at - 5, width=10, y=top, height=counts(0) - top, class_="bar plain"),
        )
    )
