"""`ropewalk compare`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ropewalk import flow
from ropewalk.monitor.comparison import (
    PAIRED_NOTE,
    SMOOTHED_STEPS,
    UNITS,
    Comparison,
    figures,
    paired_rows,
    place_text,
)
from ropewalk.monitor.report.comparison_page import setting_text

from .options import Json, verb
from .progress_lines import emit
from .run_results import aligned

app = verb()

_WIDEST = 32
"""Maximum length of a setting in the table."""


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two run directories or more.", show_default=False)],
    by: Annotated[
        Literal["step", "tokens", "flops", "time"], typer.Option("--by", help="X axis of the curves.")
    ] = "step",
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Also write an HTML page with charts along all four axes.", show_default=False),
    ] = None,
    kola_reference: Annotated[
        Path | None,
        typer.Option(
            "--kola-reference",
            help="JSON with the results of other models, to standardise the runs' KoLA scores with; one run will do.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Compare runs: results with 95 % intervals, differing settings, loss curves.

    Example: ropewalk compare runs/quickstart runs/other-seed

    Runs that scored the same items or held-out documents are compared on these, by paired tests. Curves run along
    steps, tokens, FLOPs or training time. Only reads files; runs may still be training.
    """
    found = flow.compare(runs, page=html, kola_reference=kola_reference)
    parts = ["\n".join(aligned(figures(found))), _paired(found), _standardised(found)]
    parts += [_settings(found), _curves(found, by), *found.notes]
    parts += [f"wrote {html}"] if html else []
    emit(found.tree(), as_json=json, text="\n\n".join(part for part in parts if part))


def _paired(found: Comparison) -> str:
    rows = paired_rows(found)
    return "\n".join([*aligned(rows), PAIRED_NOTE]) if rows else ""


def _standardised(found: Comparison) -> str:
    scores = found.standardised
    return "\n".join([scores.title, *aligned(scores.cells()), *scores.notes]) if scores else ""


def _settings(found: Comparison) -> str:
    if not found.settings:
        return "all settings are the same"
    head = ("setting", *found.labels)
    return "\n".join(aligned([head, *((key, *map(_short, values)) for key, values in found.settings.items())]))


def _short(value: object) -> str:
    text = setting_text(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _curves(found: Comparison, by: Literal["step", "tokens", "flops", "time"]) -> str:
    """A table of losses at places that all runs have reached."""
    measure = found.measure()
    rows: list[tuple[str, ...]] = [(UNITS[by], *found.labels)]
    for place in found.places(by):
        losses = [getattr(side, measure).at(by, place) for side in found.sides]
        rows.append((place_text(place, by), *("-" if loss is None else f"{loss:.4f}" for loss in losses)))
    if len(rows) == 1:
        return f"the runs have no {UNITS[by]} in common, at which each has a {measure} loss"
    mean = f" (means of {SMOOTHED_STEPS} steps or more)" if measure == "training" else ""
    return "\n".join([f"{measure} loss{mean}, in nats per token", *aligned(rows)])
