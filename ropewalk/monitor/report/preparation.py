"""Writes `report.html` beside prepared data: the outcome of its documents and the reasons, on one offline page.

Everything on the page comes from `report.json`, which `prepare` writes (docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropewalk.base.files import committed_file
from ropewalk.base.progress import amount
from ropewalk.base.seal import read_sealed

from ..draw.bars import Bar, BarGroup, bar_figure
from ..draw.markup import Child, Markup, element
from ..values import finite, mapping, text, whole
from .corpus_section import funnel_figures
from .page import empty, page, scrolling, section, table, warning_box

FILE, PAGE = "report.json", "report.html"
FORMAT = 2
SEALED_SINCE = 2

MOST_PARTS = 10
"""Maximum number of sources, domains or languages with their own bar."""
MOST_RULES = 16
"""Maximum number of rules on the page; those that most documents break come first."""
OPEN_RULES = 4
"""Rules whose samples are unfolded."""


def write_page(folder: Path) -> Path:
    """Writes the page of the data in `folder`; returns its path."""
    path = folder / FILE
    tree = read_sealed(
        path,
        what="report of prepared data",
        remedy="`ropewalk prepare report` with the recipe rebuilds it",
        current=FORMAT,
        sealed_since=SEALED_SINCE,
        upgrades={1: lambda tree: tree},
    )
    document = render(tree, name=folder.name)
    with committed_file(folder / PAGE, "w") as file:
        file.write(document)
    return folder / PAGE


def render(tree: Mapping[str, Any], *, name: str) -> Markup:
    """The whole page."""
    manifest = mapping(tree.get("manifest"))
    sections = [
        section("Funnel", *funnel_figures(manifest)),
        _overlap_section(mapping(tree.get("overlap"))),
        _removed_section(_rows(tree, "samples")),
        _repeats_section(mapping(tree.get("repeats"))),
        _fertility_section(_rows(tree, "fertility")),
        _composition_section(mapping(tree.get("composition"))),
    ]
    footer = element("footer", "Read from the files of the prepared data. This page is one file and needs no network.")
    return page(f"{name} · ropewalk", element("main", _header(manifest, name), sections), footer)


def _header(manifest: Mapping[str, Any], name: str) -> Markup:
    shards = [mapping(shard) for shard in manifest.get("shards") or ()]
    tokens = {split: _total(shards, split, "tokens") for split in ("train", "validation")}
    figures = {
        "documents": f"{sum(_total(shards, split, 'documents') for split in tokens):,}",
        "training tokens": amount(tokens["train"]),
        "held-out tokens": amount(tokens["validation"]),
        "vocabulary": f"{whole(mapping(manifest.get('tokenizer')).get('vocabulary')) or 0:,}",
    }
    tiles = [
        element("div", element("dt", title), element("dd", value, class_="figure")) for title, value in figures.items()
    ]
    warnings = [text(line) for line in manifest.get("warnings") or ()]
    return element(
        "header",
        element("p", "ropewalk prepare", class_="kicker"),
        element("h1", name),
        warning_box(warnings),
        element("dl", tiles, class_="tiles"),
        class_="top",
    )


def _total(shards: list[Mapping[str, Any]], split: str, field: str) -> int:
    return sum(whole(shard.get(field)) or 0 for shard in shards if shard.get("split") == split)


def _overlap_section(overlap: Mapping[str, Any]) -> Markup:
    """A table of rules by rules; a cell is darker for a larger share of the row's documents."""
    rules = overlap.get("rules")
    counts = overlap.get("documents")
    alone = overlap.get("alone")
    if not isinstance(rules, list) or not isinstance(counts, list) or not isinstance(alone, list) or not rules:
        return section("Overlap of rules", empty("No document breaks a rule."))
    order = sorted(range(len(rules)), key=lambda place: (-_cell_count(counts, place, place), str(rules[place])))
    shown = order[:MOST_RULES]
    head = element(
        "tr",
        element("th", "rule"),
        element("th", "documents", class_="num"),
        element("th", "no other rule", class_="num"),
        [element("th", str(number), class_="num", title=str(rules[place])) for number, place in enumerate(shown, 1)],
    )
    body = [
        element(
            "tr",
            element("td", f"{number}  {rules[place]}"),
            element("td", f"{_cell_count(counts, place, place):,}", class_="num"),
            element("td", f"{whole(alone[place]) or 0:,}", class_="num"),
            [_overlap_cell(counts, place, other) for other in shown],
        )
        for number, place in enumerate(shown, 1)
    ]
    left_out = len(rules) - len(shown)
    note = f" {left_out} further rules are in report.json." if left_out else ""
    lead = element(
        "p",
        "Documents that break the rule of the row and also the rule of the column. All rules are evaluated on all "
        f"documents; the first one that a document breaks removes it.{note}",
        class_="lead muted",
    )
    matrix = element("table", element("thead", head), element("tbody", body), class_="overlap")
    return section("Overlap of rules", lead, scrolling(matrix))


def _overlap_cell(counts: list[Any], row: int, column: int) -> Markup:
    if row == column:
        return element("td", "–", class_="num muted")
    both, all_of_row = _cell_count(counts, row, column), _cell_count(counts, row, row)
    share = both / all_of_row if all_of_row else 0.0
    return element("td", f"{both:,}", class_=f"num share-{round(share * 5)}", title=f"{share:.0%}")


def _cell_count(counts: list[Any], row: int, column: int) -> int:
    line = counts[row] if row < len(counts) and isinstance(counts[row], list) else []
    return (whole(line[column]) or 0) if column < len(line) else 0


def _removed_section(samples: list[Mapping[str, Any]]) -> Markup:
    """Samples of removed documents, folded by stage and rule."""
    if not samples:
        return section("Samples of removed documents", empty("Nothing was removed."))
    rules: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for sample in samples:
        rules.setdefault((text(sample.get("stage")), text(sample.get("rule"))), []).append(sample)
    folds = [
        element(
            "details",
            element("summary", f"{stage}: {rule}"),
            element("div", [_card(sample) for sample in found], class_="pair cards"),
            open=number < OPEN_RULES,
        )
        for number, ((stage, rule), found) in enumerate(rules.items())
    ]
    return section("Samples of removed documents", folds)


def _card(sample: Mapping[str, Any]) -> Markup:
    head = element("header", element("span", text(sample.get("id"))), element("span", _measured(sample)))
    body: list[Child] = [element("pre", text(sample.get("text")) or "(no text)")]
    if sample.get("partner"):
        body.append(element("header", element("span", f"stays: {text(sample.get('partner'))}")))
        if sample.get("partner_text") is not None and sample.get("partner_text") != sample.get("text"):
            body.append(element("pre", text(sample.get("partner_text"))))
    return element("article", head, body)


def _measured(sample: Mapping[str, Any]) -> str:
    value, threshold = finite(sample.get("value")), finite(sample.get("threshold"))
    if value is None:
        return ""
    return f"{value:g}" + (f", limit {threshold:g}" if threshold is not None else "")


def _repeats_section(repeats: Mapping[str, Any]) -> Markup:
    """Histogram of how often texts occur, before deduplication."""
    bars = [mapping(bar) for bar in repeats.get("bars") or ()]
    seen = [bar for bar in bars if whole(bar.get("documents"))]
    if not seen:
        return section("Repeats", empty("There are no texts."))
    drawn = [_bar(bar) for bar in seen]
    note = "Exact and near duplicates as read, all copies counted."
    warning = text(repeats.get("warning"))
    figure = bar_figure("Text by how often it occurs", "bytes, all copies", [BarGroup("", drawn)], wide=1080, note=note)
    return section("Repeats", warning_box([warning] if warning else []), figure)


def _times(bar: Mapping[str, Any]) -> str:
    least, most = whole(bar.get("least")) or 0, whole(bar.get("most"))
    if least == most:
        return "once" if least == 1 else f"{least} times"
    return f"{least} to {most} times" if most else f"{least} times or more"


def _many(bar: Mapping[str, Any]) -> bool:
    return (whole(bar.get("least")) or 0) >= 9


def _bar(bar: Mapping[str, Any]) -> Bar:
    documents, size = whole(bar.get("documents")) or 0, whole(bar.get("bytes")) or 0
    texts = "text" if documents == 1 else "texts"
    tone = "tone-2" if _many(bar) else "tone-0"
    return Bar(f"{documents:,} {texts} {_times(bar)}", float(size), amount(size, "B"), tone)


def _fertility_section(rows: list[Mapping[str, Any]]) -> Markup:
    """Fertility of the tokenizer by source, domain and language."""
    if not rows:
        return section("Fertility", empty("Fertility was not measured."))
    cells = [
        (
            text(row.get("by")),
            text(row.get("name")),
            f"{whole(row.get('tokens')) or 0:,}",
            *(_decimal(row.get(key)) for key in ("bytes_per_token", "characters_per_token", "tokens_per_word")),
        )
        for row in rows
    ]
    heads = ("by", "", "tokens", "bytes per token", "characters per token", "tokens per word")
    return section("Fertility", scrolling(table(heads, cells, numeric=(2, 3, 4, 5))))


def _composition_section(composition: Mapping[str, Any]) -> Markup:
    """Composition of the corpus, as read and as kept."""
    figures = []
    for kind in ("source", "domain", "language"):
        rows = _rows(composition, kind)
        if rows:
            groups = [
                BarGroup(title, _parts(rows, key))
                for title, key in (("as read", "read_bytes"), ("as kept", "kept_bytes"))
                if any(row.get(key) is not None for row in rows)
            ]
            figures.append(bar_figure(f"By {kind}", "bytes of text", groups))
    if not figures:
        return section("Composition", empty("There are no documents."))
    return section("Composition", element("div", figures, class_="pair"))


def _parts(rows: list[Mapping[str, Any]], key: str) -> list[Bar]:
    """Bars of the largest parts, and one bar for all others."""
    sizes = [(text(row.get("name"))[:24], whole(row.get(key)) or 0) for row in rows]
    sizes = sorted((part for part in sizes if part[1]), key=lambda part: -part[1])
    others = sizes[MOST_PARTS:]
    if others:
        sizes = [*sizes[:MOST_PARTS], (f"{len(others)} others", sum(size for _, size in others))]
    return [Bar(name, float(size), amount(size, "B")) for name, size in sizes]


def _decimal(value: Any) -> str:
    number = finite(value)
    return "–" if number is None else f"{number:.2f}"


def _rows(tree: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = tree.get(key)
    return [mapping(row) for row in found] if isinstance(found, list) else []
