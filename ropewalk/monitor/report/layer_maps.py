"""The report section about layers: gradient, update and activation over the measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..draw.markup import Child, Markup, element, joined, number
from ..run_view import LayerRecord, RunView
from .page import section

MOST_COLUMNS = 60
"""Maximum steps in a map; if there are more, every second, third, ... is drawn."""
LEVELS = 12
"""Shades of a map."""
LEAST_DECADES = 2.0
"""A map spans at least this many powers of ten, so that small differences between layers look small."""


def layers_section(view: RunView) -> Child:
    """A map of layers over steps per figure; nothing if layers were not measured."""
    if not view.layers:
        return None
    names = view.layers[-1].names
    parts = [name for name in names if name.endswith((".attention", ".mlp"))]
    layers = [name for name in names if name not in parts]
    steps = _thinned(view.layers)
    maps = [
        Map(title=title, unit=unit, tone=tone, names=rows, steps=steps, figure=figure)
        for rows, figure, title, unit, tone in (
            (layers, "gradient", "Gradient norm", "before clipping", "tone-4"),
            (layers, "update_ratio", "Update", "norm, relative to the weights", "tone-3"),
            (layers, "activation", "Output", "root mean square", "tone-1"),
            (parts, "activation", "Output of attention and feed-forward", "root mean square", "tone-1"),
        )
        if rows
    ]
    return section("Layers", element("div", [_figure(one) for one in maps], class_="pair"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Map:
    """A figure of every layer (rows) at every measured step (columns)."""

    title: str
    unit: str
    tone: str
    names: Sequence[str]
    steps: Sequence[LayerRecord]
    figure: str

    def value(self, row: int, column: int) -> float | None:
        return self.steps[column].value(self.figure, self.names[row])

    def row(self, row: int) -> list[float]:
        """The finite values of a layer."""
        found = (self.value(row, column) for column in range(len(self.steps)))
        return [value for value in found if value is not None and math.isfinite(value)]

    def broken(self) -> bool:
        """Whether a value is not finite."""
        cells = (self.value(row, column) for row in range(len(self.names)) for column in range(len(self.steps)))
        return any(value is not None and not math.isfinite(value) for value in cells)

    def decades(self) -> tuple[float, float] | None:
        """The range of the shades in powers of ten; None if no value is above 0."""
        sizes = [math.log10(value) for row in range(len(self.names)) for value in self.row(row) if value > 0]
        if not sizes:
            return None
        low, high = min(sizes), max(sizes)
        margin = max(0.0, LEAST_DECADES - (high - low)) / 2
        return low - margin, high + margin


@dataclass(frozen=True, slots=True)
class Grid:
    """Pixel layout of a map."""

    left: float
    width: float
    cell_width: float
    cell_height: float
    rows: int

    @property
    def bottom(self) -> float:
        return self.cell_height * self.rows


def _thinned(records: Sequence[LayerRecord]) -> list[LayerRecord]:
    """Evenly spaced measurements, counted from the last."""
    return list(records[:: -math.ceil(len(records) / MOST_COLUMNS)])[::-1]


def _figure(one: Map) -> Markup:
    span = one.decades()
    caption = element("figcaption", element("strong", one.title), element("span", one.unit, class_="unit"))
    if span is None:
        return element("figure", caption, element("p", "No finite value above 0.", class_="note"))
    low, high = (f"{10**end:.1e}" for end in span)
    note = f"Darker is larger, from {low} to {high} by powers of ten."
    if one.broken():
        note += " Red is not finite."
    drawings = [
        element("div", _drawing(one, span, width), class_=name) for width, name in ((524, "wide"), (358, "narrow"))
    ]
    return element("figure", caption, drawings, element("p", note, class_="note"))


def _drawing(one: Map, span: tuple[float, float], width: int) -> Markup:
    left = 14 + 7 * max(map(len, one.names))
    rows = len(one.names)
    height = max(4, min(16, 400 // rows))
    grid = Grid(left, width, (width - left - 12) / len(one.steps), height, rows)
    return element(
        "svg",
        _cells(one, span, grid),
        _names(one, grid),
        _steps(one, grid),
        viewBox=f"0 0 {width} {number(grid.bottom + 24)}",
        role="img",
        aria_label=f"{one.title} of each layer over steps",
    )


def _cells(one: Map, span: tuple[float, float], grid: Grid) -> Markup:
    """One path per shade, a tenth of the bytes of one rectangle per cell."""
    paths: dict[int, list[str]] = {}
    for row in range(grid.rows):
        for column in range(len(one.steps)):
            value = one.value(row, column)
            if value is not None:
                place = f"M{number(grid.left + column * grid.cell_width)},{number(row * grid.cell_height)}"
                cell = f"{place}h{number(grid.cell_width)}v{number(grid.cell_height)}h-{number(grid.cell_width)}z"
                paths.setdefault(_shade(value, span), []).append(cell)
    return joined(
        element(
            "path",
            d="".join(cells),
            class_=f"bar {one.tone}" if shade >= 0 else "bar broken",
            fill_opacity=(shade + 1) / LEVELS if shade >= 0 else 1,
        )
        for shade, cells in sorted(paths.items())
    )


def _shade(value: float, span: tuple[float, float]) -> int:
    """Index of the shade, 0 is the lightest; -1 for a non-finite value."""
    if not math.isfinite(value):
        return -1
    low, high = span
    share = (math.log10(value) - low) / (high - low) if value > 0 else 0.0
    return min(LEVELS - 1, int(share * LEVELS))


def _names(one: Map, grid: Grid) -> Markup:
    """Layer names, as many as fit; a tooltip per row shows its values."""
    every = math.ceil(14 / grid.cell_height)
    parts: list[Markup] = []
    for row, name in enumerate(one.names):
        top = row * grid.cell_height
        if row % every == 0:
            middle = top + grid.cell_height / 2
            parts.append(element("text", name, x=grid.left - 8, y=middle + 4, text_anchor="end"))
        values = one.row(row)
        story = f"{name}: {min(values):.3g} to {max(values):.3g}, last {values[-1]:.3g}" if values else f"{name}: none"
        width, height = grid.width - grid.left - 12, grid.cell_height
        hint = element("title", story)
        parts.append(element("rect", hint, x=grid.left, y=top, width=width, height=height, fill="transparent"))
    return joined(parts)


def _steps(one: Map, grid: Grid) -> Markup:
    """The first and the last step under the map."""
    first, last = one.steps[0].step, one.steps[-1].step
    ends = [(grid.left, f"step {first}", "start")]
    if last != first:
        ends.append((grid.width - 12, f"{last}", "end"))
    return joined(element("text", label, x=x, y=grid.bottom + 17, text_anchor=side) for x, label, side in ends)
