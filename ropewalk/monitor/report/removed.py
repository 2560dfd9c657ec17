"""Samples of what each rule removed, copies beside what stays in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..draw.markup import Child, Markup, element
from ..values import finite, text
from .page import empty, section

OPEN_RULES = 4
"""Rules whose samples are in sight; the others unfold."""


def removed_section(samples: list[Mapping[str, Any]]) -> Markup:
    """A fold for every rule, by stage, with some documents that it removed."""
    if not samples:
        return section("Removed, for example", empty("Nothing was removed."))
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
    return section("Removed, for example", folds)


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
