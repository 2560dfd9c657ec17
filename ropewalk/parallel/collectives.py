"""Differentiable collectives for models computed over several ranks, in eager and compiled code.

The compiler cannot trace into a collective. Compiled code calls it as an opaque operator, which looks up its group by
key and calls the same methods at run time: bytes are counted and waits timed as in eager code. Out-of-place operators
allocate their result; `all_reduce_` works in place, and inductor removes the copies that functionalization adds for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .comm import Group, group_of


def enter_split(x: Tensor, group: Group) -> Tensor:
    """Identity forward, all-reduce backward, for activations that all ranks hold and use with their own weights
    (Megatron's f). The gradient is summed in place: the result's consumer must allocate it (a matmul does)."""
    return _Enter.apply(x, group) if group.size > 1 else x


def leave_split(x: Tensor, group: Group) -> Tensor:
    """All-reduce forward, in place, identity backward (Megatron's g). The producer of `x` must not save it for
    backward (a matmul does not); otherwise autograd raises an error."""
    return _Leave.apply(x, group) if group.size > 1 else x


def gather_first(x: Tensor, group: Group) -> Tensor:
    """All-gather along the first dimension forward, reduce-scatter backward, before sharded weights. No copies."""
    return _Gather.apply(x, group) if group.size > 1 else x


def scatter_first(x: Tensor, group: Group) -> Tensor:
    """Reduce-scatter along the first dimension forward, all-gather backward. No copies."""
    return _Scatter.apply(x, group) if group.size > 1 else x


def swap_along(x: Tensor, group: Group, *, split: int, join: int) -> Tensor:
    """All-to-all: changes the sharded dimension from `join` to `split`."""
    return _Swap.apply(x, group, split, join) if group.size > 1 else x


def gathered(x: Tensor, group: Group) -> Tensor:
    """`gather_first` without autograd."""
    if torch.compiler.is_compiling():
        return _all_gather(x, group.key)
    return group.all_gather(x)


def scattered(x: Tensor, group: Group) -> Tensor:
    """`scatter_first` without autograd."""
    if torch.compiler.is_compiling():
        return _reduce_scatter(x, group.key)
    return group.reduce_scatter(x)


def _summed(x: Tensor, group: Group) -> Tensor:
    """Sums `x` over the ranks, in place."""
    if torch.compiler.is_compiling():
        out = x.clone(memory_format=torch.contiguous_format)  # graphs are functional; inductor removes the copy
        _all_reduce(out, group.key)
        return out
    return group.all_reduce(x.contiguous())


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        out = _summed(x, group)
        if not torch.compiler.is_compiling():
            # Autograd does not see a collective's write. Not `mark_dirty`: for a view `x`, the backward pass would
            # copy the gradient.
            increment_version(x)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return scattered(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gathered(grad, ctx.group), None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _swap(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _swap(grad, ctx.group, ctx.join, ctx.split), None, None, None


def _swap(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    parts = torch.stack(x.chunk(group.size, split))
    parts = _all_to_all(parts, group.key) if torch.compiler.is_compiling() else group.all_to_all(parts)
    return torch.cat(parts.unbind(0), join)


@torch.library.custom_op("ropewalk::all_reduce_", mutates_args=("x",), schema="(Tensor(a!) x, str group) -> ()")
def _all_reduce(x: Tensor, group: str) -> None:
    group_of(group).all_reduce(x)


@torch.library.custom_op("ropewalk::all_gather", mutates_args=(), schema="(Tensor x, str group) -> Tensor")
def _all_gather(x: Tensor, group: str) -> Tensor:
    return group_of(group).all_gather(x)


@_all_gather.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty((group_of(group).size * x.shape[0], *x.shape[1:]))


@torch.library.custom_op("ropewalk::reduce_scatter", mutates_args=(), schema="(Tensor x, str group) -> Tensor")
def _reduce_scatter(x: Tensor, group: str) -> Tensor:
    return group_of(group).reduce_scatter(x)


@_reduce_scatter.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty((x.shape[0] // group_of(group).size, *x.shape[1:]))


@torch.library.custom_op("ropewalk::all_to_all", mutates_args=(), schema="(Tensor parts, str group) -> Tensor")
def _all_to_all(parts: Tensor, group: str) -> Tensor:
    return group_of(group).all_to_all(parts)


@_all_to_all.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return parts.new_empty(parts.shape)
