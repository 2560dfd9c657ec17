"""Computes the log-likelihood of whole documents.

Every token, the closing end of text included, is predicted exactly once, conditioned on an end-of-text token and the
preceding tokens of its document. Documents longer than a sequence use sliding windows with 50 % overlap, so every token
has at least half a sequence of context (or all preceding tokens). Cost: long documents are computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ropewalk.base.progress import Progress, Silent
from ropewalk.load.batch import Batch
from ropewalk.parallel.executor import Executor

from .task import Likelihood


@dataclass(frozen=True, slots=True)
class Window:
    """Targets `start` to `stop` of one document in one sequence; targets before `fresh` belong to earlier windows."""

    document: int
    start: int
    fresh: int
    stop: int


def score_documents(
    executor: Executor,
    documents: Sequence[np.ndarray],
    *,
    sequence_length: int,
    rows: int,
    end_of_text: int,
    progress: Progress | None = None,
) -> list[Likelihood]:
    """Scores documents, given as tokens that end with `end_of_text`, in batches of `rows` sequences. All ranks must
    call."""
    progress = progress or Silent()
    everything = [w for index, tokens in enumerate(documents) for w in windows(index, len(tokens), sequence_length)]
    sums = _Sums(np.zeros(len(documents)), *np.zeros((2, len(documents)), np.int64))
    progress.begin("score", sum(window.stop - window.fresh for window in everything), "tokens")
    done = 0
    for first in range(0, len(everything), rows):
        here = everything[first : first + rows]
        batch = _batch(documents, here, length=sequence_length, rows=rows, end_of_text=end_of_text)
        _add(sums, executor, batch, here)
        done += sum(window.stop - window.fresh for window in here)
        progress.advance(done)
    progress.end()
    return [Likelihood(*found) for found in zip(*(values.tolist() for values in sums), strict=True)]


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


class _Sums(NamedTuple):
    """Per document, as in `Likelihood`."""

    log_probabilities: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]
    correct: npt.NDArray[np.int64]


def _batch(documents: Sequence[np.ndarray], here: list[Window], *, length: int, rows: int, end_of_text: int) -> Batch:
    """A batch of fixed shape, `rows` sequences of `length`; padding has weight 0."""
    tokens = np.full((rows, length + 1), end_of_text, np.int64)
    weight = np.zeros((rows, length), np.float32)
    for row, window in enumerate(here):
        text = documents[window.document]
        size = window.stop - window.start
        tokens[row, 1 : size + 1] = text[window.start : window.stop]
        if window.start:
            tokens[row, 0] = text[window.start - 1]
        weight[row, window.fresh - window.start : size] = 1
    return Batch.of_rows(torch.from_numpy(tokens), weight=torch.from_numpy(weight))


def _add(sums: _Sums, executor: Executor, batch: Batch, here: list[Window]) -> None:
    result = executor.score(batch)
    counts = batch.weight > 0
    # `where` instead of a product: padding may be -inf, and 0 x -inf is nan.
    log_probabilities = torch.where(counts, result.log_probabilities.cpu().double(), 0.0).sum(1).numpy()
    correct = (result.first_choice.cpu() & counts).sum(1).numpy()
    of = [window.document for window in here]
    np.add.at(sums.log_probabilities, of, log_probabilities[: len(here)])
    np.add.at(sums.correct, of, correct[: len(here)])
    np.add.at(sums.tokens, of, counts.sum(1).numpy()[: len(here)])
