"""Writes the comparison of runs as one HTML page that works offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ropewalk.base.files import committed_file

from ..comparison import AXES, PAIRED_NOTE, SMOOTHED_STEPS, UNITS, Axis, Comparison, figures, paired_rows
from ..draw.chart import HALF, Chart, Series, figure
from ..draw.markup import Markup, element
from .page import empty, page, scrolling, section, table, warning_box

_TONES = 6
_MEAN = f"Each point is the mean of the last {SMOOTHED_STEPS} steps or more."


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Writes the page to `path`."""
    with committed_file(path, "w") as file:
        file.write(render_comparison(comparison))
    return path


def render_comparison(comparison: Comparison) -> Markup:
    """The whole page."""
    names = comparison.labels
    head, *rows = figures(comparison)
    header = element(
        "header", element("p", "ropewalk runs", class_="kicker"), element("h1", " · ".join(names)), class_="top"
    )
    sections = [
        section("Results", warning_box(comparison.notes), scrolling(table(head, rows))),
        *_paired(comparison),
        *_standardised(comparison),
        section("Settings that differ", _settings(comparison, names)),
        section("Training loss", _charts(comparison, "training"), element("p", _MEAN, class_="note")),
        section("Validation loss", _charts(comparison, "validation")),
    ]
    return page(f"{' · '.join(names)} · ropewalk", element("main", header, sections))


def _paired(comparison: Comparison) -> list[Markup]:
    rows = paired_rows(comparison)
    if not rows:
        return []
    head, *body = rows
    return [section("Paired differences", scrolling(table(head, body)), element("p", PAIRED_NOTE, class_="note"))]


def _standardised(comparison: Comparison) -> list[Markup]:
    found = comparison.standardised
    if found is None:
        return []
    tables = [scrolling(table(head, rows)) for head, *rows in (found.cells(), found.cells(details=True))]
    return [section(found.title, tables, [element("p", note, class_="note") for note in found.notes])]


def _settings(comparison: Comparison, names: Sequence[str]) -> Markup:
    rows = [(key, *map(setting_text, values)) for key, values in comparison.settings.items()]
    return scrolling(table(("setting", *names), rows)) if rows else empty("All settings are the same.")


def _charts(comparison: Comparison, measure: str) -> Markup:
    return element("div", [_chart(comparison, measure, axis) for axis in AXES], class_="pair")


def _chart(comparison: Comparison, measure: str, axis: Axis) -> Markup:
    curves = [getattr(side, measure) for side in comparison.sides]
    series = [
        Series(name=name, points=list(zip(curve.x[axis], curve.loss, strict=True)), tone=f"tone-{index % _TONES}")
        for index, (name, curve) in enumerate(zip(comparison.labels, curves, strict=True))
    ]
    if not any(one.points for one in series):
        return empty(f"No {measure} loss has been measured yet.")
    return figure(
        Chart(
            title=f"By {UNITS[axis]}",
            unit="nats per token",
            series=series,
            x_name=UNITS[axis],
            show=lambda value: f"{value:.4f}",
        ),
        HALF,
    )


def setting_text(value: object) -> str:
    """A setting as in a recipe, `-` if a run does not have it."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
