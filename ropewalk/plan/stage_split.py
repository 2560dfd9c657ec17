"""Assigns layers to pipeline stages so that the slowest stage is as fast as possible.

The slowest stage sets the pace of a pipeline. The first stage also has the embedding, the last one the head and loss,
which cost as much as several layers with a large vocabulary. Exact, by dynamic programming over contiguous ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import TypeAlias

from ropewalk.base.errors import UserError
from ropewalk.model.spec import Spec

from .simulate import StageTimes

Split: TypeAlias = tuple[tuple[int, ...], ...]
"""Layers per stage."""


def layer_passes(spec: Spec) -> tuple[StageTimes, ...]:
    """FLOPs per token and pass: of the embedding, of each layer, and of the final norm, head and loss.

    Counts causal attention and matmuls only, as `Spec.flops_per_token`; the rest (norms, softmax of the loss) is less
    than 1/`width` of each part. An embedding lookup is no matmul: it costs the addition of its gradient.
    """
    layers = []
    for number in range(spec.layers):
        numbers, features = spec.layer_sizes(number)
        # Per query, one of q k^T and p v, at the mean causal length. Backward each has two matmuls.
        scores = round(2 * features * spec.attended_pairs() / spec.sequence_length)
        linear = 2 * numbers
        layers.append(StageTimes(forward=linear + 2 * scores, input=linear + 4 * scores, weight=linear))
    head = 2 * spec.vocabulary * spec.width
    end = StageTimes(forward=head, input=head, weight=head)
    return (StageTimes(forward=0, input=0, weight=spec.width), *layers, end)


def layer_costs(spec: Spec) -> tuple[float, ...]:
    """`layer_passes`, summed over passes."""
    return tuple(passes.forward + passes.backward for passes in layer_passes(spec))


def split_layers(
    spec: Spec, stages: int, *, costs: Sequence[float] | None = None, slowness: Sequence[float] | None = None
) -> Split:
    """Layers per stage: contiguous, at least one each, minimizing the cost of the costliest stage.

    Ties go to the most even split, then to the one with the fewest layers in early stages, which hold the most
    microbatches under 1F1B. `costs` are of the embedding, each layer, and the end (default: `layer_costs`); `slowness`
    is the relative time of each stage for equal work.
    """
    if stages > spec.layers:
        raise UserError(
            f"{stages} pipeline stages (`parallel.pipeline` times `parallel.chunks`) cannot share {spec.layers} "
            f"layers; take at most {spec.layers}, or set `model.layers` to {stages} or more"
        )
    costs = layer_costs(spec) if costs is None else costs
    slowness = [1] * stages if slowness is None else slowness
    assert len(costs) == spec.layers + 2, "costs are of the embedding, each layer, and the end"
    assert len(slowness) == stages, "a stage has one slowness"
    bounds = _most_even(costs, slowness)
    return tuple(tuple(range(start, end)) for start, end in pairwise(bounds))


def resplit(spec: Spec, split: Split, *, seconds: Sequence[float], gain: float = 0.05) -> Split:
    """A better split given measured `seconds` per stage; unchanged if the gain is below the fraction `gain`.

    A stage slower than its FLOPs predict, relative to the others, is taken to run on a slower rank, and gets fewer
    layers. Moving layers moves their weights and optimizer state, so small gains are not worth it.
    """
    costs = layer_costs(spec)
    slowness = [taken / cost for taken, cost in zip(seconds, stage_costs(costs, split), strict=True)]
    better = split_layers(spec, len(split), slowness=slowness)
    paces = zip(slowness, stage_costs(costs, better), strict=True)
    expected = max(slow * cost for slow, cost in paces)
    return better if expected <= (1 - gain) * max(seconds) else split


def stage_times(spec: Spec, split: Split) -> tuple[StageTimes, ...]:
    """Times per stage for a simulation: FLOPs per token at 1 FLOP/s."""
    passes = layer_passes(spec)
    by_pass = (
        stage_costs([part.forward for part in passes], split),
        stage_costs([part.input for part in passes], split),
        stage_costs([part.weight for part in passes], split),
    )
    return tuple(StageTimes(forward=f, input=i, weight=w) for f, i, w in zip(*by_pass, strict=True))


def stage_costs(costs: Sequence[float], split: Split) -> tuple[float, ...]:
    """Cost per stage; `costs` are of the embedding, each layer, and the end."""
    cost = _Cost(costs)
    return tuple(cost(layers[0], layers[-1] + 1) for layers in split)


class _Cost:
    """Cost of a contiguous range of layers as a stage, with the embedding at the front and the head at the end."""

    def __init__(self, costs: Sequence[float]) -> None:
        self.layers = len(costs) - 2
        self._before = list(accumulate(costs, initial=0))

    def __call__(self, start: int, end: int) -> float:
        first = 0 if start == 0 else start + 1
        last = end + 2 if end == self.layers else end + 1
        return self._before[last] - self._before[first]


def _most_even(costs: Sequence[float], slowness: Sequence[float]) -> list[int]:
    """Boundaries of the stages: each start, and the last end."""
    cost, stages = _Cost(costs), len(slowness)

    def ends(stage: int, start: int) -> range:
        """Possible ends of stage `stage` starting at `start`: each later stage needs a layer."""
        left = stages - stage - 1
        return range(start + 1, cost.layers - left + 1) if left else range(cost.layers, cost.layers + 1)

    @cache
    def slowest(stage: int, start: int) -> float:
        """Minimal time of the slowest stage from `stage` on."""
        return min(
            max(slowness[stage] * cost(start, end), slowest(stage + 1, end) if stage + 1 < stages else 0)
            for end in ends(stage, start)
        )

    limit = slowest(0, 0)

    @cache
    def unevenness(stage: int, start: int) -> tuple[float, int]:
        """Minimal sum of squared times of the stages from `stage` on, none above `limit`, and the end of `stage`."""
        found = (float("inf"), cost.layers)
        for end in ends(stage, start):
            time = slowness[stage] * cost(start, end)
            if time <= limit:
                after = unevenness(stage + 1, end)[0] if stage + 1 < stages else 0
                found = min(found, (time * time + after, end))
        return found

    bounds = [0]
    for stage in range(stages):
        bounds.append(unevenness(stage, bounds[-1])[1])
    return bounds
