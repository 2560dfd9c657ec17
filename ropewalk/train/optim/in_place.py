"""What a rule may be on a GPU: a kernel that updates weights, moments and counters where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ropewalk.parallel.placement import Placement


class InPlace(Protocol):
    """A rule that needs no room for new moments."""

    def update(
        self,
        weights: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        *,
        lr: float,
        decay: float,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        """One step of weights that have a gradient; `states` hold their moments and the counter `step`. Gradients are
        to be divided by `grad_scale`."""


def fits(weight: Tensor, placement: Placement) -> bool:
    """Whether a kernel can take this part of a parameter."""
    alone = all(slicing.dim == 0 for slicing in placement.shards)
    return weight.is_cuda and weight.dtype == torch.float32 and weight.is_contiguous() and alone and weight.numel() > 0
