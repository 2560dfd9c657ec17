"""LAMB (You et al. 2020, algorithm 2): scales Adam's direction to the norm of each weight matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.model.spec import Spec

from .adamw import Adam, adam
from .rule import Guarded, Moments, Parameters, Placements, Update, by_parameter, decay_groups
from .sharded import Norm
from .table import AdamSettings


def make(
    parameters: Parameters, settings: AdamSettings, spec: Spec | None, placements: Placements
) -> torch.optim.Optimizer:
    """LAMB on every parameter."""
    groups = decay_groups(parameters, settings.weight_decay, rule=Lamb(adam=adam(settings)))
    return Guarded(groups, by_parameter(parameters, placements))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lamb:
    """Adam's direction plus decay, times |weight| / |direction plus decay| for matrices.

    Vectors (norms, biases) use AdamW: a bias starts at 0, and a step proportional to its norm would keep it there. A
    matrix initialized to 0 has ratio 1 at its first step, where the paper's is undefined, and then grows slowly: LAMB
    does not suit zero initialization.
    """

    adam: Adam

    def begin(self, weight: Tensor) -> Moments:
        return self.adam.begin(weight)

    def update(
        self, weight: Tensor, gradient: Tensor, moments: Moments, *, step: Tensor, lr: float, decay: float
    ) -> Update:
        direction, moments = self.adam.direction(gradient, moments, step=step)
        direction = direction + decay * weight
        if weight.dim() < 3:
            return weight - lr * direction, moments
        here, there = yield [Norm(weight), Norm(direction)]
        ratio = torch.where((here > 0) & (there > 0), here / there, 1.0)
        return weight - lr * ratio * direction, moments
