"""AdamW with moments in eight bits for the matrices inside blocks (Dettmers et al. 2022): 2 bytes a weight, not 8.

Moments are widened, updated and narrowed again in every step; the weights take the step of the wide ones. What is coded
is the mean of gradients and the *root* of the mean of squares: a code that reaches down to 10^-7 of the largest number
of a row would otherwise lose the squares of all gradients below 10^-3.5 of the largest, whose means it keeps.

Embedding, head, positions, norms and biases keep moments in float32: the first for stability, as the paper finds
(section 2.3), the last because they are small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.model.spec import Spec

from .adamw import Adam, adam
from .codes import decode, encode, zero_code
from .fused import FusedAdam, FusedAdam8
from .groups import Parameters, Placements, by_parameter, decay_groups
from .guarded import Guarded, Moments, Update
from .table import AdamSettings, is_hidden
from .whole import Largest


def make(
    parameters: Parameters, settings: AdamSettings, spec: Spec | None, placements: Placements
) -> torch.optim.Optimizer:
    """Eight bits for the matrices inside blocks, AdamW with float32 moments for the rest."""
    rule = adam(settings)
    hidden = {name: p for name, p in parameters.items() if is_hidden(name, p.shape)}
    rest = {name: p for name, p in parameters.items() if not is_hidden(name, p.shape)}
    groups = decay_groups(hidden, settings.weight_decay, rule=Adam8(adam=rule), in_place=FusedAdam8(adam=rule))
    groups += decay_groups(rest, settings.weight_decay, rule=rule, in_place=FusedAdam(adam=rule))
    return Guarded(groups, by_parameter(parameters, placements))


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam8:
    """The rule in plain PyTorch, which says what is right; fused.py has it as a kernel."""

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
