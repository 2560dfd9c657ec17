"""The length of a gradient whose parts lie on many ranks, and sums over ranks that hold a parameter alike."""

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
    """(the sum of `loss` over all ranks, the length of the whole gradient). `copies` says how many ranks hold the same
    part: a square counts once.

    One all-reduce of two numbers.
    """
    device = loss.device
    by_copies: dict[int, list[Tensor]] = {}
    for name, gradient in gradients.items():
        if gradient.numel():
            by_copies.setdefault(copies[name], []).append(gradient)
    if mesh.world.size == 1:
        parts = [g for found in by_copies.values() for g in found]
        if not parts:
            return loss, torch.zeros((), device=device)
        # Of narrow gradients too the length is a wide number.
        norms = torch._foreach_norm(parts, 2, torch.promote_types(parts[0].dtype, torch.float32))
        return loss, torch.linalg.vector_norm(torch.stack(norms))
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for count, found in by_copies.items():
        squares = squares + torch.stack(torch._foreach_norm(found)).double().square().sum() / count
    both = mesh.world.all_reduce(torch.stack([loss.double(), squares]))
    return both[0], both[1].sqrt()


def global_norms(parts: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh) -> list[Tensor]:
    """The lengths of whole tensors whose parts lie on several ranks, in the order given; one all-reduce an axis."""
    lengths = list(torch._foreach_norm(list(parts.values())))
    cutting = [group for group in (mesh.group("tensor"), mesh.group("shard")) if group.size > 1]
    if not cutting:
        return lengths
    squares = torch.stack(lengths).double().square()
    for group in cutting:
        cut_here = [any(s.group.ranks == group.ranks for s in placements[name].shards) for name in parts]
        shares = torch.tensor([1.0 if here else 1 / group.size for here in cut_here], dtype=torch.float64)
        squares = group.all_reduce(squares * shares.to(squares.device))
    return list(squares.sqrt().unbind(0))


def sum_partial(gradients: Sequence[Tensor], group: Group) -> None:
    """Adds up, in place and in one collective, gradients of parameters that all ranks of `group` hold."""
    if group.size == 1 or not gradients:
        return
    flat = group.all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))


def exact_norm(gradients: Mapping[str, Tensor], placements: Mapping[str, Placement], mesh: Mesh) -> Tensor:
    """The length of the whole gradient, the same bits whatever the cut: squares are added up row by row, the rows of
    all ranks gathered, and these added up in one order. Price: a collective a parameter."""
    rows = []
    shard = mesh.group("shard")
    for name, gradient in gradients.items():
        square = gradient.double() ** 2
        sums = square.flatten(1).sum(1) if square.dim() > 1 else square
        shards = placements[name].shards
        if shards:
            (slicing,) = shards
            assert slicing.group.ranks == shard.ranks, "exact mode cuts along the shard axis alone"
            sums = Placement((sum(slicing.sizes),), shards).gather(sums)
        rows.append(sums.sum())
    # Every parameter by itself, then all of them: the same numbers in the same order on every rank.
    return torch.stack(rows).sum().sqrt()


def exact_sum(terms: Sequence[Tensor], group: Group) -> Tensor:
    """The sum of one number per microbatch and rank of `group`, in the order of the gradients."""
    tree = BinaryCounter()
    for term in group.all_reduce(torch.stack(list(terms))).unbind(0):
        tree.add(term)
    return tree.total()
