"""Points with their intervals in rows, on one scale: a forest plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .markup import Markup, element, joined
from .scale import Scale

ROW = 24
AXIS = 26
LABEL_PIXELS = 7
VALUE = 58
"""Pixels kept to the right for values."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value between 0 and 1 with its interval, its text, and its colour class."""

    label: str
    value: float
    interval: tuple[float, float] | None
    shown: str
    tone: str = "tone-0"


def forest_figure(title: str, unit: str, rows: Sequence[Estimate], *, ends: tuple[str, str], note: str = "") -> Markup:
    """The estimates as a figure, for a wide page and for a phone; `ends` name 0 and 1."""
    caption = element("figcaption", element("strong", title), element("span", unit, class_="unit"))
    drawings = [
        element("div", _drawing(rows, width, f"{title}, {unit}", ends), class_=name)
        for width, name in ((524, "wide"), (358, "narrow"))
    ]
    return element("figure", caption, drawings, element("p", note, class_="note") if note else None)


def _drawing(rows: Sequence[Estimate], width: int, name: str, ends: tuple[str, str]) -> Markup:
    """Labels stand to the left of the rows; where they would take more than half of the width, above them."""
    left = 14 + LABEL_PIXELS * max((len(row.label) for row in rows), default=0)
    above = left > width // 2
    left, height = (6, 2 * ROW) if above else (left, ROW)
    x = Scale(0.0, 1.0, left, width - VALUE)
    bottom = height * len(rows)
    grid = [element("line", x1=x(at), x2=x(at), y1=0, y2=bottom, class_="grid") for at in (0.25, 0.5, 0.75, 1.0)]
    axis = [
        element("line", x1=x(0), x2=x(0), y1=0, y2=bottom, class_="axis"),
        element("text", ends[0], x=x(0), y=bottom + 17, text_anchor="start"),
        element("text", ends[1], x=x(1), y=bottom + 17, text_anchor="end"),
    ]
    marks = []
    for place, row in enumerate(rows):
        middle = height * (place + 1) - ROW * 0.5
        at = {"x": 0, "y": middle - 13} if above else {"x": left - 10, "y": middle + 4, "text_anchor": "end"}
        marks += [element("text", row.label, **at), _row(row, middle, x, width)]
    return element("svg", grid, axis, marks, viewBox=f"0 0 {width} {bottom + AXIS}", role="img", aria_label=name)


def _row(row: Estimate, middle: float, x: Scale, width: int) -> Markup:
    bounds = [x(min(1.0, max(0.0, end))) for end in row.interval or ()]
    whisker = (
        element("line", x1=bounds[0], x2=bounds[1], y1=middle, y2=middle, class_="whisker")
        if len(bounds) == 2
        else None
    )
    return joined(
        (
            element(
                "g",
                whisker,
                element("circle", cx=x(min(1.0, max(0.0, row.value))), cy=middle, r=4.5),
                class_=f"dots {row.tone}",
            ),
            element("text", row.shown, x=width, y=middle + 4, text_anchor="end", class_="value"),
        )
    )
