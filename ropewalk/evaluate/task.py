"""Evaluation tasks: a task asks the model questions and turns the answers into named metrics.

    class Capitals(Task):
        name = "capitals"

        def requests(self):
            return [Generate(f"The capital of {country} is", Sampling(max_new_tokens=4)) for country in CAPITALS]

        def metrics(self, answers):
            right = sum(city in answer.text for answer, city in zip(answers, CAPITALS.values()))
            return [proportion("accuracy", right, len(answers), of="question")]

A recipe names it as `evaluate.tasks = ["held-out", "my_tasks:Capitals"]`. Tasks are independent of how the model is run
or sharded, and nothing outside of a task knows its metrics (base/metric.py).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ropewalk.base.metric import Metric

from .held_out import HeldOut

Text = str | np.ndarray
"""Text, or tokens where those of a corpus are to be used exactly."""


@dataclass(frozen=True, slots=True)
class Rolling:
    """Asks for the log-likelihood of a whole document, closing end-of-text token included."""

    text: Text
    """Tokens end with the end of text."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Answers `Rolling`."""

    log_probability: float
    """Natural logarithm of the probability of the document."""
    tokens: int
    """Tokens predicted, with the end of text."""
    correct: int
    """Tokens that were the model's first choice."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """0 draws from all."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Asks for a completion of `prompt`, the beginning of a document."""

    prompt: Text
    """May be empty; it follows an end of text, as every document of the training text does."""
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Generation:
    """Answers `Generate`."""

    tokens: list[int]
    """Without the prompt and without the end of text; fewer than `max_new_tokens` where the model ended the text."""
    text: str
    """Bytes that are not UTF-8 are shown as U+FFFD."""


Request = Rolling | Generate
Answer = Likelihood | Generation


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion to show, a line of `samples.jsonl`; `parses` is None where that is not asked."""

    prompt: str
    completion: str
    domain: str
    source: str
    parses: bool | None = None
    """Whether the completion is accepted as Python."""
    parses_reference: bool | None = None
    """The same of the document's true continuation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredDocument:
    """A line of `evaluation/documents.jsonl`. Models are compared best by the documents that both have read."""

    key: str
    """xxh3-64 of its text, the same whatever the tokenizer."""
    domain: str
    bytes: int
    tokens: int
    nats: float
    correct: int


class Task(abc.ABC):
    """A benchmark. Made with the held-out text of the run, which it need not read."""

    name: str
    """In results, reports and comparisons."""

    def __init__(self, held_out: HeldOut) -> None:
        self.held_out = held_out

    @abc.abstractmethod
    def requests(self) -> Sequence[Request]:
        """The questions; the same on every rank."""

    @abc.abstractmethod
    def metrics(self, answers: Sequence[Any]) -> list[Metric]:
        """What `answers` show, a `Likelihood` or `Generation` for each request, in order. The first metric is the
        task's headline; those of groups follow the metric of the whole."""

    def records(self, answers: Sequence[Any]) -> Sequence[Sample | ScoredDocument]:
        """Samples and documents to keep beside the results."""
        return ()


class TaskModel(Protocol):
    """What answers requests: a model under any plan. All ranks must call, with the same arguments."""

    def rolling(self, documents: Sequence[np.ndarray]) -> list[Likelihood]:
        """Of documents as tokens that end with the end of text."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seed: int) -> list[list[int]]:
        """The tokens after each prompt."""
