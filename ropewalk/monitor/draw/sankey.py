"""The funnel as a Sankey diagram.

Kept documents flow straight along the top; removed documents leave downwards, right after the step, to nodes whose
labels are in the free space below. So ribbons never cross and labels never overlap them, whatever the counts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from ropewalk.base.progress import amount

from ..funnel import Flow, FunnelLink, Measure, Node, size_of
from .markup import Markup, element, joined, number

WIDTH = 1080
STREAM = 190
"""Height of all documents together, in pixels."""
NODE = 9
TOP = 62
RIGHT = 124
GAP = 140
"""Minimum pixels between columns; many steps make the drawing wider, and the page scales it down."""
BRANCH = 44
"""Pixels from a step to the nodes of removed documents."""
LINE = 15
CHARACTER = 6.4
"""Pixels of an average character of a label."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Column layout: position of the first, distance, and total width."""

    left: float
    gap: float
    width: float
    measure: Measure
    """Measure of ribbon widths."""

    @property
    def letters(self) -> int:
        """Characters of a label that fit between a removed node and the next column."""
        return int((self.gap - 2 * NODE - BRANCH - 18) / CHARACTER)


@dataclass(frozen=True, slots=True)
class Box:
    """Position of a node."""

    x: float
    y: float
    height: float


def draw_flow(flow: Flow, measure: Measure = "documents") -> Markup:
    """The flow as one SVG, with ribbons as wide as their documents or bytes; a phone scrolls it sideways."""
    nodes = [node for node in flow.nodes if node.kind in ("source", "step") or size_of(node, measure)]
    total = sum(size_of(node, measure) for node in nodes if node.kind == "source")
    scale = STREAM / total if total else 0.0
    frame = _frame(flow, measure)
    boxes = _boxes(nodes, scale, frame, columns=len(flow.steps) + 2)
    height = max(_bottom(node, boxes[node.key], frame) for node in nodes) + 6
    return element(
        "svg",
        _ribbons(flow, boxes, scale, measure),
        [_node(node, boxes[node.key], frame) for node in nodes],
        viewBox=f"0 0 {number(frame.width)} {number(height)}",
        role="img",
        aria_label=f"{measure} of each source through the steps of prepare",
        class_="sankey",
    )


def source_tone(flow: Flow, source: str) -> str:
    """The colour class of a source, the same in drawing and legend."""
    return f"tone-{flow.sources.index(source) % 6}"


def _frame(flow: Flow, measure: Measure) -> Frame:
    names = max(len(source) for source in flow.sources)
    left = max(124.0, 1.4 * CHARACTER * names + 16)
    columns = len(flow.steps) + 1
    width = max(WIDTH, left + RIGHT + NODE + GAP * columns)
    return Frame(left, (width - left - RIGHT - NODE) / columns, width, measure)


def _boxes(nodes: list[Node], scale: float, frame: Frame, *, columns: int) -> dict[str, Box]:
    boxes: dict[str, Box] = {}
    for column in range(columns):
        below: float = TOP
        x = frame.left + column * frame.gap
        for node in (node for node in nodes if node.column == column):
            height = max(1.5, size_of(node, frame.measure) * scale)
            box = Box(x + (NODE + BRANCH if node.kind == "removed" else 0), below, height)
            boxes[node.key] = box
            below = max(below + height + 16, _bottom(node, box, frame) + 8)
    return boxes


def _bottom(node: Node, box: Box, frame: Frame) -> float:
    """The lowest pixel of the node, or of its label if that is beside it."""
    lines = 0 if node.kind == "step" else len(_label(node, frame))
    return max(box.y + box.height, box.y + lines * LINE)


def _label(node: Node, frame: Frame) -> list[str]:
    """The lines beside or above a node: its name, documents and bytes."""
    if node.kind == "removed":
        rule = textwrap.wrap(node.label.replace("_", " "), frame.letters, break_long_words=False)
        return [*rule, f"{node.documents:,}" if frame.measure == "documents" else amount(node.bytes or 0, "B")]
    size = [amount(node.bytes, "B")] if node.bytes is not None else []
    unit = "document" if node.documents == 1 else "documents"
    return [node.label, f"{node.documents:,} {unit}", *size]


def _node(node: Node, box: Box, frame: Frame) -> Markup:
    lines = _label(node, frame)
    if node.kind == "source":
        x, y, anchor = box.x - 8, box.y + 11, "end"
    elif node.kind == "step":
        x, y, anchor = box.x, box.y - 8 - LINE * (len(lines) - 1), "start"
    else:
        x, y, anchor = box.x + NODE + 7, box.y + 11, "start"
    texts = [
        element("text", line, x=x, y=y + i * LINE, text_anchor=anchor, class_=_line_class(node, i, len(lines)))
        for i, line in enumerate(lines)
    ]
    width = NODE if node.kind != "removed" else 5
    rect = element(
        "rect",
        x=box.x,
        y=box.y,
        width=width,
        height=box.height,
        class_=f"node {'gone' if node.kind == 'removed' else ''}",
    )
    return joined((rect, texts))


def _line_class(node: Node, index: int, lines: int) -> str:
    if node.kind == "removed":
        return "value" if index == lines - 1 else ""
    return "strong" if index == 0 else "value" if index == 1 else ""


def _ribbons(flow: Flow, boxes: dict[str, Box], scale: float, measure: Measure) -> list[Markup]:
    """One ribbon per link. At a node they are stacked: kept above removed, then in the order of sources."""
    leaving = {key: box.y for key, box in boxes.items()}
    arriving = dict(leaving)
    order = {node.key: index for index, node in enumerate(flow.nodes)}
    labels = {node.key: node.label for node in flow.nodes}

    def rank(link: FunnelLink) -> tuple[bool, int, int]:
        return link.end.startswith("removed:"), order[link.end], flow.sources.index(link.source)

    drawn = []
    for link in sorted((link for link in flow.links if size_of(link, measure)), key=rank):
        thickness = size_of(link, measure) * scale
        start, end = boxes[link.start], boxes[link.end]
        above, below = (start.x + NODE, leaving[link.start]), (end.x, arriving[link.end])
        leaving[link.start] += thickness
        arriving[link.end] += thickness
        told = f"{link.source}: {_told(link, measure)}, {labels[link.start]} to {labels[link.end]}"
        faint = " gone" if link.end.startswith("removed:") else ""
        drawn.append(
            element(
                "path",
                element("title", told),
                d=_ribbon(above, below, max(1.0, thickness)),
                class_=f"ribbon {source_tone(flow, link.source)}{faint}",
            )
        )
    return drawn


def _told(link: FunnelLink, measure: Measure) -> str:
    return f"{link.documents:,} documents" if measure == "documents" else amount(link.bytes or 0, "B")


def _ribbon(start: tuple[float, float], end: tuple[float, float], thickness: float) -> str:
    (x0, y0), (x1, y1) = start, end
    middle = (x0 + x1) / 2
    return (
        _verse("M", (x0, y0))
        + _verse("C", (middle, y0), (middle, y1), (x1, y1))
        + _verse("L", (x1, y1 + thickness))
        + _verse("C", (middle, y1 + thickness), (middle, y0 + thickness), (x0, y0 + thickness))
        + "Z"
    )


def _verse(letter: str, *points: Iterable[float]) -> str:
    return letter + " ".join(",".join(map(number, point)) for point in points)
