"""Which layer vanishes or explodes, from the figures of one step. Plain numbers, no torch.

Blocks have the same shape, so they are judged by each other. In the order in which causes come before effects:

1. The stream between blocks, on its way up: the first output that is not finite, or `FACTOR` times larger or smaller
   than the output of the block before (of the embedding before the first).
2. What attention and mlp add to the stream: `FACTOR` times from the median of the same part of all blocks.
3. A gradient that is not finite: the first on its way down.
4. The gradient of a block, then of its attention and mlp: `FACTOR` times from the median of all blocks.

A median is taken of three blocks or more: it does not follow one of them.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FACTOR = 1000.0
"""Measured on decoders of 24 blocks (docs/log.md, 2026-11-15). In 11 runs that train, a gradient is at most 320 times
from the median, an output 200 times, a stream 40 times. In six post-LN runs that do not, gradients are 2000 to 100 000
times from it; without norms and with Glorot's start, outputs are 1600 times from it at the first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFigures:
    """One layer or part of a block in one step; None where there is nothing to measure."""

    name: str
    gradient: float | None
    """Length of the gradient of its trained parameters, before clipping."""
    weight: float | None
    """Length of these parameters before the update."""
    update: float | None
    """Length of their change."""
    activation: float | None
    """Root mean square of its output for the first microbatch."""

    @property
    def update_ratio(self) -> float | None:
        """The update beside the weight; None for a weight of 0."""
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
    """A layer in trouble."""

    layer: str
    figure: FigureName
    what: What
    value: float
    usual: float | None = None
    beside: str = ""
    """What `usual` is."""
    others: int = 0
    """Layers with the same trouble, less far off."""

    def __str__(self) -> str:
        more = f" (and {self.others} more)" if self.others else ""
        beside = "" if self.usual is None else f", {self.beside} {self.usual:.2g}"
        return f"{self.layer}{more}: the {self.figure} {self.what}: {self.value:.2g}{beside}; {REMEDIES[self.what]}"

    def same_trouble(self, other: Symptom | None) -> bool:
        """Whether it tells the reader nothing that `other` did not: the same of the same block."""
        return other is not None and self._trouble() == other._trouble()

    def _trouble(self) -> tuple[str, str, list[str]]:
        return self.figure, self.what, self.layer.split(".")[:2]


def find_symptom(layers: Sequence[LayerFigures], *, scaled_loss: bool = False) -> Symptom | None:
    """The symptom nearest to the cause, None in health. With a scaled loss (fp16) a gradient that overflows says
    nothing about a layer."""
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
            # A block is broken because its part is.
            inside = [
                one.name for one in layers if one.name.startswith(f"{layer.name}.") and not _finite(one.activation)
            ]
            return Symptom(layer=[*inside, layer.name][0], figure="activation", what="is not finite", value=value)
        # The last norm brings the stream to another size on purpose.
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
    """The layer farthest from the median of its kind, of the first kind in which one is far enough. Beside a median of
    0, as of blocks whose projections start at 0, nothing is far."""
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
    """How far apart two sizes are, as the logarithm of their ratio."""
    return abs(math.log(value / usual)) if value else math.inf


def _unusual(layer: str, figure: FigureName, value: float, usual: float, beside: str, *, others: int = 0) -> Symptom:
    what: What = "vanishes" if value < usual else "explodes"
    return Symptom(layer=layer, figure=figure, what=what, value=value, usual=usual, beside=beside, others=others)


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)
