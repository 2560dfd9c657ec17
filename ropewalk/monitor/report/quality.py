"""Sections about the quality of the model: the metrics of evaluation tasks, and samples."""

from __future__ import annotations

from collections.abc import Sequence

from ropewalk.base.metric import Metric, Tasks, titled
from ropewalk.base.progress import counted

from ..comparison import metric_text
from ..draw.bars import Bar, BarGroup, bar_figure
from ..draw.markup import Child, Markup, element
from ..evaluation_view import RELIABILITY, Change, EvaluationView
from ..headline import with_capital
from ..run_view import Completion, RunView
from .evaluation.abilities import ability_figure, level_figure
from .evaluation.reliability import reliability_figure
from .evaluation.scores import contamination_table, headline_table
from .page import badge, empty, scrolling, section, table

SHOWN_SAMPLES = 8
"""Samples shown; others are folded."""
SHOWN_TASKS = 3
"""Tasks whose metrics are all shown; of more, they are folded."""
MOST_DIAGRAMS = 4
"""Reliability diagrams on the page."""
MOST_SAMPLES = 64
MOST_CHARACTERS = 3000
"""Characters of one prompt or completion on the page."""


def quality_section(view: RunView, change: Change | None) -> Markup:
    """The headline of every task, abilities, contamination; then each task with intervals, references and groups."""
    if not view.tasks:
        return section("Evaluation", empty("The run has not been evaluated yet."))
    return section("Evaluation", _overview(view.evaluated, change), task_details(view.tasks, step=view.evaluated.step))


def task_details(tasks: Tasks, *, step: float | None) -> list[Markup]:
    """Every task with all its metrics; folded if there are many."""
    drawn = [(task, _task(task, metrics, step)) for task, metrics in tasks.items() if metrics]
    if len(drawn) > SHOWN_TASKS:
        return [element("details", element("summary", task), each) for task, each in drawn]
    return [each for _, each in drawn]


def overview_section(view: EvaluationView, change: Change | None) -> Markup:
    """An evaluation without a run: what is said of all tasks together, then each task."""
    return section("Evaluation", _overview(view, change), task_details(view.tasks, step=view.step))


def _overview(view: EvaluationView, change: Change | None) -> list[Markup]:
    profiles = [drawn for drawn in (ability_figure(view), level_figure(view)) if drawn]
    diagrams = [reliability_figure(task, metrics) for task, metrics in view.tasks.items()]
    shown = [drawn for drawn in diagrams if drawn][:MOST_DIAGRAMS]
    found = [
        headline_table(view, change) if len(view.tasks) > 1 or change else None,
        _beside(profiles),
        _beside(shown),
        contamination_table(view),
    ]
    return [drawn for drawn in found if drawn]


def _beside(figures: Sequence[Markup]) -> Markup | None:
    return element("div", [element("div", figure) for figure in figures], class_="pair") if figures else None


def samples_section(view: RunView) -> Markup:
    """Completions of held-out prompts; the prompts are dimmed."""
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


def _task(task: str, metrics: Sequence[Metric], step: float | None) -> Markup:
    metrics = [metric for metric in metrics if metric.name != RELIABILITY]  # drawn as a diagram
    bars = [_bars(task, [each for each in metrics if each.name == metric.name]) for metric in metrics if _leads(metric)]
    whole = [metric for metric in metrics if not metric.group]
    rows = [(metric.label, metric_text(metric), _measured(metric), metric.unit) for metric in whole]
    tables = [_table(step, task, ("metric", "value (95 % interval)", "over", "unit"), rows)]
    if groups := list(dict.fromkeys(metric.group for metric in metrics if metric.group)):
        names = list(dict.fromkeys(metric.name for metric in metrics if metric.group))
        found = {(metric.group, metric.name): metric.text() for metric in metrics}
        lines = [(group, *(found.get((group, name), "–") for name in names)) for group in groups]
        tables.append(_table(step, f"{task}, by group", ("group", *(name.replace("_", " ") for name in names)), lines))
    return element("div", *bars, element("div", tables), class_="pair")


def _leads(metric: Metric) -> bool:
    return bool(metric.references) and not metric.group


def _bars(task: str, metrics: Sequence[Metric]) -> Markup:
    """The whole and its groups, each beside its references."""
    groups = [
        BarGroup(
            metric.group or "all",
            [
                Bar(name, value, metric.text(value), "tone-0" if name == "model" else "plain")
                for name, value in {"model": metric.value, **metric.references}.items()
            ],
        )
        for metric in metrics
    ]
    first = metrics[0]
    better = "" if first.better == "neither" else f"{first.better} is better"
    note = "; ".join(filter(None, (first.note, better)))
    return bar_figure(with_capital(titled(task, first)), note, groups)


def _table(step: float | None, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    caption = element(
        "figcaption", element("strong", with_capital(title)), element("span", _step_note(step), class_="unit")
    )
    numeric = range(1, len(heads) - (heads[-1] == "unit"))
    return element("figure", caption, scrolling(table(heads, rows, numeric=numeric)))


def _measured(metric: Metric) -> str:
    return "–" if metric.n is None else counted(metric.n, metric.of)


def _step_note(step: float | None) -> str:
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
