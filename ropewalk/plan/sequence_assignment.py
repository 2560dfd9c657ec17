"""Which data rank computes which rows of a step, so that the busiest one has as little to do as can be.

Rows of packed documents have as many tokens each but not as many pairs of tokens that meet: a row of one document has d
times the pairs of a row of d equal ones. A step ends when its busiest rank does. The rows of the step stay the
same, so does their sum: only who computes them changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ropewalk.model.spec import Spec

EVEN = 2.0**-8
"""The share above the mean at which swapping ends: other noise of a step is larger. 1,024 rows are dealt to 64
ranks in 1.8 ms then, instead of 34 ms to the last swap (one core)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCost:
    """FLOPs of a row, forward and backward, as `Spec.flops_per_token` counts them."""

    pair: int
    """Of a query with one key that it sees."""
    token: int
    """Of a token in everything but attention."""


def row_cost(spec: Spec) -> RowCost:
    """What rows cost a model of `spec`: its attention by pairs, and the rest by tokens."""
    pairs = 12 * spec.layers * spec.heads * spec.head_size  # 2 products forward, 4 backward, 2 FLOPs a multiplication
    whole = spec.flops_per_token("causal") * spec.sequence_length
    return RowCost(pair=pairs, token=(whole - pairs * spec.attended_pairs()) // spec.sequence_length)


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """The rows of every rank, as many each, the costliest first; the greatest sum of costs of a rank is small.

    A pure function of whole numbers: the same on every rank. Rows go from the costliest to the cheapest to the rank
    with the least so far (Graham 1969), then the busiest rank swaps rows with others as long as both end below where it
    was. Where that is no better than rows r, r + ranks, ... for rank r, it is these: nothing has to move.
    """
    assert len(costs) % ranks == 0, f"{ranks} ranks do not share {len(costs)} rows evenly"
    weights = np.asarray(costs, dtype=np.int64)
    given = [list(range(rank, len(costs), ranks)) for rank in range(ranks)]
    found = _dealt(weights, ranks)
    _swap(weights, found)
    best = found if _busiest(weights, found) < _busiest(weights, given) else given
    # In the same order everywhere: ranks that wait for each other in every microbatch have equal ones then.
    return [sorted(rows, key=lambda row: (-weights[row], row)) for rows in best]


def _dealt(weights: np.ndarray, ranks: int) -> list[list[int]]:
    room = len(weights) // ranks
    found: list[list[int]] = [[] for _ in range(ranks)]
    free = [(0, rank) for rank in range(ranks)]  # a heap of those who still have room, the least busy first
    for row in sorted(range(len(weights)), key=lambda row: (-weights[row], row)):
        load, rank = heapq.heappop(free)
        found[rank].append(row)
        if len(found[rank]) < room:
            heapq.heappush(free, (load + int(weights[row]), rank))
    return found


def _swap(weights: np.ndarray, found: list[list[int]]) -> None:
    """Swaps rows of the busiest rank, in place, while that makes it and the other end below where it was, and it is
    more than `EVEN` above the mean."""
    loads = [int(weights[rows].sum()) for rows in found]
    while max(loads) * len(found) > (1 + EVEN) * sum(loads):
        busiest = loads.index(max(loads))
        best = (0, 0, 0, 0)  # what the pair of ranks wins, the other rank, the places of the two rows
        for other, load in enumerate(loads):
            gap = loads[busiest] - load
            moved = weights[found[busiest]][:, None] - weights[found[other]][None, :]
            won = np.minimum(moved, gap - moved)
            place = int(won.argmax())
            if int(won.flat[place]) > best[0]:
                here, there = divmod(place, len(found[other]))
                best = (int(won.flat[place]), other, here, there)
        won_most, other, here, there = best
        if won_most == 0:
            return
        mine, theirs = found[busiest][here], found[other][there]
        found[busiest][here], found[other][there] = theirs, mine
        moved_most = int(weights[mine] - weights[theirs])
        loads[busiest], loads[other] = loads[busiest] - moved_most, loads[other] + moved_most


def _busiest(weights: np.ndarray, dealt: Sequence[Sequence[int]]) -> int:
    return max(int(weights[list(rows)].sum()) for rows in dealt)
