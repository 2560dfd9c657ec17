"""Line charts over steps.

A chart is drawn twice, for a wide page and for a phone, and the style sheet shows one of them, so text keeps its size
without a script. The values are stored once, in the legend, where the hover script finds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .markup import Markup, element, joined, number
from .scale import Kind, Scale, padded, tick_labels

Point = tuple[float, float]

MOST_POINTS = 500
"""Maximum points of a line; more would be invisible at this width and enlarge the page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line (or row of dots) with its name; `tone` is its colour class in the style sheet."""

    name: str
    points: Sequence[Point]
    tone: str = "tone-0"
    marks: Literal["line", "dots"] = "line"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Series over steps, their unit and their marks."""

    title: str
    unit: str
    series: Sequence[Series]
    x_name: str = "step"
    """Name of the x axis."""
    x_kind: Kind = "linear"
    from_zero: bool = False
    show: Callable[[float], str] = field(default=lambda value: f"{value:.4g}")
    """Formats a value in the legend and beside the pointer."""
    levels: Sequence[tuple[float, str]] = ()
    """Horizontal reference lines with their names; drawn when they fall inside the chart."""
    moments: Sequence[tuple[float, str]] = ()
    """Vertical marks at a step, with their names."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Canvas:
    """Pixels of a drawing, margins included."""

    width: int
    height: int
    left: int = 44
    right: int = 12
    top: int = 10
    bottom: int = 36


FULL = (Canvas(1080, 320, left=48), Canvas(358, 240))
HALF = (Canvas(524, 210), Canvas(358, 190))


def figure(chart: Chart, sizes: tuple[Canvas, Canvas] = FULL) -> Markup:
    """The chart with title and legend, wide and narrow."""
    whole = [_finite(one) for one in chart.series]
    series = [thinned(one) for one in whole]
    wide, narrow = (_drawing(chart, series, size) for size in sizes)
    caption = element(
        "figcaption",
        element("strong", chart.title),
        element("span", chart.unit, class_="unit"),
        element(
            "span", [_legend(one, full, chart.show) for one, full in zip(series, whole, strict=True)], class_="legend"
        ),
    )
    drawings = [element("div", wide, class_="wide"), element("div", narrow, class_="narrow")]
    notes = [chart.note, *(_thinning(one, full) for one, full in zip(series, whole, strict=True))]
    note = element("p", " ".join(filter(None, notes)), class_="note") if any(notes) else None
    return element("figure", caption, drawings, note, class_="chart", data_hover=True)


def thinned(series: Series) -> Series:
    """The series with at most `MOST_POINTS` points, each the mean of neighbours."""
    points = list(series.points)
    share = math.ceil(len(points) / MOST_POINTS)
    if share > 1:
        groups = [points[i : i + share] for i in range(0, len(points), share)]
        points = [(group[-1][0], math.fsum(y for _, y in group) / len(group)) for group in groups]
    return replace(series, points=points)


def better_x(points: Sequence[Point]) -> Kind:
    """`log` for long runs in which most of the change comes in the first tenth of the steps, else `linear`.

    Long means 200 times the first step; below that a linear axis shows the beginning well enough.
    """
    points = [point for point in points if math.isfinite(point[1])]
    if not points or points[0][0] <= 0 or points[-1][0] < 200 * points[0][0]:
        return "linear"
    total = abs(points[-1][1] - points[0][1])
    early = [y for x, y in points if x <= points[0][0] + 0.1 * (points[-1][0] - points[0][0])]
    return "log" if total and abs(early[-1] - points[0][1]) > 0.5 * total else "linear"


def _finite(series: Series) -> Series:
    return replace(series, points=[point for point in series.points if math.isfinite(point[1])])


def _thinning(drawn: Series, full: Series) -> str:
    """A note if points are means of several values."""
    if len(drawn.points) == len(full.points):
        return ""
    return f"{len(full.points):,} values are drawn as {len(drawn.points):,} means of neighbours."


def _drawing(chart: Chart, series: list[Series], size: Canvas) -> Markup:
    x, y = _scales(chart, series, size)
    lines = [_marks(one, x, y) for one in series]
    cursor = element("line", y1=size.top, y2=size.height - size.bottom, class_="cursor", visibility="hidden")
    name = f"{chart.title}, {chart.unit}, over {'steps' if chart.x_name == 'step' else chart.x_name}"
    return element(
        "svg",
        _y_axis(y, x, size),
        _x_axis(x, y, size, chart.x_name),
        [_level(value, label, x, y) for value, label in chart.levels if y.low <= value <= y.high],
        [_moment(step, label, x, y) for step, label in chart.moments if x.low <= step <= x.high],
        lines,
        cursor,
        viewBox=f"0 0 {size.width} {size.height}",
        role="img",
        aria_label=name,
        data_scale=f"{x.kind} {x.low} {x.high} {number(x.start)} {number(x.end)}",
        data_counted=chart.x_name,
    )


def _scales(chart: Chart, series: list[Series], size: Canvas) -> tuple[Scale, Scale]:
    xs = [x for one in series for x, _ in one.points] or [0.0, 1.0]
    ys = [y for one in series for _, y in one.points] or [0.0, 1.0]
    low, high = padded(min(ys), max(ys))
    if chart.from_zero:
        low, high = 0.0, max(ys) * 1.08 or 1.0
    return (
        Scale(min(xs), max(xs), size.left, size.width - size.right, chart.x_kind),
        Scale(low, high, size.height - size.bottom, size.top),
    )


def _y_axis(y: Scale, x: Scale, size: Canvas) -> Markup:
    ticks = y.ticks(max(2, size.height // 45))
    return joined(
        joined(
            (
                element("line", x1=x.start, x2=x.end, y1=y(tick), y2=y(tick), class_="grid"),
                element("text", label, x=x.start - 8, y=y(tick) + 4, text_anchor="end"),
            )
        )
        for tick, label in zip(ticks, tick_labels(ticks), strict=True)
    )


def _x_axis(x: Scale, y: Scale, size: Canvas, counted: str) -> Markup:
    """Ticks with their values; the axis title is at its right end, on a line of its own."""
    ticks = x.ticks(max(2, size.width // 80))
    shown = zip(ticks, tick_labels(ticks), strict=True)
    labels = [
        joined(
            (
                element("line", x1=x(tick), x2=x(tick), y1=y.start, y2=y.start + 4, class_="axis"),
                element("text", label, x=x(tick), y=y.start + 17, text_anchor="middle"),
            )
        )
        for tick, label in shown
    ]
    name = f"{counted}, logarithmic" if x.kind == "log" else counted
    return joined(
        (
            element("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, class_="axis"),
            labels,
            element("text", name, x=x.end, y=y.start + 32, text_anchor="end"),
        )
    )


def _marks(series: Series, x: Scale, y: Scale) -> Markup:
    places = [(x(step), y(value)) for step, value in series.points]
    if series.marks == "dots" or len(places) == 1:
        dots = [element("circle", cx=px, cy=py, r=3.5) for px, py in places]
        path = _path(places) if series.marks == "dots" and len(places) > 1 else None
        return element("g", path, dots, class_=f"dots {series.tone}")
    return element("g", _path(places), class_=f"line {series.tone}")


def _path(places: list[Point]) -> Markup:
    return element("path", d="M" + "L".join(f"{number(px)},{number(py)}" for px, py in places))


def _level(value: float, label: str, x: Scale, y: Scale) -> Markup:
    return joined(
        (
            element("line", x1=x.start, x2=x.end, y1=y(value), y2=y(value), class_="level"),
            element("text", label, x=x.end, y=y(value) - 5, text_anchor="end", class_="halo"),
        )
    )


def _moment(step: float, label: str, x: Scale, y: Scale) -> Markup:
    place = x(step)
    left = place > (x.start + x.end) / 2
    return joined(
        (
            element("line", x1=place, x2=place, y1=y.start, y2=y.end, class_="level"),
            element(
                "text",
                label,
                x=place - 5 if left else place + 5,
                y=y.end + 10,
                text_anchor="end" if left else "start",
                class_="halo",
            ),
        )
    )


def _legend(series: Series, full: Series, show: Callable[[float], str]) -> Markup:
    """The name with its colour and last value; also stores the drawn values for the hover script."""
    if not series.points:
        return element("span", series.name, " no values", class_="muted")
    # The script splits at spaces, so values use non-breaking spaces.
    shown = [show(value).replace(" ", "\N{NO-BREAK SPACE}") for _, value in series.points]
    return element(
        "span",
        element("i", class_=f"key {series.tone}"),
        f"{series.name or 'last'} ",
        element("b", show(full.points[-1][1])),
        data_name=series.name,
        data_xs=" ".join(number(step) for step, _ in series.points),
        data_ys=" ".join(shown),
    )
