"""Parameters -> optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ropewalk.model.spec import Spec

from .config import Optimizer, OptimizerKind
from .optimizers import adafactor, adamw, lamb, muon
from .optimizers.groups import Parameters

KINDS: dict[OptimizerKind, Callable[[Parameters, Optimizer, Spec | None], torch.optim.Optimizer]] = {
    "adamw": adamw.make,
    "adafactor": adafactor.make,
    "lamb": lamb.make,
    "muon": muon.make,
}


def make_optimizer(parameters: Parameters, settings: Optimizer, *, spec: Spec | None = None) -> torch.optim.Optimizer:
    """The optimizer of the settings; the learning rate is set by each step. Muon needs the model's `spec`."""
    return KINDS[settings.kind](parameters, settings, spec)
