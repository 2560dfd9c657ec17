"""The section about the corpus: which documents came in, what removed some, what was kept."""

from __future__ import annotations

from ropewalk.base.errors import DataError
from ropewalk.base.progress import amount

from .funnel import Count, Flow, read_counts, read_flow
from .markup import Markup, element
from .page import empty, scrolling, section, table
from .run import RunView
from .sankey import draw_flow, source_tone

TITLE = "Data"


def corpus_section(view: RunView) -> Markup:
    """The Sankey of documents, and the same counts as a table."""
    if not view.manifest:
        where = f" (looked in {view.manifest_folder})" if view.manifest_folder else ""
        return section(
            TITLE, empty(f"There is no manifest of prepared data{where}, so what was kept is not known here.")
        )
    try:
        flow, counts = read_flow(view.manifest), read_counts(view.manifest)
    except DataError as error:
        return section(TITLE, empty(f"The manifest cannot be drawn: {error}."))
    legend = [element("span", element("i", class_=f"key {source_tone(flow, name)}"), name) for name in flow.sources]
    caption = element(
        "figcaption",
        element("strong", "What became of each document"),
        element("span", _outcome(flow), class_="unit"),
        element("span", legend, class_="legend"),
    )
    drawing = element("figure", caption, scrolling(draw_flow(flow)))
    numbers = element("details", element("summary", "The same in numbers"), scrolling(_numbers(counts)))
    return section(TITLE, drawing, numbers)


def _outcome(flow: Flow) -> str:
    total = sum(node.documents for node in flow.nodes if node.kind == "source")
    kept = sum(node.documents for node in flow.nodes if node.kind == "kept")
    share = f" ({100 * kept / total:.1f} %)" if total else ""
    return f"{kept:,} of {total:,} documents kept{share}"


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
