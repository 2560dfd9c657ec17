"""AdamW (Loshchilov and Hutter 2019, algorithm 2): torch's fused kernel, and the same update as a `Rule`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.model.spec import Spec

from .rule import Guarded, Moments, Parameters, Placements, Update, by_parameter, decay_groups
from .table import AdamSettings, MuonSettings


def make(
    parameters: Parameters, settings: AdamSettings, spec: Spec | None, placements: Placements
) -> torch.optim.Optimizer:
    """AdamW in one fused kernel. The update is elementwise: sharding changes at most the last bit of a few numbers."""
    if any(p.grad_dtype != p.dtype for p in parameters.values()):
        return _from_narrow(parameters, settings, placements)
    return torch.optim.AdamW(
        decay_groups(parameters, settings.weight_decay),
        lr=0.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )


def _from_narrow(parameters: Parameters, settings: AdamSettings, placements: Placements) -> torch.optim.Optimizer:
    """AdamW for gradients narrower than the weights."""
    from .fused import FusedAdam  # here: fused.py imports this module

    rule = adam(settings)
    groups = decay_groups(parameters, settings.weight_decay, rule=rule, in_place=FusedAdam(adam=rule))
    return Guarded(groups, by_parameter(parameters, placements))


def make_exact(parameters: Parameters, settings: AdamSettings, placements: Placements) -> torch.optim.Optimizer:
    """AdamW whose bits do not depend on an element's position in its tensor. The fused CPU kernel rounds the remainder
    of a vectorized loop differently."""
    groups = decay_groups(parameters, settings.weight_decay, rule=adam(settings))
    return Guarded(groups, by_parameter(parameters, placements))


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Adam's direction with decoupled decay; the moments have torch's names."""

    beta1: float
    beta2: float
    epsilon: float

    def begin(self, weight: Tensor) -> Moments:
        return {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def update(
        self, weight: Tensor, gradient: Tensor, moments: Moments, *, step: Tensor, lr: float, decay: float
    ) -> Update:
        direction, moments = self.direction(gradient, moments, step=step)
        yield ()  # elementwise: no request
        return weight * (1 - lr * decay) - lr * direction, moments

    def direction(self, gradient: Tensor, moments: Moments, *, step: Tensor) -> tuple[Tensor, Moments]:
        """The bias-corrected mean over the root mean square, and the new moments."""
        mean = torch.lerp(moments["exp_avg"], gradient, 1 - self.beta1)
        square = torch.lerp(moments["exp_avg_sq"], gradient * gradient, 1 - self.beta2)
        # Powers in float64: in float32, 1 - 0.95 would lose a digit.
        starts = [(1 - beta**step).to(gradient.dtype) for beta in (self.beta1, self.beta2)]
        direction = mean / starts[0] / ((square / starts[1]).sqrt() + self.epsilon)
        return direction, {"exp_avg": mean, "exp_avg_sq": square}


def adam(settings: AdamSettings | MuonSettings) -> Adam:
    """The rule with the betas and epsilon of the settings."""
    return Adam(beta1=settings.beta1, beta2=settings.beta2, epsilon=settings.epsilon)
