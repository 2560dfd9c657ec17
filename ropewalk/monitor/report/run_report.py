"""Writes `report.html`: the run on one page that works offline."""

from __future__ import annotations

import time
from pathlib import Path

from ropewalk.base.files import committed_file

from ..draw.markup import Child, Markup, element
from ..evaluation_view import Change
from ..headline import KeyFigure, key_figures, verdict
from ..run_view import RunView, read_run
from .corpus_section import corpus_section
from .evaluation.worst_items import worst_section
from .layer_maps import layers_section
from .page import page
from .quality import quality_section, samples_section
from .record import config_section, events_section, machine_section, time_section
from .training import live_tasks_section, loss_section, pace_section

FILE = "report.html"


def write_report(run: Path, *, change: Change | None = None) -> Path:
    """Writes the report of the run, finished or not; returns its path. `change` stands beside its results."""
    path = run / FILE
    document = render(read_run(run), change=change)
    with committed_file(path, "w") as file:
        file.write(document)
    return path


def render(view: RunView, *, change: Change | None = None) -> Markup:
    """The whole page."""
    sections = [
        loss_section(view),
        live_tasks_section(view),
        quality_section(view, change),
        worst_section(view.evaluated),
        samples_section(view),
        corpus_section(view),
        pace_section(view),
        layers_section(view),
        time_section(view),
        events_section(view),
        config_section(view),
        machine_section(view),
    ]
    return page(f"{view.name} · ropewalk", element("main", _header(view), sections), _footer(view))


def _header(view: RunView) -> Markup:
    return element(
        "header",
        element("p", "ropewalk run", class_="kicker"),
        element("h1", view.name),
        element("p", verdict(view), class_="verdict"),
        _missing(view),
        element("dl", [_tile(figure) for figure in key_figures(view)], class_="tiles"),
        class_="top",
    )


def _tile(figure: KeyFigure) -> Markup:
    note = element("dd", figure.note, class_="against") if figure.note else None
    return element("div", element("dt", figure.name), element("dd", figure.value, class_="figure"), note)


def _missing(view: RunView) -> Child:
    """A banner for an unfinished run, with the missing files."""
    if view.finished and not view.missing:
        return None
    state = "Some files of this run are missing or damaged." if view.finished else "This run is not finished."
    items = element("ul", [element("li", line) for line in view.missing]) if view.missing else None
    return element("div", element("p", f"{state} This page shows what is available."), items, class_="missing")


def _footer(view: RunView) -> Markup:
    stamp = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(view.read_at))
    return element("footer", f"Read from the files of the run on {stamp}. This page is one file and needs no network.")
