"""Horizontal bars with their values, for comparing a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .markup import Markup, element, joined

ROW = 22
TITLE = 26
GAP = 10
VALUE = 74
"""Pixels kept to the right of the longest bar for its value."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One value, its text, and its colour class."""

    label: str
    value: float
    shown: str
    tone: str = "tone-0"


@dataclass(frozen=True, slots=True)
class BarGroup:
    """Bars under a common title, which may be empty."""

    title: str
    bars: Sequence[Bar]


def bar_figure(title: str, unit: str, groups: Sequence[BarGroup], *, wide: int = 524, note: str = "") -> Markup:
    """The bars as a figure, on one scale from zero, for a wide page and for a phone."""
    caption = element("figcaption", element("strong", title), element("span", unit, class_="unit"))
    drawings = [
        element("div", _drawing(groups, width, f"{title}, {unit}"), class_=name)
        for width, name in ((wide, "wide"), (358, "narrow"))
    ]
    return element("figure", caption, drawings, element("p", note, class_="note") if note else None)


def _drawing(groups: Sequence[BarGroup], width: int, name: str) -> Markup:
    largest = max((bar.value for group in groups for bar in group.bars), default=0.0)
    left = 14 + 7 * max((len(bar.label) for group in groups for bar in group.bars), default=0)
    room = width - left - VALUE
    top = 0.0
    parts: list[Markup] = []
    for group in groups:
        if group.title:
            parts.append(element("text", group.title, x=0, y=top + 16, class_="strong"))
            top += TITLE
        first = top
        for bar in group.bars:
            parts.append(_bar(bar, left, top, room * bar.value / largest if largest else 0.0))
            top += ROW
        parts.append(element("line", x1=left, x2=left, y1=first, y2=top, class_="axis"))
        top += GAP
    return element("svg", parts, viewBox=f"0 0 {width} {top}", role="img", aria_label=name)


def _bar(bar: Bar, left: float, top: float, length: float) -> Markup:
    middle = top + ROW / 2
    return joined(
        (
            element("text", bar.label, x=left - 10, y=middle + 4, text_anchor="end"),
            element(
                "rect",
                x=left,
                y=top + 3,
                width=max(1.0, length),
                height=ROW - 6,
                rx=1,
                class_=f"bar {bar.tone}",
            ),
            element("text", bar.shown, x=left + length + 8, y=middle + 4, class_="value"),
        )
    )
