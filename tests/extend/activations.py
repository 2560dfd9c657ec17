"""A user's activation: `model.mlp = "activations:Swish"` in a recipe beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from ropewalk.config.schema import Range


@dataclass(frozen=True, kw_only=True)
class Swish:
    """x sigmoid(beta x), as a gate (Ramachandran et al. 2017)."""

    beta: Annotated[float, Range(above=0)] = 1.0
    """Slope of the sigmoid."""
    gated: ClassVar[bool] = True
    saved_tensors: ClassVar[int] = 2
    """Input and sigmoid."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)
