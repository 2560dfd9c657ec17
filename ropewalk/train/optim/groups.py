"""Which parameters decay, and which are cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ropewalk.parallel.placement import Placement

Parameters = dict[str, nn.Parameter]
Placements = Mapping[str, Placement]
"""How parameters are cut, by name; those not named are whole."""
Group = dict[str, Any]


def decay_groups(parameters: Parameters, weight_decay: float, **shared: Any) -> list[Group]:
    """`parameters` in the groups of torch: those that decay, those that do not; each also says what `shared` says.

    Matrices decay. Norms, biases and positions do not: decaying a scale towards zero has no meaning.
    """
    decayed = [p for name, p in parameters.items() if decays(name, p)]
    kept = [p for name, p in parameters.items() if not decays(name, p)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [{**group, **shared} for group in groups if group["params"]]


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies."""
    return parameter.dim() >= 2 and name != "positions.weight"


def by_parameter(parameters: Parameters, placements: Placements) -> dict[nn.Parameter, Placement]:
    """The cuts of those parameters that are cut."""
    return {parameter: placements[name] for name, parameter in parameters.items() if name in placements}
