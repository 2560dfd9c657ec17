"""Assigns the sequences of a step to data-parallel ranks so that the busiest rank has the least work.

Packed sequences have the same number of tokens but not of attended pairs: a single document has d times the pairs of d
equal ones. A step ends when its busiest rank does. The sequences of the step and their sum stay the same; only their
ranks change.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ropewalk.model.spec import Spec

EVEN = 2.0**-8
"""Imbalance over the mean at which swapping ends; other noise of a step is larger. Assigning 1,024 sequences to 64
ranks then takes 1.8 ms instead of 34 ms (one core)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCost:
    """FLOPs of a sequence, forward and backward, as counted by `Spec.flops_per_token`."""

    pair: int
    """Per attended pair of a query and a key."""
    token: int
    """Per token, outside attention."""


def row_cost(spec: Spec) -> RowCost:
    """The cost of sequences for a model of `spec`: attention per pair, the rest per token."""
    pairs = 12 * spec.layers * spec.heads * spec.head_size  # 2 matmuls forward, 4 backward, 2 FLOPs per multiplication
    whole = spec.flops_per_token("causal") * spec.sequence_length
    return RowCost(pair=pairs, token=(whole - pairs * spec.attended_pairs()) // spec.sequence_length)


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """The sequences of every rank, equally many each, the costliest first; minimizes the largest cost of a rank.

    A pure function of integers, so all ranks agree. Assigns sequences in order of decreasing cost to the least loaded
    rank (Graham 1969); then the busiest rank swaps sequences with others while both end below its load. If that is no
    better than sequences r, r + ranks, ... for rank r, it returns these, and nothing has to move.
    """
    assert len(costs) % ranks == 0, f"{ranks} ranks do not share {len(costs)} sequences evenly"
    weights = np.asarray(costs, dtype=np.int64)
    given = [list(range(rank, len(costs), ranks)) for rank in range(ranks)]
    found = _dealt(weights, ranks)
    _swap(weights, found)
    best = found if _busiest(weights, found) < _busiest(weights, given) else given
    # Sorted by cost on every rank, so that ranks that synchronize per microbatch have similar ones.
    return [sorted(rows, key=lambda row: (-weights[row], row)) for rows in best]


def _dealt(weights: np.ndarray, ranks: int) -> list[list[int]]:
    room = len(weights) // ranks
    found: list[list[int]] = [[] for _ in range(ranks)]
    free = [(0, rank) for rank in range(ranks)]  # a heap of ranks with room, the least loaded first
    for row in sorted(range(len(weights)), key=lambda row: (-weights[row], row)):
        load, rank = heapq.heappop(free)
        found[rank].append(row)
        if len(found[rank]) < room:
            heapq.heappush(free, (load + int(weights[row]), rank))
    return found


def _swap(weights: np.ndarray, found: list[list[int]]) -> None:
    """Swaps sequences of the busiest rank in place while that lowers the larger of both loads and the imbalance exceeds
    `EVEN`."""
    loads = [int(weights[rows].sum()) for rows in found]
    while max(loads) * len(found) > (1 + EVEN) * sum(loads):
        busiest = loads.index(max(loads))
        best = (0, 0, 0, 0)  # gain, other rank, indices of the two sequences
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
