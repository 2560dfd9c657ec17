"""Detects vanishing or exploding layers from the statistics of one step. No torch.

Blocks have the same shape, so they are compared with each other, causes before effects:

1. The residual stream, in forward order: the first output that is not finite, or a factor of `FACTOR` larger or smaller
   than the previous block's output (for the first block: the embedding's).
2. Outputs of attention and mlp: a factor of `FACTOR` from the median over blocks.
3. The first gradient in backward order that is not finite.
4. The gradient norm of a block, then of its attention and mlp: a factor of `FACTOR` from the median over blocks.

Medians need at least three blocks, so that one outlier does not move them.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FACTOR = 1000.0
"""Measured on decoders of 24 blocks (docs/log.md, 2026-11-15). In 11 healthy runs, gradients are within 320 times the
median, outputs within 200, the stream within 40. In six failing post-LN runs, gradients are 2000 to 100 000 times off;
without norms and with Glorot initialization, outputs are 1600 times off at step 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFigures:
    """Statistics of one layer, or part of a block, in one step; None where not measured."""

    name: str
    gradient: float | None
    """Norm of the gradient of its trained parameters, before clipping."""
    weight: float | None
    """Norm of these parameters before the update."""
    update: float | None
    """Norm of the update."""
    activation: float | None
    """Root mean square of its output in the first microbatch."""

    @property
    def update_ratio(self) -> float | None:
        """Update norm / weight norm; None for a zero weight."""
        return self.update / self.weight if self.update is not None and self.weight else None


FigureName = Literal["activation", "gradient"]
What = Literal["vanishes", "explodes", "is not finite"]
REMEDIES: dict[What, str] = {
    "vanishes": (
        "lower `train.schedule.peak_lr`; with `model.norm_position=post` start by `model.init=lipschitz` or `ds-init`, "
        "without norms by `t-fixup`; when it is one layer alone, look at the weights it started from"
    ),
    "explodes": (
        "lower `train.schedule.peak_lr` or lengthen `train.schedule.warmup_steps`; in attention set "
        "`model.qk_norm=true`; when it is one layer alone, look at the weights it started from"
    ),
    "is not finite": "lower `train.schedule.peak_lr`, or use `train.precision=fp32`; `[train.guard]` says what is done",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Symptom:
    """A layer that vanishes, explodes or is not finite."""

    layer: str
    figure: FigureName
    what: What
    value: float
    usual: float | None = None
    beside: str = ""
    """Describes `usual`."""
    others: int = 0
    """Number of other layers with the same, smaller deviation."""

    def __str__(self) -> str:
        more = f" (and {self.others} more)" if self.others else ""
        beside = "" if self.usual is None else f", {self.beside} {self.usual:.2g}"
        return f"{self.layer}{more}: the {self.figure} {self.what}: {self.value:.2g}{beside}; {REMEDIES[self.what]}"

    def same_trouble(self, other: Symptom | None) -> bool:
        """Whether `other` already reports the same figure and problem of the same block."""
        return other is not None and self._trouble() == other._trouble()

    def _trouble(self) -> tuple[str, str, list[str]]:
        return self.figure, self.what, self.layer.split(".")[:2]


def find_symptom(layers: Sequence[LayerFigures], *, scaled_loss: bool = False) -> Symptom | None:
    """The symptom closest to the cause; None if healthy. With loss scaling (fp16), overflowing gradients are expected
    and ignored."""
    kinds = [
        [layer for layer in layers if re.fullmatch(pattern, layer.name)]
        for pattern in (r"blocks\.\d+", r"blocks\.\d+\.attention", r"blocks\.\d+\.mlp")
    ]
    outputs = _beside_medians("activation", kinds[1:])
    return _in_stream(layers) or outputs or _broken_gradient(layers, scaled_loss) or _beside_medians("gradient", kinds)


def _in_stream(layers: Sequence[LayerFigures]) -> Symptom | None:
    before = None
    for layer in layers:
        value = layer.activation
        if value is None or layer.name.count(".") > 1:
            continue
        if not math.isfinite(value):
            # If part of a block is not finite, that part is named.
            inside = [
                one.name for one in layers if one.name.startswith(f"{layer.name}.") and not _finite(one.activation)
            ]
            return Symptom(layer=[*inside, layer.name][0], figure="activation", what="is not finite", value=value)
        # The final norm rescales the stream by design.
        if before and layer.name != "norm" and _distance(value, before) > math.log(FACTOR):
            return _unusual(layer.name, "activation", value, before, "its input has")
        before = value
    return None


def _broken_gradient(layers: Sequence[LayerFigures], scaled_loss: bool) -> Symptom | None:
    broken = [(layer.name, layer.gradient) for layer in layers if not _finite(layer.gradient)]
    if not broken or scaled_loss:
        return None
    name, value = broken[-1]
    assert value is not None
    return Symptom(layer=name, figure="gradient", what="is not finite", value=value)


def _beside_medians(figure: FigureName, kinds: Sequence[Sequence[LayerFigures]]) -> Symptom | None:
    """The layer farthest from its kind's median, for the first kind with an outlier. A median of 0 (projections
    initialized to 0) is skipped."""
    for kind in kinds:
        found = [(layer.name, layer.activation if figure == "activation" else layer.gradient) for layer in kind]
        values = {name: value for name, value in found if value is not None and math.isfinite(value)}
        median = statistics.median(values.values()) if len(values) >= 3 else 0.0
        far = [name for name in values if median and _distance(values[name], median) > math.log(FACTOR)]
        if far:
            name = max(far, key=lambda name: _distance(values[name], median))
            return _unusual(name, figure, values[name], median, "the median of all is", others=len(far) - 1)
    return None


def _distance(value: float, usual: float) -> float:
    """Absolute logarithm of the ratio of two magnitudes."""
    return abs(math.log(value / usual)) if value else math.inf


def _unusual(layer: str, figure: FigureName, value: float, usual: float, beside: str, *, others: int = 0) -> Symptom:
    what: What = "vanishes" if value < usual else "explodes"
    return Symptom(layer=layer, figure=figure, what=what, value=value, usual=usual, beside=beside, others=others)


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)
