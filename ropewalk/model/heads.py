"""Splits the fused projection of attention into heads and rotates queries and keys by position.

Shapes: B sequences, T tokens, H query heads, G key and value heads, D head size. Features of `fused` are grouped by
key-value head: queries, key, value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .components import is_whole_head
from .matmul import times
from .positions import Rotation, rotate

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries B H T D, keys B G T D, values B G T D."""


def split_heads(fused: Tensor, *, group_heads: int, head_size: int) -> Heads:
    """Splits heads without rotation; `group_heads` counts the queries, key and value of a group."""
    # -1 instead of the number of groups: a tensor-parallel rank has only some of them.
    groups = fused.unflatten(-1, (-1, group_heads, head_size))
    queries, keys, values = groups.split((group_heads - 2, 1, 1), dim=3)
    return queries.flatten(2, 3).transpose(1, 2), keys.squeeze(3).transpose(1, 2), values.squeeze(3).transpose(1, 2)


def split_biased_heads(fused: Tensor, bias: Tensor, *, group_heads: int, head_size: int) -> Heads:
    """`split_heads` with the gradient of the bias, which `fused` includes detached: one kernel sums it while merging
    gradients into that of `fused`. Requires `has_head_kernel`."""
    heads: Heads = _Split.apply(fused, bias, group_heads, head_size)
    return heads


def has_head_kernel(x: Tensor, head_size: int) -> bool:
    """Whether GPU kernels split and rotate heads of this size, of projections like `x`."""
    return x.is_cuda and is_whole_head(head_size) and x.dtype != torch.float64


def rotated_heads(fused: Tensor, angles: Rotation, *, group_heads: int, head_size: int) -> Heads:
    """Splits heads and rotates queries and keys by position."""
    if has_head_kernel(fused, head_size):
        heads: Heads = _Rotated.apply(fused, *angles, group_heads, head_size)
        return heads[0].transpose(1, 2), heads[1].transpose(1, 2), heads[2].transpose(1, 2)
    queries, keys, values = split_heads(fused, group_heads=group_heads, head_size=head_size)
    return rotate(queries, angles), rotate(keys, angles), values


def rotated_projection(x_BTC: Tensor, weight: Tensor, angles: Rotation, *, group_heads: int, head_size: int) -> Heads:
    """Heads of x W^T, with queries and keys rotated in place. Requires `has_head_kernel` and a single dtype."""
    heads: Heads = _RotatedProduct.apply(x_BTC.contiguous(), weight, *angles, group_heads, head_size)
    return heads


class _Split(torch.autograd.Function):
    """Views; one kernel in the backward pass."""

    @staticmethod
    def forward(ctx: Any, fused: Tensor, bias: Tensor, group_heads: int, head_size: int) -> Heads:
        ctx.group_heads = group_heads
        ctx.dtype = bias.dtype
        return split_heads(fused, group_heads=group_heads, head_size=head_size)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        from .kernels.rotated_heads import merged

        fused, parts = merged(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), ctx.group_heads)
        return fused, parts.sum(dim=0).to(ctx.dtype), None, None


class _Rotated(torch.autograd.Function):
    """One kernel each for forward and backward. Values are copied too; otherwise attention would save the whole
    projection for them. Inductor's backward of the plain ops takes 3 times the memory-bound time (H200)."""

    @staticmethod
    def forward(ctx: Any, fused: Tensor, cosines: Tensor, sines: Tensor, group_heads: int, head_size: int) -> Heads:
        from .kernels.rotated_heads import rotated

        ctx.save_for_backward(cosines, sines)
        ctx.group_heads = group_heads
        return rotated(fused.contiguous(), cosines, sines, group_heads, head_size)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        from .kernels.rotated_heads import rotated_backward

        return rotated_backward(q, k, v, *ctx.saved_tensors, ctx.group_heads), None, None, None, None


class _RotatedProduct(torch.autograd.Function):
    """Views of the matmul; one kernel and two matmuls in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cosines: Tensor, sines: Tensor, group_heads: int, head_size: int
    ) -> Heads:
        from .kernels.rotated_heads import rotated_product

        ctx.save_for_backward(x, weight, cosines, sines)
        ctx.group_heads = group_heads
        fused = rotated_product(x, weight, cosines, sines, group_heads, head_size)
        return split_heads(fused, group_heads=group_heads, head_size=head_size)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        from .kernels.rotated_heads import rotated_backward

        x, weight, cosines, sines = ctx.saved_tensors
        heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        fused = rotated_backward(*heads, cosines, sines, ctx.group_heads).flatten(0, 1)
        to_x, to_weight = ctx.needs_input_grad[:2]
        return (
            times(fused, weight, False, False, None, None).view(x.shape) if to_x else None,
            times(fused, x.flatten(0, 1), True, False, None, None) if to_weight else None,
            *(None,) * 4,
        )
