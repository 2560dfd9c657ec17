"""A user's norm: `model.norm = "norms:NORM"` in a recipe beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from ropewalk.config.schema import Range
from ropewalk.model.activations import Tape, TracedTensor
from ropewalk.model.components import NormKind, rms_saved


@dataclass(frozen=True, kw_only=True)
class Length:
    """Settings of the norm."""

    epsilon: Annotated[float, Range(above=0)] = 1e-6
    """Added to the length."""


class LengthNorm(nn.Module):
    """Length 1, times a scale."""

    def __init__(self, width: int, settings: Length) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = settings.epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + self.epsilon) * self.weight


def saved(tape: Tape, x: TracedTensor, name: str) -> TracedTensor:
    """As RMSNorm in plain operations, and the sum of length and epsilon."""
    out = rms_saved(tape, x, name)
    if x.gradient:
        tape.save(tape.numbers(tape.stream_tokens))
    return out


NORM = NormKind(target=LengthNorm, settings=Length, saved=saved, doc="Length 1.")
