"""Balances sequences across data-parallel ranks by attention cost, before the forward pass.

The loader gives rank r of n the sequences r, r + n, ... of the global batch. Ranks exchange the cost of each sequence,
compute the same assignment (plan/sequence_assignment.py), and one all-to-all moves every sequence to its rank, with its
index in the global batch, which seeds dropout. The sequences of the step and their weights stay the same, and so do
loss and gradients. All of it runs in host memory: while a GPU computes a step, its host assigns the next one.

The gain is the time of pairs that attention skips. Attention that computes and masks pairs of different documents
(model/attend.py) takes the same time for each sequence and gains nothing; the ring
(parallel/context/context_attention.py) skips tiles that documents mask.
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
    """Returns the global-batch indices of this rank's sequences as the loader gives them, on their device."""
    return torch.arange(len(batch), device=batch.tokens.device) * group.size + group.rank


class SequenceBalancer:
    """Assigns the sequences of steps to the ranks of `group`, which communicate host to host."""

    def __init__(self, group: Group, spec: Spec) -> None:
        self._group, self._spec, self._cost = group, spec, row_cost(spec)

    def __call__(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Returns this rank's sequences of the global batch and their indices in it, both on the host. `batch` comes
        from the loader, in host memory. All ranks must call."""
        assert batch.tokens.device.type == "cpu", "sequences are assigned in host memory"
        group = self._group
        if group.size == 1 or self._spec.documents == "ignore":
            return batch, numbers_of(batch, group)  # every sequence costs the same
        # One column per rank: row-major order gives the costs of sequences 0, 1, 2, ... of the global batch.
        costs = torch.stack(group.all_gather(self.costs(batch)).chunk(group.size), dim=1).flatten().tolist()
        assigned = deal(costs, group.size)
        mine = torch.tensor(assigned[group.rank])
        if all(row % group.size == rank for rank, rows in enumerate(assigned) for row in rows):
            return batch.rows(mine // group.size), mine
        return _exchange(batch, assigned, group), mine

    def costs(self, batch: Batch) -> Tensor:
        """Returns the FLOPs of each sequence, int64."""
        place = torch.arange(batch.documents.shape[1])
        begins = torch.zeros_like(batch.documents, dtype=torch.bool)
        begins[:, 1:] = batch.documents[:, 1:] != batch.documents[:, :-1]
        seen = place - torch.where(begins, place, 0).cummax(1).values + 1
        pairs = seen.clamp(max=self._spec.window).sum(1) if self._spec.window else seen.sum(1)
        return self._cost.pair * pairs + self._cost.token * len(place)


def _exchange(batch: Batch, assigned: Sequence[Sequence[int]], group: Group) -> Batch:
    """Returns the sequences assigned to this rank, in order. Sequence n comes from rank n mod `ranks`, where its index
    is n div `ranks`."""
    ranks, me = group.size, group.rank
    routes = [[[row for row in rows if row % ranks == source] for rows in assigned] for source in range(ranks)]
    room = max(len(rows) for to in routes for rows in to)  # all messages have equal size
    packed = _pack(batch)
    parts = packed.new_zeros(ranks, room, *packed.shape[1:])
    for target, rows in enumerate(routes[me]):
        parts[target, : len(rows)] = packed[torch.tensor(rows, dtype=torch.int64) // ranks]
    arrived = group.all_to_all(parts)
    places = {row: (source, place) for source in range(ranks) for place, row in enumerate(routes[source][me])}
    sources, slots = torch.tensor([places[row] for row in assigned[me]]).unbind(1)
    return _unpack(arrived[sources, slots])


def _pack(batch: Batch) -> Tensor:
    """Packs sequences as 20 bytes per token, B 5 T of 32-bit integers."""
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
