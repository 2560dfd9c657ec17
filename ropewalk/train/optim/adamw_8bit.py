"""AdamW with 8-bit moments for the matrices inside blocks (Dettmers et al. 2022): 2 bytes per weight instead of 8.

Every step dequantizes, updates and requantizes the moments; weights use the unquantized new ones. The second moment is
stored as its *root*: codes reach down to 10^-7 of the largest number of a row, so storing squares would lose those of
gradients below 10^-3.5 of the largest, whose means are kept.

A code is an index into 256 values, times the largest number of the row: dynamic quantization (section 1.3 of the
paper), one decade per leading zero bit, divided evenly by the remaining bits. Numbers near the row's maximum have 0.4 %
error; 10^-6 of it is still representable. A row is the paper's block. Row scales are reduced over ranks that shard
columns, so codes do not depend on placement and a checkpoint loads on any number of ranks.

Embedding, head, positions, norms and biases keep float32 moments: the embedding for stability (section 2.3), the small
ones because they save nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.model.spec import Spec

from .adamw import Adam, adam
from .fused import FusedAdam, FusedAdam8
from .rule import Guarded, Moments, Parameters, Placements, Update, by_parameter, decay_groups
from .sharded import Largest
from .table import AdamSettings, is_hidden


def make(
    parameters: Parameters, settings: AdamSettings, spec: Spec | None, placements: Placements
) -> torch.optim.Optimizer:
    """8-bit moments for the matrices inside blocks, float32 moments for the rest."""
    rule = adam(settings)
    hidden = {name: p for name, p in parameters.items() if is_hidden(name, p.shape)}
    rest = {name: p for name, p in parameters.items() if not is_hidden(name, p.shape)}
    groups = decay_groups(hidden, settings.weight_decay, rule=Adam8(adam=rule), in_place=FusedAdam8(adam=rule))
    groups += decay_groups(rest, settings.weight_decay, rule=rule, in_place=FusedAdam(adam=rule))
    return Guarded(groups, by_parameter(parameters, placements))


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam8:
    """The reference in plain PyTorch; fused.py runs it as a kernel."""

    adam: Adam

    def begin(self, weight: Tensor) -> Moments:
        scale = weight.new_zeros(weight.shape[0], 1)
        return {
            "mean_code": torch.full_like(weight, zero_code(signed=True), dtype=torch.uint8),
            "mean_scale": scale,
            "root_code": torch.full_like(weight, zero_code(signed=False), dtype=torch.uint8),
            "root_scale": scale.clone(),
        }

    def update(
        self, weight: Tensor, gradient: Tensor, moments: Moments, *, step: Tensor, lr: float, decay: float
    ) -> Update:
        wide = {
            "exp_avg": decode(moments["mean_code"], moments["mean_scale"], signed=True),
            "exp_avg_sq": decode(moments["root_code"], moments["root_scale"], signed=False).square(),
        }
        direction, wide = self.adam.direction(gradient, wide, step=step)
        mean, root = wide["exp_avg"], wide["exp_avg_sq"].sqrt()
        mean_scale, root_scale = yield [Largest(mean.abs(), (2,)), Largest(root, (2,))]
        moments = {
            "mean_code": encode(mean, mean_scale, signed=True),
            "mean_scale": mean_scale,
            "root_code": encode(root, root_scale, signed=False),
            "root_scale": root_scale,
        }
        return weight * (1 - lr * decay) - lr * direction, moments


DECADES = 7


@functools.lru_cache(maxsize=16)
def table(*, signed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The 256 values in ascending order, from 0 or -1 to 1."""
    return torch.tensor(list(_values(signed=signed)), dtype=torch.float64).to(device, dtype)


@functools.lru_cache(maxsize=16)
def middles(*, signed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The 255 midpoints between adjacent values."""
    wide = table(signed=signed, dtype=torch.float64, device=torch.device("cpu"))
    return ((wide[:-1] + wide[1:]) / 2).to(device, dtype)


def zero_code(*, signed: bool) -> int:
    """The code of 0."""
    return sorted(_values(signed=signed)).index(0.0)


def encode(x: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The nearest codes of `x`, given its maximum absolute value `scale` along the last dimension. Unsigned: a positive
    number never rounds to 0, because the root is a divisor.
    """
    unit = x / torch.where(scale > 0, scale, 1)
    limits = middles(signed=signed, dtype=x.dtype, device=x.device)
    codes = torch.bucketize(unit, limits, out_int32=True).to(torch.uint8)
    return codes if signed else torch.maximum(codes, (x > 0).to(torch.uint8))


def decode(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The values of `codes`."""
    return table(signed=signed, dtype=scale.dtype, device=scale.device)[codes.int()] * scale


def _values(*, signed: bool) -> Iterator[float]:
    positive = [0.0, 1.0]
    for decade in range(DECADES):
        # The sign takes one bit of the fraction.
        steps = 2 ** (DECADES - decade - 1) * (1 if signed else 2)
        width = 0.9 / steps
        positive += [10.0**-decade * (0.1 + width * (step + 0.5)) for step in range(steps)]
    negative = [-value for value in positive if 0 < value < 1] if signed else []
    yield from sorted(negative + positive)
