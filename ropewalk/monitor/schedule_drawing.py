"""A pipeline schedule as one SVG file: a lane per rank, a box per computation, and idle time.

Drawn from plain values, simulated or measured. The file contains its own style.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.files import committed_file

from .draw.markup import Markup, element, joined, number
from .draw.scale import Scale, tick_labels
from .report.page import asset

LANE, GAP = 26, 5
LEFT, RIGHT, EDGE = 78, 142, 24
"""Pixels for the labels of the lanes, for the notes behind them, and around the drawing."""
HEAD = 92
"""Pixels above the lanes, for title, caption and legend."""
FOOT = 34
"""Pixels below the lanes, for the axis."""
NARROWEST, WIDEST = 760.0, 3200.0
"""Minimum and maximum width of the time axis in pixels."""
DIGIT = 7.0
"""Pixels of a digit: the shortest box has room for its number, unless the drawing would become too wide."""

KINDS = {
    "F": ("forward", "tone-0"),
    "B": ("backward", "tone-1"),
    "I": ("backward: input", "tone-1"),
    "W": ("backward: weights", "tone-2"),
}
"""Name and colour of every kind of box."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleBox:
    """One computation of a stage for a microbatch."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """The computations of one rank, in order, and a note behind them."""

    label: str
    note: str
    boxes: Sequence[ScheduleBox]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """The lanes of a schedule with title, caption and unit."""

    title: str
    caption: str
    unit: str
    """Unit of the axis."""
    stages: Sequence[str]
    """Description of each pipeline stage, for tooltips."""
    lanes: Sequence[Lane]

    @property
    def end(self) -> float:
        return max((box.end for lane in self.lanes for box in lane.boxes), default=0.0)

    @property
    def shortest(self) -> float:
        return min((box.end - box.start for lane in self.lanes for box in lane.boxes), default=1.0)

    @property
    def microbatches(self) -> int:
        return 1 + max((box.microbatch for lane in self.lanes for box in lane.boxes), default=0)

    @property
    def chunks(self) -> int:
        """Pipeline stages per lane."""
        return len(self.stages) // len(self.lanes)

    @property
    def kinds(self) -> list[str]:
        """The kinds of box that occur."""
        there = {box.kind for lane in self.lanes for box in lane.boxes}
        return [kind for kind in KINDS if kind in there]


def write_drawing(path: Path, drawing: Drawing) -> Path:
    """Writes the SVG file; returns its path."""
    with committed_file(path, "w") as file:
        file.write(schedule_svg(drawing))
    return path


def schedule_svg(drawing: Drawing) -> Markup:
    """The drawing as a stand-alone document, for light and dark screens."""
    box = DIGIT * len(str(drawing.microbatches)) + 8
    wanted = box * drawing.end / drawing.shortest if drawing.shortest else WIDEST
    length = max(NARROWEST, min(wanted, WIDEST))
    start = EDGE + LEFT
    scale = Scale(0.0, drawing.end or 1.0, start, start + length)
    width = start + length + RIGHT + EDGE
    bottom = HEAD + len(drawing.lanes) * (LANE + GAP)
    height = bottom + FOOT + EDGE / 2
    return element(
        "svg",
        element("title", f"{drawing.title}: {drawing.caption}"),
        element("style", asset("drawing.css"), _STYLE),
        element("rect", width="100%", height="100%", class_="paper"),
        _head(drawing),
        _axis(drawing, scale, bottom),
        [_lane(drawing, lane, scale, HEAD + row * (LANE + GAP)) for row, lane in enumerate(drawing.lanes)],
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
    )


_STYLE = Markup("""
svg text.title { font-weight: 650; font-size: 17px; fill: var(--ink); }
svg text.caption { font-size: 14px; }
svg text.on { fill: var(--paper); } svg text.off { fill: var(--ink); }
svg g.box text { font-size: 11px; pointer-events: none; }
svg g.box:hover rect { stroke: var(--ink); stroke-width: 1.5; }
.paper { fill: var(--paper); } .idle { fill: var(--line); opacity: 0.55; }
""")


def _head(drawing: Drawing) -> Markup:
    parts = [
        element("text", drawing.title, x=EDGE, y=EDGE + 12, class_="title"),
        element("text", drawing.caption, x=EDGE, y=EDGE + 34, class_="caption"),
    ]
    left = float(EDGE)
    for words, tone in (*(KINDS[kind] for kind in drawing.kinds), ("waiting", "")):
        shades = [_shade(chunk, drawing.chunks) for chunk in range(drawing.chunks)] if tone else [None]
        for shade in shades:
            look = f"bar {tone}" if tone else "idle"
            parts.append(
                element("rect", x=left, y=EDGE + 45, width=13, height=11, rx=2, class_=look, fill_opacity=shade)
            )
            left += 15
        told = f"{words}, by chunk" if len(shades) > 1 else words
        parts.append(element("text", told, x=left + 4, y=EDGE + 55))
        left += 24 + 6.6 * len(told)
    return joined(parts)


def _axis(drawing: Drawing, scale: Scale, bottom: float) -> Markup:
    ticks = scale.ticks(10)
    parts = [
        element("line", x1=scale(tick), x2=scale(tick), y1=HEAD - 3, y2=bottom + 3, class_="grid") for tick in ticks
    ]
    parts += [
        element("text", label, x=scale(tick), y=bottom + 17, text_anchor="middle")
        for tick, label in zip(ticks, tick_labels(ticks), strict=True)
    ]
    return joined([*parts, element("text", drawing.unit, x=scale.start, y=bottom + 34)])


def _lane(drawing: Drawing, lane: Lane, scale: Scale, top: float) -> Markup:
    middle = top + LANE / 2 + 4
    return joined(
        (
            element("text", lane.label, x=scale.start - 12, y=middle, text_anchor="end", class_="value"),
            element("rect", x=scale.start, y=top, width=scale.end - scale.start, height=LANE, rx=2, class_="idle"),
            *(_box(box, drawing, scale, top) for box in lane.boxes),
            element("text", lane.note, x=scale.end + 14, y=middle),
        )
    )


def _box(box: ScheduleBox, drawing: Drawing, scale: Scale, top: float) -> Markup:
    words, tone = KINDS[box.kind]
    left, right = scale(box.start), scale(box.end)
    shade = _shade(box.stage // len(drawing.lanes), drawing.chunks)
    told = (
        f"{words} of microbatch {box.microbatch}\n{drawing.stages[box.stage]}\n"
        f"{box.start:.3g} to {box.end:.3g} {drawing.unit}"
    )
    # A gap of one pixel separates boxes.
    width = max(0.5, right - left - 1)
    label = str(box.microbatch)
    text = element(
        "text",
        label,
        x=left + width / 2,
        y=top + LANE / 2 + 4,
        text_anchor="middle",
        class_="on" if shade > 0.6 else "off",
    )
    return element(
        "g",
        element("title", told),
        element("rect", x=left, y=top, width=width, height=LANE, rx=2, class_=f"bar {tone}", fill_opacity=shade),
        text if width >= DIGIT * len(label) + 2 else None,
        class_="box",
    )


def _shade(chunk: int, chunks: int) -> float:
    """Opacity: the first stage of a rank has the full colour, later ones are lighter."""
    return 1 - 0.65 * chunk / max(1, chunks - 1)
