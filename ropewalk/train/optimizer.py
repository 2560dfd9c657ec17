"""Parameters -> optimizer."""

from __future__ import annotations

import torch
from torch import nn

from .config import AdamW


def make_optimizer(parameters: dict[str, nn.Parameter], settings: AdamW) -> torch.optim.Optimizer:
    """AdamW in one fused kernel; the learning rate is set by each step.

    Matrices decay. Norms, biases and positions do not: decaying a scale towards zero has no meaning.
    """
    decayed = [p for name, p in parameters.items() if decays(name, p)]
    kept = [p for name, p in parameters.items() if not decays(name, p)]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies."""
    return parameter.dim() >= 2 and name != "positions.weight"
