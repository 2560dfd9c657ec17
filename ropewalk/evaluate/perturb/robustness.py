"""A task asked again in other words: how much worse are the answers, and how many stay the same?

The wrapper asks the questions of a task as they are, which costs nothing beside the task itself because the same
requests are answered once, and each question again under every perturbation that changes it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropewalk.base.metric import SHARE, Metric

from ..intervals import proportion
from ..metrics.item_metric import Floats, ItemMetric
from ..metrics.resampling import bootstrap, measured
from ..question_task import Item, QuestionTask
from ..task import Request, Task
from .perturbation import Perturbation, open_perturbations


@dataclass(frozen=True, slots=True)
class _Variant:
    """The questions that one perturbation changes, as a task of their own."""

    perturbation: Perturbation
    task: QuestionTask
    numbers: list[int]
    """The positions of its questions in the original task."""


class Robustness(Task):
    """Metrics of a task under perturbations of its prompts, beside those of the same questions unchanged."""

    def __init__(self, task: QuestionTask) -> None:
        super().__init__(task.held_out)
        self.name = f"{task.name} robustness"
        self.task = task
        settings = task.held_out.settings
        perturbations = open_perturbations(
            settings.perturbations, strength=settings.perturbation_strength, seed=task.held_out.seed
        )
        self.variants = [_variant(task, each) for each in perturbations]
        self.signature = f"strength:{settings.perturbation_strength:g}|seed:{task.held_out.seed}"

    def requests(self) -> Sequence[Request]:
        return [request for task in self._tasks() for request in task.requests()]

    def metrics(self, answers: Sequence[Any]) -> list[Metric]:
        """Worst case, drop, consistency and what was changed, over all perturbations and by perturbation."""
        items, *perturbed = self._items(answers)
        pairs = [
            _Pair(number, variant.perturbation.name, items[number], changed)
            for variant, found in zip(self.variants, perturbed, strict=True)
            for number, changed in zip(variant.numbers, found, strict=True)
        ]
        metrics = [metric.for_items(items) for metric in self.task.item_metrics if _adds_up(metric)]
        if not metrics:
            return [*self._changed()]
        metric = _Once(metrics[0])
        counts = [None not in (metric.score(pair.before), metric.score(pair.after)) for pair in pairs]
        pairs = [pair for pair, both in zip(pairs, counts, strict=True) if both]
        if not pairs:
            return [*self._changed()]
        return [
            *self._worst(metrics, pairs),
            *self._by_perturbation(pairs, f"{metric.name}_drop", lambda part: _drop(metric, part)),
            *self._by_perturbation(pairs, "consistency", lambda part: _consistency(metric, part)),
            *self._changed(),
        ]

    def records(self, answers: Sequence[Any]) -> Sequence[Any]:
        parts = self._answers(answers)[1:]
        return [
            record for variant, part in zip(self.variants, parts, strict=True) for record in variant.task.records(part)
        ]

    def _worst(self, metrics: Sequence[ItemMetric], pairs: Sequence[_Pair]) -> list[Metric]:
        """The score of each question in the worst of its wordings, the original one included. Of the first metric that
        is a mean over items: of others, such as BLEU or a gap, the scores of items do not add up."""
        means = [each for each in metrics if type(each).value is ItemMetric.value]
        if not means:
            return []
        metric = means[0]
        worst = np.min if metric.better == "higher" else np.max
        wordings = {pair.number: [pair.before] for pair in pairs}
        for pair in pairs:
            wordings[pair.number].append(pair.after)
        found_scores = {number: [metric.score(item) for item in items] for number, items in wordings.items()}
        scores = {number: [each for each in found if each is not None] for number, found in found_scores.items()}
        scores = {number: found for number, found in scores.items() if len(found) == len(wordings[number])}
        if not scores:
            return []
        as_asked = float(np.mean([each[0] for each in scores.values()]))
        originals = [wordings[number][0] for number in scores]
        lowest = {id(wordings[number][0]): float(worst(each)) for number, each in scores.items()}
        found = measured(_Scores(metric, lowest), originals)[0]
        return [
            Metric(
                f"worst_case_{metric.name}",
                found.value,
                found.interval,
                n=found.n,
                of="question",
                unit=metric.unit,
                better=metric.better,
                references={"as asked": as_asked},
                note="in the worst of its wordings",
                signature=f"{self.signature}|perturbations:{'+'.join(dict.fromkeys(p.name for p in pairs))}",
            )
        ]

    def _by_perturbation(
        self, pairs: Sequence[_Pair], name: str, measure: Callable[[Sequence[_Pair]], dict[str, Any]]
    ) -> Iterator[Metric]:
        """A metric over all pairs, then by perturbation. Its interval resamples questions."""
        names = list(dict.fromkeys(pair.name for pair in pairs))
        for group in ["", *names]:
            part = [pair for pair in pairs if not group or pair.name == group]
            described = measure(part)
            signature = "|".join(filter(None, [self.signature, described.pop("signature", "")]))
            count = len(part) if group else len({pair.number for pair in part})
            yield Metric(name, **described, n=count, of="question", group=group, signature=signature)

    def _changed(self) -> Iterator[Metric]:
        """The questions that at least one perturbation changes, and that each one changes."""
        total = len(self.task.questions)
        parts = {"": len({number for variant in self.variants for number in variant.numbers})}
        parts.update((variant.perturbation.name, len(variant.numbers)) for variant in self.variants)
        for group, count in parts.items():
            share = count / total if total else 0.0
            yield Metric("changed", share, n=total, of="question", unit=SHARE, better="neither", group=group)

    def _tasks(self) -> list[QuestionTask]:
        return [self.task, *(variant.task for variant in self.variants)]

    def _answers(self, answers: Sequence[Any]) -> list[Sequence[Any]]:
        """The answers of the task and of each variant."""
        parts, first = [], 0
        for task in self._tasks():
            count = len(task.requests())
            parts.append(answers[first : first + count])
            first += count
        return parts

    def _items(self, answers: Sequence[Any]) -> list[list[Item]]:
        return [task.items(part) for task, part in zip(self._tasks(), self._answers(answers), strict=True)]


def _adds_up(metric: ItemMetric) -> bool:
    """Whether the metric is a function of sums over items, which a drop subtracts; F1 and equal-mass bins are not."""
    kind = type(metric)
    return kind.weighted is ItemMetric.weighted and kind.measure is ItemMetric.measure


def robustness_of(task: Task) -> list[Task]:
    """The task, and behind it the same one under `evaluate.perturbations` if it is made of questions."""
    if isinstance(task, QuestionTask) and task.held_out.settings.perturbations:
        return [task, Robustness(task)]
    return [task]


@dataclass(frozen=True, slots=True)
class _Pair:
    """A question as it is and under one perturbation, both answered."""

    number: int
    name: str
    before: Item
    after: Item


class _Once(ItemMetric):
    """A metric that looks at each item once: it may judge a text or run code."""

    def __init__(self, metric: ItemMetric) -> None:
        self.name, self.unit, self.better, self.signature = metric.name, metric.unit, metric.better, metric.signature
        self._metric, self._rows = metric, dict[int, Sequence[float] | None]()
        self._scores = dict[int, float | None]()

    def statistics(self, item: Item) -> Sequence[float] | None:
        if id(item) not in self._rows:
            self._rows[id(item)] = self._metric.statistics(item)
        return self._rows[id(item)]

    def value(self, sums_K: Floats) -> Floats:
        return self._metric.value(sums_K)

    def score(self, item: Item) -> float | None:
        if id(item) not in self._scores:
            self._scores[id(item)] = self._metric.score(item)
        return self._scores[id(item)]


class _Scores(ItemMetric):
    """The mean of given scores of items."""

    def __init__(self, metric: ItemMetric, scores: dict[int, float]) -> None:
        self.name, self.unit, self.better, self._scores = metric.name, metric.unit, metric.better, scores

    def statistics(self, item: Item) -> tuple[float, float]:
        return self._scores[id(item)], 1.0


class _Drop(ItemMetric):
    """The metric of the first half of the sums less that of the second half; its sign says how much worse."""

    def __init__(self, metric: ItemMetric) -> None:
        self.name, self._metric = metric.name, metric

    def statistics(self, item: Item) -> Sequence[float] | None:
        return self._metric.statistics(item)

    def value(self, sums_K: Floats) -> Floats:
        half = sums_K.shape[-1] // 2
        difference = self._metric.value(sums_K[..., :half]) - self._metric.value(sums_K[..., half:])
        return -difference if self._metric.better == "lower" else difference


def _variant(task: QuestionTask, perturbation: Perturbation) -> _Variant:
    found = [perturbation.question(question) for question in task.questions]
    variant = copy.copy(task)
    variant.name = f"{task.name} {perturbation.name}"
    variant.questions = [question for question in found if question is not None]
    return _Variant(perturbation, variant, [number for number, question in enumerate(found) if question is not None])


def _drop(metric: ItemMetric, pairs: Sequence[_Pair]) -> dict[str, Any]:
    """How much worse the metric is on the same questions, with a paired bootstrap interval over questions."""
    rows = [(pair.number, [*_row(metric, pair.before), *_row(metric, pair.after)]) for pair in pairs]
    table_IK, drop = _by_number(rows), _Drop(metric)
    sums_K = table_IK.sum(0)
    half = len(sums_K) // 2
    return {
        "value": float(drop.value(sums_K)),
        "interval": bootstrap(drop, table_IK),
        "unit": metric.unit,
        "better": "lower",
        "references": {
            "as asked": float(metric.value(sums_K[:half])),
            "perturbed": float(metric.value(sums_K[half:])),
        },
        "note": "worse under perturbations",
        "signature": metric.signature,
    }


def _consistency(metric: ItemMetric, pairs: Sequence[_Pair]) -> dict[str, Any]:
    """The share of pairs with the same answer: the same choice, else the same verdict, else the same text."""
    kind = _kind_of_answer(metric, pairs)
    same = [float(_answer(kind, metric, pair.before) == _answer(kind, metric, pair.after)) for pair in pairs]
    rows = _by_number([(pair.number, [each, 1.0]) for pair, each in zip(pairs, same, strict=True)])
    once = len(rows) == len(pairs)
    plain = proportion("consistency", int(sum(same)), len(same))
    return {
        "value": plain.value,
        "interval": plain.interval if once else bootstrap(_Scores(metric, {}), rows),
        "unit": SHARE,
        "note": "same answer",
        "signature": f"same:{kind}",
    }


def _kind_of_answer(metric: ItemMetric, pairs: Sequence[_Pair]) -> str:
    """What is compared: the choice where there are several, a score that is right or wrong, else the completion."""
    if len(pairs[0].before.question.choices) > 1:
        return "choice"
    scores = {metric.score(item) for pair in pairs for item in (pair.before, pair.after)}
    return "verdict" if scores <= {0.0, 1.0} or not pairs[0].before.predictions else "text"


def _answer(kind: str, metric: ItemMetric, item: Item) -> int | str | float | None:
    if kind == "choice":
        return int(np.argmax([answer.log_probability for answer in item.likelihoods[: len(item.question.choices)]]))
    return item.predictions[0].strip() if kind == "text" else metric.score(item)


def _row(metric: ItemMetric, item: Item) -> list[float]:
    return [float(each) for each in metric.statistics(item) or ()]


def _by_number(rows: Sequence[tuple[int, Sequence[float]]]) -> Floats:
    """Rows of the same question summed, so that a bootstrap draws questions."""
    numbers, places = np.unique([number for number, _ in rows], return_inverse=True)
    table_IK = np.zeros((len(numbers), len(rows[0][1])))
    np.add.at(table_IK, places, np.array([row for _, row in rows], np.float64))
    return table_IK
