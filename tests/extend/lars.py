"""A user's optimizer: `train.optimizer.kind = "lars:Lars"` in a recipe beside this file."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

import torch
from torch import Tensor

from ropewalk.config.schema import Range
from ropewalk.train.optim.sharded import Norm

Moments = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Lars:
    """Momentum with steps in proportion to each matrix (You, Gitman and Ginsburg 2017)."""

    momentum: Annotated[float, Range(least=0, below=1)] = 0.9
    """Decay of the mean of gradients."""
    trust: Annotated[float, Range(above=0)] = 1.0
    """Step of a matrix relative to its norm, at a learning rate of 1."""

    @staticmethod
    def state_bytes(name: str, shape: tuple[int, ...]) -> int:
        """One float32 number per weight."""
        return 4 * prod(shape)

    def begin(self, weight: Tensor) -> Moments:
        return {"momentum_buffer": torch.zeros_like(weight)}

    def update(
        self, weight: Tensor, gradient: Tensor, moments: Moments, *, step: Tensor, lr: float, decay: float
    ) -> Generator[Any, list[Tensor], tuple[Tensor, Moments]]:
        mean = torch.lerp(moments["momentum_buffer"], gradient, 1 - self.momentum)
        direction = mean + decay * weight
        if weight.dim() == 3:  # matrices, stacked; ranks may hold parts of them
            weights, directions = yield [Norm(weight), Norm(direction)]
            direction = direction * self.trust * weights / directions.clamp(min=1e-12)
        return weight - lr * direction, {"momentum_buffer": mean}
