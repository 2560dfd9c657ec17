"""Writes `report.html` of an evaluation that belongs to no run: a checkpoint's or a Hugging Face directory's."""

from __future__ import annotations

import time
from pathlib import Path

from ropewalk.base.files import committed_file
from ropewalk.base.metric import headline, titled
from ropewalk.base.seal import parse_sealed

from ...draw.markup import Markup, element
from ...evaluation_view import EvaluationView, read_evaluation
from ...values import mapping, text
from ..page import page, warning_box
from ..quality import overview_section
from .worst_items import worst_section

FILE = "report.html"


def write_evaluation_report(folder: Path) -> Path:
    """Writes the report of the evaluation in `folder`; returns its path."""
    path, missing = folder / FILE, list[str]()
    source = folder / "evaluation" / "results.json"
    results = mapping(parse_sealed(source.read_bytes(), path=source, what=source.name, remedy="", sealed_since=2))
    document = _render(read_evaluation(folder, results, missing), missing)
    with committed_file(path, "w") as file:
        file.write(document)
    return path


def _render(view: EvaluationView, missing: list[str]) -> Markup:
    model = text(view.results.get("model")) or "model"
    name = Path(model).name
    first = headline(view.tasks)
    verdict = f"{first[1].text()} {titled(*first)}" if first else "nothing was measured"
    header = element(
        "header",
        element("p", "ropewalk evaluation", class_="kicker"),
        element("h1", name),
        element("p", f"{model}: {verdict}", class_="verdict"),
        warning_box(missing),
        class_="top",
    )
    stamp = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    footer = element("footer", f"Read on {stamp}. This page is one file and needs no network.")
    return page(
        f"{name} · ropewalk", element("main", header, overview_section(view, None), worst_section(view)), footer
    )
