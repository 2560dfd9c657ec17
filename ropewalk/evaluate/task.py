"""Evaluation tasks: a task sends requests to the model and computes named metrics from the answers.

    class Capitals(Task):
        name = "capitals"

        def requests(self):
            return [Generate(f"The capital of {country} is", Sampling(max_new_tokens=4)) for country in CAPITALS]

        def metrics(self, answers):
            right = sum(city in answer.text for answer, city in zip(answers, CAPITALS.values()))
            return [proportion("accuracy", right, len(answers), of="question")]

A recipe lists it as `evaluate.tasks = ["held-out", "my_tasks:Capitals"]`. Tasks do not depend on how the model is run
or sharded, and no other module knows their metrics (base/metric.py).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ropewalk.base.metric import Metric

from .config import Evaluate
from .held_out import HeldOut

Text = str | np.ndarray
"""Text, or token ids to use a corpus's tokens exactly."""


@dataclass(frozen=True, slots=True)
class Rolling:
    """Requests the log-likelihood of a whole document, closing end-of-text token included."""

    text: Text
    """Token ids end with the end of text."""


@dataclass(frozen=True, slots=True)
class LogLikelihood:
    """Requests the log-likelihood of `continuation` after `context`, the beginning of a document."""

    context: Text
    """May be empty; it follows an end-of-text token, like every training document."""
    continuation: Text
    """As text, it is tokenized together with `context`, so that no token boundary is forced between them."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The answer to `Rolling` and `LogLikelihood`."""

    log_probability: float
    """Natural log of the probability of the document or continuation."""
    tokens: int
    """Tokens predicted, of a document with its end of text."""
    correct: int
    """Tokens predicted correctly by argmax."""

    @property
    def greedy(self) -> bool:
        """Whether greedy decoding gives exactly this text."""
        return self.correct == self.tokens


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """0 samples from all tokens."""
    top_p: float = 1.0
    """Samples from the fewest tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Leaves out tokens whose probability is below this share of the largest one."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt and completion by this, and multiplies negative ones (CTRL)."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; it excludes them."""


def sampling_of(settings: Evaluate, *, stop: tuple[str, ...] = ()) -> Sampling:
    """As the recipe says: `evaluate.temperature` and the keys beside it."""
    return Sampling(
        settings.max_new_tokens,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        settings.repetition_penalty,
        stop=stop,
    )


@dataclass(frozen=True, slots=True)
class Generate:
    """Requests a completion of `prompt`, the beginning of a document."""

    prompt: Text
    """May be empty; it follows an end-of-text token, like every training document."""
    sampling: Sampling
    repeat: int = 0
    """Number of the completion where a prompt is completed several times; each has its own random numbers."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to `Generate`."""

    tokens: list[int]
    """Without prompt and end of text; fewer than `max_new_tokens` if the model ended the text. A stop string that
    begins inside a token leaves this token."""
    text: str
    """Without the stop string. Invalid UTF-8 is shown as U+FFFD."""


Request = Rolling | LogLikelihood | Generate
Answer = Likelihood | Generation


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion to show: a line of `samples.jsonl`. `parses` is None if not checked."""

    prompt: str
    completion: str
    domain: str
    source: str
    parses: bool | None = None
    """Whether the completion parses as Python."""
    parses_reference: bool | None = None
    """The same for the document's true continuation."""
    reference: str = ""
    """The document's true continuation, as many tokens at most; empty where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredDocument:
    """A line of `evaluation/documents.jsonl`. Compare models on the documents that both have scored."""

    key: str
    """xxh3-64 of its text, independent of the tokenizer."""
    domain: str
    bytes: int
    tokens: int
    nats: float
    correct: int


class Task(abc.ABC):
    """A benchmark, constructed with the held-out text of the run, which it need not use."""

    name: str
    """Its name in results, reports and comparisons."""
    ability: str = ""
    """The ability that it measures in the ability profile, such as `code`; empty for none."""

    def __init__(self, held_out: HeldOut) -> None:
        self.held_out = held_out

    @abc.abstractmethod
    def requests(self) -> Sequence[Request]:
        """The requests, identical on every rank."""

    @abc.abstractmethod
    def metrics(self, answers: Sequence[Any]) -> list[Metric]:
        """Metrics of `answers`, one `Likelihood` or `Generation` per request, in order. The first metric is the
        task's headline; metrics of groups follow the overall one."""

    def records(self, answers: Sequence[Any]) -> Sequence[Sample | ScoredDocument]:
        """Samples and documents to save with the results."""
        return ()


class TaskModel(Protocol):
    """Answers requests: a model under any plan. All ranks must call, with the same arguments.

    Tokens are those of `TextEncoder` (evaluate/text_encoder.py)."""

    chunk_tokens: int
    """Tokens to ask for in one call, about: answers are saved after each."""

    def rolling(self, documents: Sequence[np.ndarray]) -> list[Likelihood]:
        """Log-likelihoods of documents, given without the token before them."""

    def loglikelihood(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Likelihood]:
        """Log-likelihoods of continuations after their contexts of at least one token. Of a context too long for the
        model, the beginning is dropped."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seeds: Sequence[int]
    ) -> list[list[int]]:
        """The completion of each prompt, as tokens; each has the random numbers of its seed."""
