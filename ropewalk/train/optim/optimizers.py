"""Creates the optimizer of a phase."""

from __future__ import annotations

import torch

from ropewalk.model.spec import Spec

from ..config import Optimizer
from .adamw import make_exact
from .rule import Guarded, Parameters, Placements, by_parameter, decay_groups
from .table import OPTIMIZERS


def make_optimizer(
    parameters: Parameters,
    settings: Optimizer,
    *,
    spec: Spec | None = None,
    placements: Placements | None = None,
    exact: bool = False,
) -> torch.optim.Optimizer:
    """The configured optimizer; the learning rate is set every step. Muon needs the model's `spec`.

    `placements`: sharded parameters. Updates equal those of whole parameters, and all ranks that share a parameter
    must step together. `exact` makes AdamW bitwise independent of placement; `adamw-8bit` always is. The others sum
    over ranks, so rounding depends on the placement.
    """
    if exact and settings.kind == "adamw":
        return make_exact(parameters, settings.own_settings(), placements or {})
    own, target = settings.own_settings(), OPTIMIZERS[settings.kind].load()
    if isinstance(target, type):  # a user's rule: a dataclass of its own settings, or constructed with them
        rule = own if isinstance(own, target) else target(own)
        groups = decay_groups(parameters, settings.weight_decay, rule=rule)
        return Guarded(groups, by_parameter(parameters, placements or {}))
    made: torch.optim.Optimizer = target(parameters, own, spec, placements or {})
    return made
