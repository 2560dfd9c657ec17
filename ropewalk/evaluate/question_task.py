"""Tasks made of questions: the questions, the requests for each, and metrics over the answered ones.

A benchmark is a list of `Question`s, a kind of request and a list of item metrics. Perturbations, contamination checks,
fairness gaps, paired tests and recomputed metrics read questions and items, and know no benchmark.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
import xxhash

from ropewalk.base.metric import Metric

from .metrics.item_metric import ItemMetric
from .metrics.resampling import measured
from .task import Generate, Generation, Likelihood, LogLikelihood, Request, Rolling, Sampling, Task

Ask = Literal["loglikelihood", "multiple_choice", "generate_until", "loglikelihood_rolling"]
"""How a question is asked, in the words of lm-evaluation-harness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question, before the model has seen it."""

    prompt: str
    """The question itself, which perturbations change."""
    preamble: str = ""
    """What precedes it: instructions and few-shot examples."""
    closing: str = ""
    """What follows it, such as the end of a chat template's turn or the beginning of the answer."""
    choices: tuple[str, ...] = ()
    """Continuations to compare, each with its leading space; one for `loglikelihood`."""
    contexts: tuple[str, ...] = ()
    """One per choice, instead of preamble and prompt, where the choice stands inside the context."""
    gold: tuple[int, ...] = ()
    """Indices of the right choices."""
    references: tuple[str, ...] = ()
    """Right answers as text."""
    group: str = ""
    """The part of the task it belongs to, such as a subject."""
    document: Mapping[str, Any] = field(default_factory=dict)
    """The row of data that it was made from; JSON values."""
    query: str = ""
    """The text to look for in the training corpus; the prompt if empty."""

    @property
    def key(self) -> str:
        """A hash of what is asked: the same question in two evaluations has the same key."""
        asked = [self.prompt, self.choices, self.contexts, self.references, self.gold]
        return xxhash.xxh3_64_hexdigest(orjson.dumps(asked))


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """An answered question."""

    question: Question
    predictions: tuple[str, ...] = ()
    """Completions, one per repeat."""
    likelihoods: tuple[Likelihood, ...] = ()
    """One per choice, or that of the whole text. Those of the choices after an empty context may follow."""
    verdicts: tuple[str, ...] = ()
    """One per completion that was run: `pass`, `fail`, `timeout`, or `fault` where the sandbox failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredItem:
    """A line of `evaluation/items.jsonl`: a question, the answer, and its score under each metric of the task."""

    task: str
    key: str
    group: str
    prompt: str
    prediction: str
    """The completion, or the choice that the model finds most likely."""
    reference: str
    scores: Mapping[str, float]


class QuestionTask(Task):
    """A benchmark made of questions."""

    ask: Ask
    sampling: Sampling = Sampling(max_new_tokens=128)
    """For `generate_until`."""
    repeats: int = 1
    """Completions per question."""
    level: str = ""
    """Its level in KoLA, as its headline in the results says: KM, KU, KA or KC (knowledge memorised, understood,
    applied, created)."""

    @abc.abstractmethod
    def load_questions(self) -> Sequence[Question]:
        """The questions, the same on every rank."""

    @property
    @abc.abstractmethod
    def item_metrics(self) -> Sequence[ItemMetric]:
        """The metrics; the first one is the headline."""

    @functools.cached_property
    def questions(self) -> Sequence[Question]:
        """The questions, loaded once: the first `evaluate.limit` of them. A wrapper may replace them."""
        questions = self.load_questions()
        return questions[: self.held_out.settings.limit or len(questions)]

    def requests(self) -> list[Request]:
        return [request for question in self.questions for request in self.requests_of(question)]

    def requests_of(self, question: Question) -> list[Request]:
        """The requests of one question, as many for every question with as many choices."""
        context = question.preamble + question.prompt + question.closing
        if self.ask == "loglikelihood_rolling":
            return [Rolling(context)]
        if self.ask == "generate_until":
            return [Generate(context, self.sampling, repeat) for repeat in range(self.repeats)]
        contexts = question.contexts or (context,) * len(question.choices)
        asked = [LogLikelihood(*pair) for pair in zip(contexts, question.choices, strict=True)]
        if any(metric.unconditional for metric in self.item_metrics):
            asked += [LogLikelihood("", choice) for choice in question.choices]
        return [*asked]

    def items(self, answers: Sequence[Any]) -> list[Item]:
        """The answered questions."""
        rest = iter(answers)
        return [self.item(each, [next(rest) for _ in self.requests_of(each)]) for each in self.questions]

    def item(self, question: Question, answers: Sequence[Any]) -> Item:
        """The question with the answers to its requests."""
        texts = [answer.text for answer in answers if isinstance(answer, Generation)]
        likelihoods = [answer for answer in answers if isinstance(answer, Likelihood)]
        return Item(question=question, predictions=tuple(texts), likelihoods=tuple(likelihoods))

    def metrics(self, answers: Sequence[Any]) -> list[Metric]:
        found = self.measure(self.items(answers))
        return [dataclasses.replace(found[0], level=self.level), *found[1:]] if found else []

    def measure(self, items: Sequence[Item]) -> list[Metric]:
        """The item metrics over some of the items, named as in the results."""
        return [each for metric in self.item_metrics for each in measured(metric, items)]

    def records(self, answers: Sequence[Any]) -> Sequence[Any]:
        items = self.items(answers)
        metrics = [metric.for_items(items) for metric in self.item_metrics]
        return [self._scored(item, metrics) for item in items]

    def _scored(self, item: Item, metrics: Sequence[ItemMetric]) -> ScoredItem:
        question = item.question
        scores = {metric.name: metric.score(item) for metric in metrics}
        return ScoredItem(
            task=self.name,
            key=question.key,
            group=question.group,
            prompt=question.prompt,
            prediction=_prediction(item),
            reference=question.references[0] if question.references else "",
            scores={name: score for name, score in scores.items() if score is not None},
        )


def _prediction(item: Item) -> str:
    if item.predictions:
        return item.predictions[0]
    choices = item.question.choices
    likely = [answer.log_probability for answer in item.likelihoods[: len(choices)]]
    return choices[likely.index(max(likely))] if choices and len(likely) == len(choices) else ""
