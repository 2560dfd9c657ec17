"""Which layers each stage of a pipeline holds, so that the slowest stage is as quick as it can be.

A pipeline goes at the pace of its slowest stage. The first stage also embeds and the last one computes the head and the
loss: with a large vocabulary that is worth several layers. Splits are exact, by dynamic programming over contiguous
runs of layers.
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
"""The layers of every stage."""


def layer_passes(spec: Spec) -> tuple[StageTimes, ...]:
    """FLOPs for a token, by pass: of the embedding, of each layer, and of the final norm, head and loss.

    Causal attention and matrix products only, as `Spec.flops_per_token` counts them; what they leave out (norms, the
    softmax of the loss) is less than a `width`-th of each part. Looking up is no product: the embedding costs its
    gradient's addition.
    """
    layers = []
    for number in range(spec.layers):
        numbers, features = spec.layer_sizes(number)
        # Queries with keys, or scores with values: one of them in the mean query. Backward each has two matmuls.
        scores = round(2 * features * spec.attended_pairs() / spec.sequence_length)
        linear = 2 * numbers
        layers.append(StageTimes(forward=linear + 2 * scores, input=linear + 4 * scores, weight=linear))
    head = 2 * spec.vocabulary * spec.width
    end = StageTimes(forward=head, input=head, weight=head)
    return (StageTimes(forward=0, input=0, weight=spec.width), *layers, end)


def layer_costs(spec: Spec) -> tuple[float, ...]:
    """The same, all passes together."""
    return tuple(passes.forward + passes.backward for passes in layer_passes(spec))


def split_layers(
    spec: Spec, stages: int, *, costs: Sequence[float] | None = None, slowness: Sequence[float] | None = None
) -> Split:
    """The layers of every stage: contiguous, at least one each, the costliest stage as cheap as possible.

    Among such splits the most even one is taken, and of these the one with the fewest layers in the early stages, which
    hold the most microbatches under 1F1B. `costs` are those of the embedding, each layer, and the end (not given:
    `layer_costs`); `slowness` says how many times as long a stage takes for the same work.
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
    """A better split for the measured `seconds` of every stage; the same one where less than a share `gain` is won.

    A stage that takes longer than its FLOPs say, next to the others, is taken to run on a slower rank, and gets less to
    do. Moving layers moves their weights and optimizer state, so a small gain is not worth it.
    """
    costs = layer_costs(spec)
    slowness = [taken / cost for taken, cost in zip(seconds, stage_costs(costs, split), strict=True)]
    better = split_layers(spec, len(split), slowness=slowness)
    paces = zip(slowness, stage_costs(costs, better), strict=True)
    expected = max(slow * cost for slow, cost in paces)
    return better if expected <= (1 - gain) * max(seconds) else split


def stage_times(spec: Spec, split: Split) -> tuple[StageTimes, ...]:
    """The times of every stage for a simulation: its FLOPs for a token, at one of them a second."""
    passes = layer_passes(spec)
    by_pass = (
        stage_costs([part.forward for part in passes], split),
        stage_costs([part.input for part in passes], split),
        stage_costs([part.weight for part in passes], split),
    )
    return tuple(StageTimes(forward=f, input=i, weight=w) for f, i, w in zip(*by_pass, strict=True))


def stage_costs(costs: Sequence[float], split: Split) -> tuple[float, ...]:
    """What every stage costs, when the embedding, the layers and the end cost `costs`."""
    cost = _Cost(costs)
    return tuple(cost(layers[0], layers[-1] + 1) for layers in split)


class _Cost:
    """What a run of layers costs as a stage: with the embedding at the front, with the head at the end."""

    def __init__(self, costs: Sequence[float]) -> None:
        self.layers = len(costs) - 2
        self._before = list(accumulate(costs, initial=0))

    def __call__(self, start: int, end: int) -> float:
        first = 0 if start == 0 else start + 1
        last = end + 2 if end == self.layers else end + 1
        return self._before[last] - self._before[first]


def _most_even(costs: Sequence[float], slowness: Sequence[float]) -> list[int]:
    """Where each stage begins, and where the last one ends."""
    cost, stages = _Cost(costs), len(slowness)

    def ends(stage: int, start: int) -> range:
        """Where stage `stage` may end when it begins at `start`: each stage after it needs a layer."""
        left = stages - stage - 1
        return range(start + 1, cost.layers - left + 1) if left else range(cost.layers, cost.layers + 1)

    @cache
    def slowest(stage: int, start: int) -> float:
        """The time of the slowest of the stages from `stage` on, at its least."""
        return min(
            max(slowness[stage] * cost(start, end), slowest(stage + 1, end) if stage + 1 < stages else 0)
            for end in ends(stage, start)
        )

    limit = slowest(0, 0)

    @cache
    def unevenness(stage: int, start: int) -> tuple[float, int]:
        """The least sum of squared times of the stages from `stage` on, none above `limit`, and where `stage` ends."""
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
