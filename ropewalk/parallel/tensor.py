"""Tensor parallelism (Shoeybi et al. 2019): each rank holds a slice of every matrix, as the model declares.

Column matrices take the whole input and make part of the features; row matrices take part of the features and make
partial sums. With `sequence` (Korthikanti et al. 2022) what lies between two such pairs, norms, residuals and dropout,
is split by places of the row: the input is gathered before a column matrix, partial sums are scattered after a row
matrix, which moves the same bytes as the all-reduce it replaces.

Shapes: B rows, T tokens, C width, N tokens of a chunk, V vocabulary (of this rank).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ropewalk.model.decoder import Decoder
from ropewalk.model.modules import Linear
from ropewalk.model.sharding import split_of, whole_name
from ropewalk.model.spec import Spec

from .comm import Group, cut_along, enter_split, gather_along, leave_split, scatter_along
from .cut import Cut, chunk_sizes, whole_cut

PLACES = 1
"""The dimension of B T C that `sequence` splits."""


def tensor_cut(name: str, spec: Spec, group: Group, *, first: bool = True) -> Cut:
    """Which part of the parameter `name` a rank of the tensor axis holds; `first` says the same of the other axes."""
    shape = spec.shapes()[whole_name(name, spec)]
    split = split_of(name, spec)
    if split.dimension is None:
        return whole_cut(shape, first=first and group.rank == 0)
    side = shape[split.dimension]
    if split.role == "vocabulary":
        return whole_cut(shape, first=first).further(split.dimension, chunk_sizes(side, group.size), group)
    assert split.units % group.size == 0, f"{name}: {split.units} units on {group.size} ranks"
    return whole_cut(shape, first=first).further(split.dimension, (side // group.size,) * group.size, group)


def split_model(model: Decoder, group: Group, *, sequence: bool) -> None:
    """Cuts the parameters of `model` in place and connects its parts over `group`."""
    if group.size == 1:
        return
    spec = model.spec
    for name, parameter in list(model.named_parameters()):
        cut = tensor_cut(name, spec, group)
        if not cut.is_whole:
            _replace(model, name, cut.take(parameter.detach()).clone())
    for _, linear, role in split_linears(model):
        if role == "column":
            linear.enter = functools.partial(_enter, group=group, sequence=sequence)
        else:
            linear.leave = functools.partial(_leave, group=group, sequence=sequence)
    if model.embedding is not None:
        begin = tensor_cut("embedding.weight", spec, group).offset[0]
        model.embed = functools.partial(_look_up, model.embedding, begin=begin, group=group, sequence=sequence)
        if sequence:
            model.keep = functools.partial(_kept, group=group)


def split_linears(model: Decoder) -> Iterator[tuple[str, Linear, str]]:
    """(name, module, role) of every linear map of the blocks."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield name, module, split_of(f"{name}.weight", model.spec).role


def has_partial_gradient(name: str, spec: Spec, *, sequence: bool) -> bool:
    """Whether gradients of this parameter add up over the tensor axis: every rank holds all of it and met only part of
    the features or places."""
    split = split_of(name, spec)
    return split.partial_gradient or (sequence and split.role == "replicate")


SPLIT_LOGIT_BYTES = 1 << 28
"""Most bytes of float32 logits of a rank alive at once; larger batches are cut into chunks whose logits are computed
again in the backward pass (one more head product, 2 V C FLOPs a token)."""


@dataclass(frozen=True, slots=True)
class SplitHead:
    """The loss over a vocabulary that is split: no rank ever has all logits of a token."""

    group: Group
    sequence: bool
    begin: int
    """First token of this rank's part of the vocabulary."""

    def losses(self, hidden_BTC: Tensor, head_VC: Tensor, targets_BT: Tensor) -> Tensor:
        """The negative log-probability of each target, B T, on every rank alike."""
        hidden_NC, targets_N = self._entered(hidden_BTC).flatten(0, 1), targets_BT.flatten()
        chunk = max(1, SPLIT_LOGIT_BYTES // (4 * head_VC.shape[0]))
        if len(hidden_NC) <= chunk:
            return self._losses(hidden_NC, head_VC, targets_N).view(targets_BT.shape)
        parts = zip(hidden_NC.split(chunk), targets_N.split(chunk), strict=True)
        done = [checkpoint(self._losses, hidden, head_VC, targets, use_reentrant=False) for hidden, targets in parts]
        return torch.cat(done).view(targets_BT.shape)

    @torch.no_grad()
    def scores(self, hidden_BTC: Tensor, head_VC: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability of each target, whether nothing is likelier), B T each."""
        hidden_NC, targets_N = self._entered(hidden_BTC).flatten(0, 1), targets_BT.flatten()
        chunk = max(1, SPLIT_LOGIT_BYTES // (4 * head_VC.shape[0]))
        scores, first = [], []
        for hidden, targets in zip(hidden_NC.split(chunk), targets_N.split(chunk), strict=True):
            logits_NV = _wide(F.linear(hidden, head_VC))
            largest_N, sum_N, target_N, _, _ = _statistics(logits_NV, targets, self.begin, self.group)
            scores.append(target_N - largest_N - sum_N.log())
            first.append(target_N >= largest_N)
        return torch.cat(scores).view(targets_BT.shape), torch.cat(first).view(targets_BT.shape)

    def _losses(self, hidden_NC: Tensor, head_VC: Tensor, targets_N: Tensor) -> Tensor:
        return _SplitCrossEntropy.apply(_wide(F.linear(hidden_NC, head_VC)), targets_N, self.begin, self.group)

    def _entered(self, hidden_BTC: Tensor) -> Tensor:
        return _enter(hidden_BTC, group=self.group, sequence=self.sequence)


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
    """(largest logit, sum of exponentials above it, the target's logit) over all of the vocabulary; and whether the
    target is in this rank's part, and where."""
    largest_N = group.all_reduce(logits_NV.max(1).values, operation="max")
    sums_N = (logits_NV - largest_N.unsqueeze(1)).exp().sum(1)
    index_N = targets_N - begin
    inside_N = (index_N >= 0) & (index_N < logits_NV.shape[1])
    index_N = torch.where(inside_N, index_N, 0)
    target_N = torch.where(inside_N, logits_NV.gather(1, index_N.unsqueeze(1)).squeeze(1), 0.0)
    both = group.all_reduce(torch.stack([sums_N, target_N]))
    return largest_N, both[0], both[1], inside_N, index_N


def _enter(x_BTC: Tensor, *, group: Group, sequence: bool) -> Tensor:
    return gather_along(x_BTC, group, dim=PLACES) if sequence else enter_split(x_BTC, group)


def _leave(x_BTC: Tensor, *, group: Group, sequence: bool) -> Tensor:
    return scatter_along(x_BTC, group, dim=PLACES) if sequence else leave_split(x_BTC, group)


def _look_up(embedding: nn.Embedding, tokens_BT: Tensor, *, begin: int, group: Group, sequence: bool) -> Tensor:
    """Vectors of the tokens in this rank's part of the vocabulary, zeros for others, added up."""
    index_BT = tokens_BT - begin
    inside_BT = (index_BT >= 0) & (index_BT < embedding.weight.shape[0])
    found_BTC = F.embedding(torch.where(inside_BT, index_BT, 0), embedding.weight)
    return _leave(found_BTC * inside_BT.unsqueeze(2).to(found_BTC.dtype), group=group, sequence=sequence)


def _kept(x_BT: Tensor, *, group: Group) -> Tensor:
    return cut_along(x_BT, group, dim=PLACES)


def _replace(model: nn.Module, name: str, value: Tensor) -> None:
    place, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(place), attribute, nn.Parameter(value))


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
