"""Scores token sequences under any plan: many per forward pass, common beginnings computed once.

Sequences are sorted, so that those with a common beginning are neighbours: the choices of a question, questions after
the same examples. Where that saves tokens they share a row: the beginning, then the rest of each sequence, which sees
the beginning and itself (`attend_shared`). Rows of similar length form batches of a fixed number of tokens.

    A B C D E       row        A B | C D E | F G
    A B F G         documents  0 0 | 1 1 1 | 2 2      positions  0 1 | 2 3 4 | 2 3
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ropewalk.load.batch import Batch
from ropewalk.model.attend import attend_for, attend_shared, causal
from ropewalk.model.spec import Spec
from ropewalk.parallel.executor import Executor
from ropewalk.plan.plan import Plan

from .task import Likelihood

Tokens = npt.NDArray[np.int64]

ROW_TOKENS = 1024
"""Most tokens of a row that sequences share: the mask costs their square."""
LEAST_SAVED = 0.1
"""Least share of tokens that sharing a row must save. A shared row pays for a mask, and for masked pairs."""
MULTIPLE = 4
"""Rows are padded to a multiple of this."""
SHORTEST = 0.9
"""Least length of a row in a batch, as a share of the longest: the rest is padding, which is computed.

460 requests of ten tasks take 2.5 s with 0.9 and a multiple of 4, 2.7 with 0.8, 2.8 with 0.8 and 8, 3.9 in batches of
4096 tokens whatever their lengths, 4.6 without shared rows (a Llama of width 256, one core of an EPYC).
"""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sequence, and the first of its tokens whose probability counts, at least 1: it needs a token before it."""

    tokens: Tokens
    first: int


@dataclass(frozen=True, slots=True)
class Row:
    """Sequences that share their first `shared` inputs. Inputs are all tokens but the last."""

    members: tuple[int, ...]
    shared: int
    length: int


def score_sequences(executor: Executor, plan: Plan, sequences: Sequence[Scored], *, budget: int) -> list[Likelihood]:
    """The likelihood of the counted tokens of each sequence, in forward passes of about `budget` tokens per rank. All
    ranks must call.

    Compiled blocks compile again for every shape: then all batches have that of a training batch, whatever they hold.
    """
    length = executor.spec.sequence_length
    rows = arrange(sequences, shares=can_share(executor.spec) and plan.context == 1 and not plan.compile)
    found = np.zeros((3, len(sequences)))
    at_once = plan.data * max(1, plan.pipeline)
    multiple = int(np.lcm(MULTIPLE, 2 * plan.context))
    if plan.compile:
        size = at_once * max(1, plan.microbatch_size_of(length))
        batches = ((rows[begin : begin + size], size, length) for begin in range(0, len(rows), size))
    else:
        batches = (
            (each, len(each), _padded(max(row.length for row in each), multiple))
            for each in _batches(rows, tokens=budget * at_once, multiple=multiple)
        )
    for batch_rows, size, padded in batches:
        # Rows that are missing repeat the last one; `_collect` does not see them.
        filled = [*batch_rows, *[batch_rows[-1]] * (size - len(batch_rows))]
        batch = _batch(sequences, filled, length=padded, positions=length)
        shared = any(row.shared for row in batch_rows)
        scores = executor.score(
            batch, microbatches=max(1, plan.pipeline), attention=attend_shared if shared else None, counted_only=True
        )
        _collect(
            found,
            scores.log_probabilities.cpu().double().numpy(),
            scores.first_choice.cpu().numpy(),
            batch_rows,
            sequences,
        )
    return [Likelihood(float(nats), int(tokens), int(correct)) for nats, tokens, correct in found.T]


def can_share(spec: Spec) -> bool:
    """Whether sequences of this model may share a row: its attention sees all earlier tokens, and no component of the
    user's might mix positions by itself."""
    own = any(isinstance(value, str) and ":" in value for value in dataclasses.asdict(spec).values())
    return spec.kind == "decoder" and not own and attend_for(spec) is causal


def arrange(sequences: Sequence[Scored], *, shares: bool) -> list[Row]:
    """Rows for all sequences, the longest first."""
    order = in_order([each.tokens for each in sequences])
    rows = list(_share(sequences, order)) if shares else [_alone(sequences, index) for index in order]
    return sorted(rows, key=lambda row: -row.length)  # stable: equal lengths stay beside each other


def in_order(sequences: Sequence[npt.NDArray[np.int64]]) -> list[int]:
    """Indices such that sequences with a common beginning are neighbours."""
    # Big-endian: bytes then sort as numbers do.
    keys = [tokens.astype(">u4").tobytes() for tokens in sequences]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _alone(sequences: Sequence[Scored], index: int) -> Row:
    return Row((index,), 0, len(sequences[index].tokens) - 1)


def _share(sequences: Sequence[Scored], order: Sequence[int]) -> Iterator[Row]:
    """Greedy: the next sequence joins the row if the row then has clearly fewer tokens than both would apart."""
    row: Row | None = None
    for index in order:
        alone = _alone(sequences, index)
        if row is None:
            row = alone
            continue
        common = _common(sequences[row.members[-1]].tokens, sequences[index].tokens)
        # Each member keeps at least one input of its own, whose target differs from the others'.
        shared = min(common - 1, alone.length - 1, *([row.shared] if row.shared else [row.length - 1]))
        own = sum(len(sequences[each].tokens) - 1 - shared for each in (*row.members, index))
        joined = Row((*row.members, index), shared, shared + own)
        apart = row.length + alone.length
        if shared > 0 and joined.length <= min(ROW_TOKENS, apart * (1 - LEAST_SAVED)):
            row = joined
        else:
            yield row
            row = alone
    if row is not None:
        yield row


def _common(a: Tokens, b: Tokens) -> int:
    """How many first tokens are equal."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _batches(rows: Sequence[Row], *, tokens: int, multiple: int) -> Iterator[list[Row]]:
    """Neighbouring rows of similar length and at most `tokens` padded tokens, at least one; shared rows and others
    apart, because plain causal attention is faster."""
    for wanted in (True, False):
        batch: list[Row] = []
        for row in rows:
            if (row.shared > 0) != wanted:
                continue
            longest = _padded(batch[0].length if batch else row.length, multiple)
            if batch and ((len(batch) + 1) * longest > tokens or _padded(row.length, multiple) < SHORTEST * longest):
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch


def _batch(sequences: Sequence[Scored], rows: Sequence[Row], *, length: int, positions: int) -> Batch:
    shape = (len(rows), length)
    tokens, targets, places = (np.zeros(shape, np.int64) for _ in range(3))
    documents, weight = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for number, row in enumerate(rows):
        for index, begin, first, document in _pieces(sequences, row):
            text = sequences[index].tokens
            size = len(text) - 1 - first if document or not row.shared else row.shared
            here = slice(begin, begin + size)
            tokens[number, here], targets[number, here] = text[first : first + size], text[first + 1 : first + 1 + size]
            places[number, here] = np.arange(first, first + size)
            documents[number, here] = document
        for _, spans in _spans(sequences, row):
            for begin, end in spans:
                weight[number, begin:end] = 1
        documents[number, row.length :] = documents[number, row.length - 1]
        # Padding is computed and not counted; its positions must exist.
        places[number, row.length :] = np.minimum(places[number, row.length - 1] + 1, positions - 1)
    return Batch(*(torch.from_numpy(each) for each in (tokens, targets, weight, places, documents)))


def _pieces(sequences: Sequence[Scored], row: Row) -> Iterator[tuple[int, int, int, int]]:
    """(sequence, place in the row, first input, document) of the shared beginning and of each member's rest."""
    if row.shared:
        yield row.members[0], 0, 0, 0
    begin = row.shared
    for number, index in enumerate(row.members):
        yield index, begin, row.shared, number + (1 if row.shared else 0)
        begin += len(sequences[index].tokens) - 1 - row.shared


def _spans(sequences: Sequence[Scored], row: Row) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """(sequence, places of the row whose targets count for it) of each member: of the beginning and of its own rest."""
    begin = row.shared
    for index in row.members:
        inputs, first = len(sequences[index].tokens) - 1, sequences[index].first - 1
        spans = [(first, row.shared)] if first < row.shared else []
        spans.append((begin + max(0, first - row.shared), begin + inputs - row.shared))
        yield index, spans
        begin += inputs - row.shared


def _collect(
    found: npt.NDArray[np.float64],
    scores: npt.NDArray[np.float64],
    first_choice: npt.NDArray[np.bool_],
    rows: Sequence[Row],
    sequences: Sequence[Scored],
) -> None:
    for number, row in enumerate(rows):
        for index, spans in _spans(sequences, row):
            for begin, end in spans:
                here = scores[number, begin:end].sum(), end - begin, first_choice[number, begin:end].sum()
                found[:, index] += here
