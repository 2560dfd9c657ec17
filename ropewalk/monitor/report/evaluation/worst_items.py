"""The items of each task that a model answered worst, with their answers."""

from __future__ import annotations

from ropewalk.base.metric import Metric

from ...draw.markup import Markup, element
from ...evaluation_view import AnsweredItem, EvaluationView
from ..page import section

MOST_PER_TASK = 4
MOST_TASKS = 24
MOST_CHARACTERS = 900
"""Of one prompt or answer."""


def worst_section(view: EvaluationView) -> Markup | None:
    """Worst items, folded by task; nothing if no task has any."""
    folded = []
    for task, metrics in list(view.tasks.items())[:MOST_TASKS]:
        metric = next((each for each in metrics if any(each.name in item.scores for item in view.items)), None)
        worst = view.worst(task, metric, MOST_PER_TASK) if metric else []
        if metric and worst:
            cards = element("div", [_card(item, metric) for item in worst], class_="pair cards")
            folded.append(element("details", element("summary", f"{task}: {metric.label}"), cards))
    if not folded:
        return None
    lead = element("p", "All items and answers are in ", element("code", "evaluation/items.jsonl"), ".", class_="lead")
    return section("Worst items", lead, folded)


def _card(item: AnsweredItem, metric: Metric) -> Markup:
    head = [element("span", item.group or item.task), element("span", metric.text(item.scores[metric.name]))]
    answer = [element("b", "answer "), _cut(item.prediction) or "(empty)"]
    right = [element("b", "right "), _cut(item.reference)] if item.reference else None
    return element(
        "article",
        element("header", head),
        element("pre", element("span", _cut(item.prompt), class_="prompt"), tabindex=0),
        element("p", answer, class_="answer"),
        element("p", right, class_="answer") if right else None,
    )


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} […]"
