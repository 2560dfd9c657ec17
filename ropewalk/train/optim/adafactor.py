"""Adafactor (Shazeer and Stern 2018): factors the second moment of a matrix into row and column means."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.model.spec import Spec

from .rule import Guarded, Moments, Parameters, Placements, Update, by_parameter, decay_groups
from .sharded import Mean
from .table import AdafactorSettings

DECAY_POWER = 0.8
"""Section 7: the second moment decays by 1 - step^-0.8, which makes bias correction unnecessary."""
SMALLEST = 1e-30
"""Algorithm 4: epsilon 1, added to squared gradients."""
LARGEST_RMS = 1.0
"""Section 6: d, the maximum root mean square of an update; larger ones are scaled down."""
SMALLEST_RMS = 1e-3
"""Algorithm 4: epsilon 2, the lower bound of a parameter's root mean square."""


def make(
    parameters: Parameters, settings: AdafactorSettings, spec: Spec | None, placements: Placements
) -> torch.optim.Optimizer:
    """Adafactor on every parameter."""
    rule = Adafactor(relative=settings.relative_step)
    return Guarded(decay_groups(parameters, settings.weight_decay, rule=rule), by_parameter(parameters, placements))


@dataclass(frozen=True, slots=True)
class Adafactor:
    """Algorithms 4 (matrices) and 5 (vectors), without first moment. The moments have torch's names."""

    relative: bool = False
    """Whether alpha is max(epsilon 2, RMS(X)) rho with rho = min(lr, 1 / sqrt(step)), as in section 8; otherwise it is
    the learning rate. Weight decay scales with the learning rate in both cases, as in torch."""

    def begin(self, weight: Tensor) -> Moments:
        if weight.dim() < 2:
            return {"variance": torch.zeros_like(weight)}
        rows, columns = weight.shape
        return {"row_var": weight.new_zeros(rows, 1), "col_var": weight.new_zeros(1, columns)}

    def update(
        self, weight: Tensor, gradient: Tensor, moments: Moments, *, step: Tensor, lr: float, decay: float
    ) -> Update:
        recent = (step**-DECAY_POWER).to(gradient.dtype)
        square = gradient * gradient + SMALLEST
        inner = tuple(range(1, weight.dim()))
        if len(inner) < 2:
            moments = {"variance": _mixed(moments["variance"], square, recent)}
            update = gradient * moments["variance"].rsqrt()
        else:
            of_rows, of_columns = yield [Mean(square, (2,)), Mean(square, (1,))]
            rows = _mixed(moments["row_var"], of_rows, recent)
            columns = _mixed(moments["col_var"], of_columns, recent)
            moments = {"row_var": rows, "col_var": columns}
            # The estimate is rows x columns / mean(rows). Roots first: 1e-30 squared underflows in float32.
            (of_all,) = yield [Mean(rows, (1,))]
            update = gradient * (rows / of_all).rsqrt() * columns.rsqrt()
        asked = [Mean(update.square(), inner), *([Mean(weight.square(), inner)] if self.relative else [])]
        mean_square, *of_weight = yield asked
        update = update / (mean_square.sqrt() / LARGEST_RMS).clamp(min=1.0)
        alpha = (step**-0.5).clamp(max=lr).to(update.dtype) if self.relative else lr
        for each in of_weight:
            alpha = alpha * each.sqrt().clamp(min=SMALLEST_RMS)
        return weight * (1 - lr * decay) - alpha * update, moments


def _mixed(old: Tensor, new: Tensor, share: Tensor) -> Tensor:
    """(1 - share) old + share new; at the first step share is 1 and `old` is discarded."""
    return old + share * (new - old)
