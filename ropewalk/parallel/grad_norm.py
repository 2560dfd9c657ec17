"""Global gradient norm over sharded gradients, and gradient sums over ranks that hold the same parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .comm import Group
from .data.buckets import BinaryCounter
from .mesh import Mesh
from .placement import Placement


def global_norm(
    gradients: Mapping[str, Tensor], mesh: Mesh, *, copies: Mapping[str, int], loss: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (the sum of `loss` over all ranks, the global gradient norm), in one all-reduce of two numbers. `copies`
    ranks hold the same shard, which counts once."""
    device = loss.device
    by_copies: dict[int, list[Tensor]] = {}
    for name, gradient in gradients.items():
        if gradient.numel():
            by_copies.setdefault(copies[name], []).append(gradient)
    if mesh.world.size == 1:
        parts = [g for found in by_copies.values() for g in found]
        if not parts:
            return loss, torch.zeros((), device=device)
        # The norm of narrow gradients needs a wide dtype, too.
        norms = torch._foreach_norm(parts, 2, torch.promote_types(parts[0].dtype, torch.float32))
        return loss, torch.linalg.vector_norm(torch.stack(norms))
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for count, found in by_copies.items():
        squares = squares + torch.stack(torch._foreach_norm(found)).double().square().sum() / count
    both = mesh.world.all_reduce(torch.stack([loss.double(), squares]))
    return both[0], both[1].sqrt()


def global_norms(parts: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh) -> list[Tensor]:
    """Returns the norms of sharded tensors, in the order given; one all-reduce per axis."""
    norms = list(torch._foreach_norm(list(parts.values())))
    cutting = [group for group in (mesh.group("tensor"), mesh.group("shard")) if group.size > 1]
    if not cutting:
        return norms
    squares = torch.stack(norms).double().square()
    for group in cutting:
        cut_here = [any(s.group.ranks == group.ranks for s in placements[name].shards) for name in parts]
        shares = torch.tensor([1.0 if here else 1 / group.size for here in cut_here], dtype=torch.float64)
        squares = group.all_reduce(squares * shares.to(squares.device))
    return list(squares.sqrt().unbind(0))


def sum_partial(gradients: Sequence[Tensor], group: Group) -> None:
    """Sums, in place and in one collective, gradients of parameters that all ranks of `group` hold."""
    if group.size == 1 or not gradients:
        return
    flat = group.all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))


def exact_norm(gradients: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh) -> Tensor:
    """Returns the global gradient norm, bit-identical for any sharding: row sums of squares are all-gathered and summed
    in a fixed order. Cost: a collective per parameter."""
    rows = []
    shard = mesh.group("shard")
    for name, gradient in gradients.items():
        square = gradient.double() ** 2
        sums = square.flatten(1).sum(1) if square.dim() > 1 else square
        shards = placements[name].shards
        if shards:
            (only,) = shards
            assert only.group.ranks == shard.ranks, "exact mode shards along the shard axis alone"
            sums = Placement((sum(only.sizes),), shards).gather(sums)
        rows.append(sums.sum())
    # Per parameter, then over parameters: the same numbers in the same order on every rank.
    return torch.stack(rows).sum().sqrt()


def exact_sum(terms: Sequence[Tensor], group: Group) -> Tensor:
    """Returns the sum of one number per microbatch and rank of `group`, in the order of the gradients."""
    tree = BinaryCounter()
    for term in group.all_reduce(torch.stack(list(terms))).unbind(0):
        tree.add(term)
    return tree.total()
