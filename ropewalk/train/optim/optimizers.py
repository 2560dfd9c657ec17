"""Parameters -> optimizer."""

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
    """The optimizer of the settings; each step sets the learning rate. Muon needs the model's `spec`.

    `placements` says of which parameters this rank holds a part. The update is that of the whole parameter, and all
    ranks that share it must step together. With `exact`, AdamW gives the same bits for every placement, and
    `adamw-8bit` always does; the others add up numbers of several ranks, in an order that depends on these.
    """
    if exact and settings.kind == "adamw":
        return make_exact(parameters, settings.own_settings(), placements or {})
    own, target = settings.own_settings(), OPTIMIZERS[settings.kind].load()
    if isinstance(target, type):  # a user's rule, which is its own settings or is made with them
        rule = own if isinstance(own, target) else target(own)
        groups = decay_groups(parameters, settings.weight_decay, rule=rule)
        return Guarded(groups, by_parameter(parameters, placements or {}))
    made: torch.optim.Optimizer = target(parameters, own, spec, placements or {})
    return made
