"""Parameters -> optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ropewalk.model.spec import Spec

from ..config import Optimizer, OptimizerKind
from . import adafactor, adamw, adamw_8bit, lamb, muon
from .groups import Parameters, Placements

KINDS: dict[OptimizerKind, Callable[[Parameters, Optimizer, Spec | None, Placements], torch.optim.Optimizer]] = {
    "adamw": adamw.make,
    "adamw-8bit": adamw_8bit.make,
    "adafactor": adafactor.make,
    "lamb": lamb.make,
    "muon": muon.make,
}


def make_optimizer(
    parameters: Parameters,
    settings: Optimizer,
    *,
    spec: Spec | None = None,
    placements: Placements | None = None,
    exact: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer of the settings; the learning rate is set by each step. Muon needs the model's `spec`.

    `cuts` says of which parameters this rank holds a part. The update is that of the whole parameter, and all ranks
    that share it must step together. With `exact`, AdamW gives the same bits however parameters are cut, and
    `adamw-8bit` always does; the others add up numbers of several ranks, in an order that depends on these.
    """
    if exact and settings.kind == "adamw":
        return adamw.make_exact(parameters, settings, placements or {})
    return KINDS[settings.kind](parameters, settings, spec, placements or {})
