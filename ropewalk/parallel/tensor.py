"""Tensor parallelism (Shoeybi et al. 2019): each rank holds a slice of every matrix, as the model declares.

Column-parallel matrices take the whole input and produce a slice of the features; row-parallel matrices take a slice
and produce partial sums. With `sequence` (Korthikanti et al. 2022), norms, residuals and dropout between them are split
by positions: an all-gather before a column matrix and a reduce-scatter after a row matrix move the same bytes as the
all-reduce they replace. Hidden states are then T B C: a rank's positions are contiguous, so that neither collective
copies. The backward pass of a column matrix all-reduces the input gradient while it computes the weight gradient
(Megatron's asynchronous all-reduce).

Shapes: B sequences, T tokens, C width, N tokens of a chunk, V vocabulary of this rank, K inputs, M outputs of a linear.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ropewalk.model import matmul as products
from ropewalk.model.protocol import ModelStage
from ropewalk.model.sharding import Axis, Split, split_of, whole_name
from ropewalk.model.spec import Spec

from .collectives import enter_split, gather_first, gathered, leave_split, scatter_first
from .comm import Group, group_of
from .placement import Placement, chunk_sizes, whole_placement


def tensor_placement(name: str, spec: Spec, group: Group, *, first: bool = True) -> Placement:
    """Returns the placement of `name` on the tensor axis; `first` is whether this rank is first on the other axes."""
    shape = spec.shapes()[whole_name(name, spec)]
    return split_placement(split_of(name, spec), shape, {"tensor": group}, first=first)


def split_placement(
    split: Split, shape: Sequence[int], groups: Mapping[Axis, Group], *, first: bool = True
) -> Placement:
    """Returns the placement of a tensor on a rank whose axes are `groups`."""
    alike = (group for axis, group in groups.items() if axis not in {each.axis for each in split.axes})
    placement = whole_placement(shape, first=first and all(group.rank == 0 for group in alike))
    for each in split.axes:
        group, side = groups[each.axis], placement.local_shape[each.dimension]
        if each.axis == "tensor" and split.role == "vocabulary":
            sizes = chunk_sizes(side, group.size)
        else:
            units = split.units if each.axis == "tensor" else side
            assert units % group.size == 0, f"{units} units of dimension {each.dimension} on {group.size} ranks"
            sizes = (side // group.size,) * group.size
        placement = placement.further(each.dimension, sizes, group)
    return placement


def split_model(model: ModelStage, group: Group, *, sequence: bool) -> None:
    """Shards the parameters of `model` in place and connects its modules over `group`."""
    if group.size == 1:
        return
    spec = model.spec
    for name, parameter in list(model.named_parameters()):
        placement = tensor_placement(name, spec, group)
        if not placement.is_whole:
            _replace(model, name, placement.take(parameter.detach()).clone())
    # The same objects for all layers, so that one compiled block serves them all.
    enter, column, leave = (
        functools.partial(each, group=group, sequence=sequence) for each in (_enter, column_linear, _leave)
    )
    for name, linear in model.linears().items():
        if split_of(f"{name}.weight", spec).role == "column":
            linear.enter, linear.column = enter, column
        else:
            linear.leave = leave
    begin = tensor_placement("embedding.weight", spec, group).offset[0]
    look_up = functools.partial(_look_up, begin=begin, group=group, sequence=sequence)
    model.split_over_ranks(look_up=look_up, keep=functools.partial(_kept, group=group) if sequence else None)


def has_partial_gradient(name: str, spec: Spec, *, sequence: bool) -> bool:
    """Whether gradients of this parameter are summed over the tensor axis: every rank holds it whole, but saw only some
    of the features or positions."""
    split = split_of(name, spec)
    return split.partial_gradient or (sequence and split.role == "replicate")


SPLIT_LOGIT_BYTES = 1 << 28
"""Maximum bytes of float32 logits alive on a rank; larger batches are chunked, and each chunk's logits recomputed in
the backward pass (one more head matmul, 2 V C FLOPs per token)."""


@dataclass(frozen=True, slots=True)
class SplitHead:
    """Vocabulary-parallel loss: no rank ever has all logits of a token."""

    group: Group
    sequence: bool
    begin: int
    """First token of this rank's shard of the vocabulary."""

    def losses(self, hidden: Tensor, head_VC: Tensor, targets_BT: Tensor) -> Tensor:
        """Returns the negative log-probability of each target, B T, the same on every rank."""
        hidden_NC, targets_N = self._tokens(hidden, targets_BT)
        chunk = max(1, SPLIT_LOGIT_BYTES // (4 * head_VC.shape[0]))
        if len(hidden_NC) <= chunk:
            return self._by_row(self._losses(hidden_NC, head_VC, targets_N), targets_BT)
        parts = zip(hidden_NC.split(chunk), targets_N.split(chunk), strict=True)
        done = [checkpoint(self._losses, some, head_VC, targets, use_reentrant=False) for some, targets in parts]
        return self._by_row(torch.cat(done), targets_BT)

    @torch.no_grad()
    def scores(self, hidden: Tensor, head_VC: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (log-probability of each target, whether no token is likelier), B T each."""
        hidden_NC, targets_N = self._tokens(hidden, targets_BT)
        chunk = max(1, SPLIT_LOGIT_BYTES // (4 * head_VC.shape[0]))
        scores, first = [], []
        for some, targets in zip(hidden_NC.split(chunk), targets_N.split(chunk), strict=True):
            logits_NV = _wide(F.linear(some, head_VC))
            largest_N, sum_N, target_N, _, _ = _statistics(logits_NV, targets, self.begin, self.group)
            scores.append(target_N - largest_N - sum_N.log())
            first.append(target_N >= largest_N)
        return self._by_row(torch.cat(scores), targets_BT), self._by_row(torch.cat(first), targets_BT)

    def _losses(self, hidden_NC: Tensor, head_VC: Tensor, targets_N: Tensor) -> Tensor:
        return _SplitCrossEntropy.apply(_wide(F.linear(hidden_NC, head_VC)), targets_N, self.begin, self.group)

    def _tokens(self, hidden: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the hidden states of all tokens and their targets, in the memory order of the hidden states."""
        targets = targets_BT.t() if self.sequence else targets_BT
        return _enter(hidden, group=self.group, sequence=self.sequence).flatten(0, 1), targets.flatten()

    def _by_row(self, x_N: Tensor, targets_BT: Tensor) -> Tensor:
        """Inverts the order of `_tokens` to B T."""
        return x_N.view(targets_BT.t().shape).t() if self.sequence else x_N.view(targets_BT.shape)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, begin: int, group: Group) -> Tensor:
        largest_N, sum_N, target_N, inside_N, index_N = _statistics(logits_NV, targets_N, begin, group)
        ctx.save_for_backward(logits_NV, largest_N + sum_N.log(), inside_N, index_N)
        return largest_N + sum_N.log() - target_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, log_sum_N, inside_N, index_N = ctx.saved_tensors
        chances_NV = (logits_NV - log_sum_N.unsqueeze(1)).exp()
        chances_NV.scatter_add_(1, index_N.unsqueeze(1), -inside_N.to(chances_NV.dtype).unsqueeze(1))
        return chances_NV.mul_(grad_N.unsqueeze(1)), None, None, None


def _statistics(
    logits_NV: Tensor, targets_N: Tensor, begin: int, group: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (largest logit, sum of exponentials relative to it, the target's logit) over the whole vocabulary, and
    whether the target is in this rank's shard, and its index there."""
    largest_N = group.all_reduce(logits_NV.max(1).values, operation="max")
    sums_N = (logits_NV - largest_N.unsqueeze(1)).exp().sum(1)
    index_N = targets_N - begin
    inside_N = (index_N >= 0) & (index_N < logits_NV.shape[1])
    index_N = torch.where(inside_N, index_N, 0)
    target_N = torch.where(inside_N, logits_NV.gather(1, index_N.unsqueeze(1)).squeeze(1), 0.0)
    both = group.all_reduce(torch.stack([sums_N, target_N]))
    return largest_N, both[0], both[1], inside_N, index_N


def column_linear(
    x: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None,
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    *,
    group: Group,
    sequence: bool,
) -> Tensor:
    """Column-parallel `product`, x W^T + b of the gathered input; its backward pass overlaps the collective.

    Runs in autocast's dtype, as the matmul: half the bytes of float32. For the matmuls of torch and of model/matmul.py.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        narrow = torch.get_autocast_dtype(kind)
        x, weight_MK, bias_M = x.to(narrow), weight_MK.to(narrow), None if bias_M is None else bias_M.to(narrow)
    return _ColumnLinear.apply(x, weight_MK, bias_M, product is products.product, group, sequence)


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_MK: Tensor, bias_M: Tensor | None, tuned: bool, group: Group, sequence: bool
    ) -> Tensor:
        whole = gathered(x, group) if sequence else x
        ctx.save_for_backward(whole, weight_MK)
        ctx.tuned, ctx.group, ctx.sequence = tuned, group, sequence
        if not tuned:
            return F.linear(whole, weight_MK, bias_M)
        y_NM = products.times(whole.flatten(0, -2), weight_MK, False, True, bias_M, None)
        return y_NM.unflatten(0, whole.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole, weight_MK = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad = grad.contiguous()
        of_x, of_weight = None, None
        if to_x:
            both = _column_backward if torch.compiler.is_compiling() else column_backward
            of_x, of_weight = both(grad, whole, weight_MK, ctx.group.key, ctx.sequence, ctx.tuned, to_weight)
        elif to_weight:
            of_weight = _weight_gradient(grad.flatten(0, -2), whole.flatten(0, -2), tuned=ctx.tuned)
        of_bias = grad.flatten(0, -2).sum(0) if to_bias else None
        return of_x, of_weight if to_weight else None, of_bias, None, None, None


def column_backward(
    grad: Tensor, whole: Tensor, weight_MK: Tensor, group: str, sequence: bool, tuned: bool, to_weight: bool
) -> tuple[Tensor, Tensor]:
    """Returns the input gradient, summed over ranks (with `sequence` reduce-scattered), and the weight gradient, empty
    unless requested and computed while the sum is in flight."""
    over, grad_NM, whole_NK = group_of(group), grad.flatten(0, -2), whole.flatten(0, -2)
    of_x = products.times(grad_NM, weight_MK, False, False, None, None) if tuned else grad_NM @ weight_MK
    of_x = of_x.view(whole.shape)
    if sequence:
        pending = over.start_reduce_scatter(of_x.unflatten(0, (over.size, -1)))
    else:
        pending = over.start_all_reduce(of_x)
    of_weight = _weight_gradient(grad_NM, whole_NK, tuned=tuned) if to_weight else weight_MK.new_empty(0)
    return pending.wait(), of_weight


def _weight_gradient(grad_NM: Tensor, x_NK: Tensor, *, tuned: bool) -> Tensor:
    return products.times(grad_NM, x_NK, True, False, None, None) if tuned else grad_NM.mT @ x_NK


_column_backward = torch.library.custom_op(
    "ropewalk::column_backward",
    column_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor whole, Tensor weight, str group, bool sequence, bool tuned, bool to_weight)"
    " -> (Tensor, Tensor)",
)


@_column_backward.register_fake
def _(
    grad: Tensor, whole: Tensor, weight_MK: Tensor, group: str, sequence: bool, tuned: bool, to_weight: bool
) -> tuple[Tensor, Tensor]:
    first = whole.shape[0] // (group_of(group).size if sequence else 1)
    of_weight = weight_MK.new_empty(weight_MK.shape if to_weight else (0,))
    return whole.new_empty((first, *whole.shape[1:])), of_weight


def _enter(x: Tensor, *, group: Group, sequence: bool) -> Tensor:
    return gather_first(x, group) if sequence else enter_split(x, group)


def _leave(x: Tensor, *, group: Group, sequence: bool) -> Tensor:
    return scatter_first(x, group) if sequence else leave_split(x, group)


def _look_up(embedding: nn.Embedding, tokens: Tensor, *, begin: int, group: Group, sequence: bool) -> Tensor:
    """Vocabulary-parallel embedding: sums the ranks' lookups, zero outside their shards; T B with `sequence`."""
    index = tokens - begin
    inside = (index >= 0) & (index < embedding.weight.shape[0])
    found = F.embedding(torch.where(inside, index, 0), embedding.weight)
    return _leave(found * inside.unsqueeze(2).to(found.dtype), group=group, sequence=sequence)


def _kept(x_TB: Tensor, *, group: Group) -> Tensor:
    return x_TB.chunk(group.size)[group.rank].contiguous()


def _replace(model: nn.Module, name: str, value: Tensor) -> None:
    place, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(place), attribute, nn.Parameter(value))


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
