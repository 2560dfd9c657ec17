"""Rows of a step go to the data ranks by what they cost, before anything is computed from them.

The loader gives rank r of n the rows r, r + n, ... of the global batch. Ranks tell each other what their rows cost (a
number a row), all come to the same assignment (plan/sequence_assignment.py), and one all-to-all brings every row where
it is computed,
with its number in the global batch: dropout is drawn by that number. The rows of the step and their weights stay what
they were, so loss and gradients do.

Everything here happens in host memory: while a GPU computes a step, its host deals the rows of the next one.

What is won is the time of pairs that attention leaves out. An attention that computes every pair of a row and masks
those of two documents (model/attend.py) takes the same time for each row, however they are dealt; the ring
(parallel/context/context_attention.py) leaves out tiles that documents hide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.load.batch import Batch
from ropewalk.model.spec import Spec
from ropewalk.plan.sequence_assignment import deal, row_cost

from ..comm import Group


def numbers_of(batch: Batch, group: Group) -> Tensor:
    """The numbers in the global batch of this rank's rows as the loader gives them, where they are."""
    return torch.arange(len(batch), device=batch.tokens.device) * group.size + group.rank


class SequenceBalancer:
    """Deals the rows of steps to the ranks of `group`, which communicate host to host."""

    def __init__(self, group: Group, spec: Spec) -> None:
        self._group, self._spec, self._cost = group, spec, row_cost(spec)

    def __call__(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The rows that this rank computes of the global batch, and their numbers in it, both on the host. `batch` is
        what the loader gave, in host memory. All ranks must call."""
        assert batch.tokens.device.type == "cpu", "rows are dealt in host memory"
        group = self._group
        if group.size == 1 or self._spec.documents == "ignore":
            return batch, numbers_of(batch, group)  # every row costs the same
        # One column a rank: read row by row these are the costs of rows 0, 1, 2, ... of the global batch.
        costs = torch.stack(group.all_gather(self.costs(batch)).chunk(group.size), dim=1).flatten().tolist()
        dealt = deal(costs, group.size)
        mine = torch.tensor(dealt[group.rank])
        if all(row % group.size == rank for rank, rows in enumerate(dealt) for row in rows):
            return batch.rows(mine // group.size), mine
        return _exchange(batch, dealt, group), mine

    def costs(self, batch: Batch) -> Tensor:
        """FLOPs of each row, int64."""
        place = torch.arange(batch.documents.shape[1])
        begins = torch.zeros_like(batch.documents, dtype=torch.bool)
        begins[:, 1:] = batch.documents[:, 1:] != batch.documents[:, :-1]
        seen = place - torch.where(begins, place, 0).cummax(1).values + 1
        pairs = seen.clamp(max=self._spec.window).sum(1) if self._spec.window else seen.sum(1)
        return self._cost.pair * pairs + self._cost.token * len(place)


def _exchange(batch: Batch, dealt: Sequence[Sequence[int]], group: Group) -> Batch:
    """The rows dealt to this rank, in their order there. Row n is rank n mod `ranks`'s, its row n div `ranks`."""
    ranks, me = group.size, group.rank
    routes = [[[row for row in rows if row % ranks == source] for rows in dealt] for source in range(ranks)]
    room = max(len(rows) for to in routes for rows in to)  # all messages are of one size
    packed = _pack(batch)
    parts = packed.new_zeros(ranks, room, *packed.shape[1:])
    for target, rows in enumerate(routes[me]):
        parts[target, : len(rows)] = packed[torch.tensor(rows, dtype=torch.int64) // ranks]
    arrived = group.all_to_all(parts)
    places = {row: (source, place) for source in range(ranks) for place, row in enumerate(routes[source][me])}
    sources, slots = torch.tensor([places[row] for row in dealt[me]]).unbind(1)
    return _unpack(arrived[sources, slots])


def _pack(batch: Batch) -> Tensor:
    """Rows as 20 bytes a token, B 5 T of 32-bit integers."""
    weight = batch.weight.contiguous().view(torch.int32)
    others = (part.to(torch.int32) for part in (batch.tokens, batch.targets, batch.positions, batch.documents))
    return torch.stack([weight, *others], dim=1)


def _unpack(rows: Tensor) -> Batch:
    weight, tokens, targets, positions, documents = rows.unbind(1)
    return Batch(
        tokens=tokens.long(),
        targets=targets.long(),
        weight=weight.contiguous().view(torch.float32),
        positions=positions.long(),
        documents=documents.contiguous(),
    )
