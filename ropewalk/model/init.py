"""First values of the parameters, each from a random stream of its own name.

The stream depends on (seed, name) alone: a parameter starts with the same numbers whatever device it lies on, whatever
else the process owns, and in whatever order modules are made.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ropewalk.base.seeds import seed_for

from .spec import Spec

STD = 0.02
"""Standard deviation of GPT-2 (Radford et al. 2019)."""


def initialize(model: nn.Module, spec: Spec, *, seed: int) -> None:
    """Fills every parameter of `model` in place; a part of a model gets that part of the whole's values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, tuple(parameter.shape), spec, seed=seed))


def initial_value(name: str, shape: tuple[int, ...], spec: Spec, *, seed: int) -> Tensor:
    """The whole first value of one parameter, float32 on the CPU."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    # A tied head that a pipeline stage holds by itself starts as the embedding does.
    source = "embedding.weight" if name == "head.weight" and spec.tied else name
    generator = torch.Generator().manual_seed(seed_for(seed, "init", source))
    return torch.empty(shape).normal_(0.0, deviation(name, spec), generator=generator)


def deviation(name: str, spec: Spec) -> float:
    """Depth-scaled Gaussian of GPT-2: the matrices that write to the residual stream are smaller by sqrt(2 layers)."""
    writes_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
    return STD / (2 * spec.layers) ** 0.5 if writes_residual else STD
