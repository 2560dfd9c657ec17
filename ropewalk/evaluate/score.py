"""Log-likelihoods of whole documents and of continuations, as sequences that one forward pass can score.

Every token of a document, the closing end of text included, is predicted exactly once, conditioned on the token before
the document and the preceding tokens. Documents longer than a sequence use sliding windows with 50 % overlap, so every
token has at least half a sequence of context (or all preceding tokens). Cost: long documents are computed twice.

Of a context and continuation that are too long together, the beginning of the context is dropped. A continuation that
is longer than a sequence by itself is scored in such windows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ropewalk.base.errors import UserError
from ropewalk.parallel.executor import Executor
from ropewalk.plan.plan import Plan

from .sequence_scores import Scored, score_sequences
from .task import Likelihood

NOTHING = Likelihood(0.0, 0, 0)
"""The likelihood of no tokens."""


@dataclass(frozen=True, slots=True)
class Window:
    """Targets `start` to `stop` of one document in one sequence; targets before `fresh` belong to earlier windows."""

    document: int
    start: int
    fresh: int
    stop: int


def score_documents(
    executor: Executor,
    plan: Plan,
    documents: Sequence[np.ndarray],
    *,
    sequence_length: int,
    budget: int,
    before: int,
) -> list[Likelihood]:
    """Scores documents that follow the token `before`, in forward passes of about `budget` tokens. All ranks must
    call."""
    everything = [w for index, tokens in enumerate(documents) for w in windows(index, len(tokens), sequence_length)]
    sequences = [_sequence(documents[window.document], window, before=before) for window in everything]
    sums = [NOTHING] * len(documents)
    for window, found in zip(everything, score_sequences(executor, plan, sequences, budget=budget), strict=True):
        sums[window.document] = _sum(sums[window.document], found)
    return sums


def score_continuations(
    executor: Executor,
    plan: Plan,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    sequence_length: int,
    budget: int,
) -> list[Likelihood]:
    """Scores each continuation after its context, which has at least one token. All ranks must call."""
    parts = [
        (index, each)
        for index, (context, continuation) in enumerate(pairs)
        if len(continuation)
        for each in _joined(context, continuation, length=sequence_length)
    ]
    found = [NOTHING] * len(pairs)
    scores = score_sequences(executor, plan, [each for _, each in parts], budget=budget)
    for (index, _), likelihood in zip(parts, scores, strict=True):
        found[index] = _sum(found[index], likelihood)
    return found


def windows(document: int, tokens: int, length: int) -> Iterator[Window]:
    """The windows of one document, half a sequence apart; the last one ends with the document."""
    fresh = start = 0
    while True:
        start = max(0, min(start, tokens - length))
        stop = min(start + length, tokens)
        yield Window(document, start, fresh, stop)
        if stop == tokens:
            return
        fresh, start = stop, start + max(1, length // 2)


def _sequence(document: np.ndarray, window: Window, *, before: int) -> Scored:
    tokens = np.empty(window.stop - window.start + 1, np.int64)
    tokens[0] = document[window.start - 1] if window.start else before
    tokens[1:] = document[window.start : window.stop]
    return Scored(tokens, window.fresh - window.start + 1)


def _joined(context: Sequence[int], continuation: Sequence[int], *, length: int) -> Iterator[Scored]:
    """One sequence; of a continuation that is longer than one, windows as of documents."""
    if not len(context):
        raise UserError("an empty context has no token before the continuation; begin it with the end-of-text token")
    if len(continuation) <= length:
        tokens = np.array([*context, *continuation], np.int64)[-(length + 1) :]
        yield Scored(tokens, len(tokens) - len(continuation))
        return
    kept = context[-max(1, length // 2) :]
    document = np.array([*kept[1:], *continuation], np.int64)
    for window in windows(0, len(document), length):
        first = max(window.fresh, len(kept) - 1)
        if first < window.stop:
            yield _sequence(document, dataclasses.replace(window, fresh=first), before=int(kept[0]))


def _sum(one: Likelihood, other: Likelihood) -> Likelihood:
    return Likelihood(
        one.log_probability + other.log_probability, one.tokens + other.tokens, one.correct + other.correct
    )
