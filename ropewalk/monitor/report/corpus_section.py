"""The report section about the corpus: documents read, removed by rule, and kept."""

from __future__ import annotations

from typing import Any

from ropewalk.base.errors import DataError
from ropewalk.base.progress import amount

from ..draw.markup import Markup, element
from ..draw.sankey import draw_flow, source_tone
from ..funnel import SMALL, Count, Flow, Measure, Node, gather_small, read_counts, read_flow
from ..run_view import RunView
from ..values import text
from .page import empty, scrolling, section, table, warning_box

TITLE = "Data"


def corpus_section(view: RunView) -> Markup:
    """Outcomes of the documents of the run's corpus."""
    if not view.manifest:
        where = f" (looked in {view.manifest_folder})" if view.manifest_folder else ""
        return section(
            TITLE,
            empty(f"There is no manifest of prepared data{where}, so the outcomes of documents are not known here."),
        )
    prepared = next((stage.result for stage in view.stages if stage.name == "prepare"), {})
    warnings = [text(line) for line in prepared.get("warnings") or ()]
    return section(TITLE, warning_box(warnings), funnel_figures(view.manifest))


def funnel_figures(manifest: Any) -> list[Markup]:
    """Sankey diagrams of documents and, if the manifest has them, bytes; and the same counts as a table."""
    try:
        flow, counts = read_flow(manifest), read_counts(manifest)
    except DataError as error:
        return [empty(f"The manifest cannot be drawn: {error}.")]
    figures = [_figure(flow, "documents", "Outcome of each document")]
    if flow.knows_bytes:
        figures.append(_figure(flow, "bytes", "Outcome of each byte"))
    numbers = element("details", element("summary", "As a table"), scrolling(_numbers(counts)))
    return [*figures, numbers]


def _figure(flow: Flow, measure: Measure, title: str) -> Markup:
    legend = [element("span", element("i", class_=f"key {source_tone(flow, name)}"), name) for name in flow.sources]
    caption = element(
        "figcaption",
        element("strong", title),
        element("span", _outcome(flow, measure), class_="unit"),
        element("span", legend, class_="legend"),
    )
    drawn, small = gather_small(flow, measure)
    return element("figure", caption, scrolling(draw_flow(drawn, measure)), _small(flow, small, measure))


def _small(flow: Flow, nodes: list[Node], measure: Measure) -> Markup | list[Markup]:
    """A table of the rules that the drawing merges."""
    if not nodes:
        return []
    rows = [
        (
            flow.steps[node.column - 1],
            node.label,
            f"{node.documents:,}" if measure == "documents" else amount(node.bytes or 0, "B"),
        )
        for node in nodes
    ]
    title = f"The {len(rows)} rules that removed less than {100 * SMALL:g} % of all {measure} each"
    return element(
        "details", element("summary", title), scrolling(table(("step", "rule", measure), rows, numeric=(2,)))
    )


def _outcome(flow: Flow, measure: Measure) -> str:
    def total(kind: str) -> int:
        nodes = (node for node in flow.nodes if node.kind == kind)
        return sum(node.documents if measure == "documents" else node.bytes or 0 for node in nodes)

    read, kept = total("source"), total("kept")
    share = f" ({100 * kept / read:.1f} %)" if read else ""
    if measure == "bytes":
        return f"{amount(kept, 'B')} of {amount(read, 'B')} kept{share}"
    return f"{kept:,} of {read:,} documents kept{share}"


def _numbers(counts: list[Count]) -> Markup:
    rows = [
        (
            count.source,
            count.step,
            f"{count.documents_in:,}",
            f"{count.documents_out:,}",
            amount(count.bytes_in, "B"),
            amount(count.bytes_out, "B"),
            _by_rule(count.removed),
            _by_rule(count.edited),
        )
        for count in counts
    ]
    heads = ("source", "step", "documents in", "out", "bytes in", "out", "removed by rule", "edited by rule")
    return table(heads, rows, numeric=(2, 3, 4, 5))


def _by_rule(rules: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{rule} {documents:,}" for rule, documents in rules if documents) or "–"
