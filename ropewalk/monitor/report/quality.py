"""Sections about what the model can do: compression beside zlib and xz, by domain, and samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropewalk.base.progress import amount

from ..draw.bars import Bar, BarGroup, bar_figure
from ..draw.markup import Child, Markup, element
from ..run_view import Completion, RunView
from ..values import finite, mapping
from .page import badge, empty, section, table

SHOWN_SAMPLES = 8
"""Samples in sight; the rest unfold."""
MOST_SAMPLES = 64
MOST_CHARACTERS = 3000
"""Characters of one prompt or completion on the page."""


def quality_section(view: RunView) -> Markup:
    """Bits per byte of model, xz and zlib, overall and by domain, with accuracy beside."""
    if view.measured("bits_per_byte") is None:
        return section("Evaluation", empty("The run has not been evaluated yet."))
    overall = {
        key: view.measured(key) for key in ("bits_per_byte", "zlib_bits_per_byte", "xz_bits_per_byte", "accuracy")
    }
    overall["bytes"] = finite(view.evaluation.get("bytes"))
    parts: dict[str, Mapping[str, Any]] = {"all held-out text": overall}
    domains = mapping(view.evaluation.get("domains")) or mapping(view.summary.get("domains"))
    parts.update((name, mapping(values)) for name, values in domains.items())
    bars = bar_figure(
        "Held-out bits per byte",
        "whole documents; shorter is better",
        [_group(title, values) for title, values in parts.items()],
    )
    rows = [(name, *_row(values)) for name, values in parts.items()]
    heads = ("domain", "held-out bits per byte", "accuracy", "measured")
    numbers = element(
        "figure",
        element("figcaption", element("strong", "By domain"), element("span", _step_note(view), class_="unit")),
        table(heads, rows, numeric=(1, 2, 3)),
    )
    return section("Evaluation", element("div", bars, numbers, class_="pair"))


def samples_section(view: RunView) -> Markup:
    """Completions of held-out beginnings: the prompt dimmed, what the model wrote in full ink."""
    if not view.samples:
        return section("Samples", empty("No samples have been drawn yet."))
    cards = [_card(sample) for sample in view.samples[:MOST_SAMPLES]]
    rest: Child = None
    if len(cards) > SHOWN_SAMPLES:
        more = element("div", cards[SHOWN_SAMPLES:], class_="pair cards")
        rest = element("details", element("summary", f"{len(cards) - SHOWN_SAMPLES} more samples"), more)
    left_out = len(view.samples) - len(cards)
    note = f" {left_out} further samples are in samples.jsonl." if left_out else ""
    legend = element(
        "p",
        "The ",
        element("span", "prompt", class_="prompt"),
        " is the beginning of a held-out document; the rest is ",
        element("span", "the model’s completion", class_="completion"),
        f".{_parsing(view.samples)}{note}",
        class_="lead",
    )
    return section("Samples", legend, element("div", cards[:SHOWN_SAMPLES], class_="pair cards"), rest)


def _group(title: str, values: Mapping[str, Any]) -> BarGroup:
    rows = (
        ("model", "bits_per_byte", "tone-0"),
        ("xz", "xz_bits_per_byte", "plain"),
        ("zlib", "zlib_bits_per_byte", "plain"),
    )
    found = [(label, finite(values.get(key)), tone) for label, key, tone in rows]
    return BarGroup(
        title, [Bar(label, value, f"{value:.3f}", tone) for label, value, tone in found if value is not None]
    )


def _row(values: Mapping[str, Any]) -> tuple[str, str, str]:
    bits, accuracy, size = (finite(values.get(key)) for key in ("bits_per_byte", "accuracy", "bytes"))
    return (
        "–" if bits is None else f"{bits:.3f}",
        "–" if accuracy is None else f"{100 * accuracy:.1f} %",
        "–" if size is None else amount(size, "B"),
    )


def _step_note(view: RunView) -> str:
    step = finite(view.evaluation.get("step"))
    return f"checkpoint of step {step:,.0f}" if step is not None else ""


def _parsing(samples: tuple[Completion, ...]) -> str:
    judged = [sample.parses for sample in samples if sample.parses is not None]
    return f" {sum(judged)} of {len(judged)} completions of code parse as Python." if judged else ""


def _card(sample: Completion) -> Markup:
    head = [element("span", " · ".join(dict.fromkeys(filter(None, (sample.domain, sample.source)))))]
    if sample.parses is not None:
        head.append(badge("parses", "good") if sample.parses else badge("does not parse", "bad"))
    return element(
        "article",
        element("header", head),
        element(
            "pre",
            element("span", _cut(sample.prompt), class_="prompt"),
            element("span", _cut(sample.completion), class_="completion"),
            tabindex=0,
        ),
    )


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]} […{len(text) - MOST_CHARACTERS:,} characters more]"
