"""How rules overlap: of the documents that break one rule, how many break another too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..draw.markup import Markup, element
from ..values import whole
from .page import empty, scrolling, section

MOST_RULES = 16
"""Rules on the page, those that most documents break first."""


def overlap_section(overlap: Mapping[str, Any]) -> Markup:
    """A table: row and column are rules, a cell is darker the larger the share of the row's documents."""
    rules = overlap.get("rules")
    counts = overlap.get("documents")
    alone = overlap.get("alone")
    if not isinstance(rules, list) or not isinstance(counts, list) or not isinstance(alone, list) or not rules:
        return section("Overlap of rules", empty("No document breaks a rule."))
    order = sorted(range(len(rules)), key=lambda place: (-_count(counts, place, place), str(rules[place])))
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
            element("td", f"{_count(counts, place, place):,}", class_="num"),
            element("td", f"{whole(alone[place]) or 0:,}", class_="num"),
            [_cell(counts, place, other) for other in shown],
        )
        for number, place in enumerate(shown, 1)
    ]
    left_out = len(rules) - len(shown)
    note = f" {left_out} further rules are in report.json." if left_out else ""
    lead = element(
        "p",
        "Of the documents that break the rule of a row, how many break the rule of a column too. All rules are asked "
        f"of all documents; the first that a document breaks removes it.{note}",
        class_="lead muted",
    )
    matrix = element("table", element("thead", head), element("tbody", body), class_="overlap")
    return section("Overlap of rules", lead, scrolling(matrix))


def _cell(counts: list[Any], row: int, column: int) -> Markup:
    if row == column:
        return element("td", "–", class_="num muted")
    both, all_of_row = _count(counts, row, column), _count(counts, row, row)
    share = both / all_of_row if all_of_row else 0.0
    return element("td", f"{both:,}", class_=f"num share-{round(share * 5)}", title=f"{share:.0%}")


def _count(counts: list[Any], row: int, column: int) -> int:
    line = counts[row] if row < len(counts) and isinstance(counts[row], list) else []
    return (whole(line[column]) or 0) if column < len(line) else 0
