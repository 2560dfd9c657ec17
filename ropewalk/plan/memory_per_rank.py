"""Forecasts memory per rank of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from math import prod

from ropewalk.model.activations import WHOLE, Division, saved_bytes
from ropewalk.model.spec import Spec

from .forecast import PURE, Memory, counted, products_of
from .plan import Plan
from .schedules import Shape, peak_live


def of_rank(whole: Memory, plan: Plan, spec: Spec, *, trained: Collection[str] | None = None) -> Memory:
    """Memory of the fullest rank; `whole` is the forecast for one device with the plan's `recompute`.

    Weights, gradients and moments follow Rajbhandari et al. 2020, table 1, with the tensor and pipeline degrees and the
    parameters that ZeRO-3 gathers; small parameters replicated on tensor ranks are counted as split. Pipelines keep
    whole gradients until the last microbatch, whatever `zero` is. Activations are the exact count per microbatch, times
    the microbatches that the fullest pipeline rank holds.
    """
    split = plan.tensor * plan.pipeline
    moments = split * (plan.shard if plan.zero >= 1 else 1)
    gradients = split * (plan.shard if plan.zero >= 2 and plan.pipeline == 1 else 1)
    weights = split * (plan.shard if plan.zero >= 3 else 1)
    narrow, pure = products_of(plan.precision), plan.precision in PURE
    rows = plan.microbatch_size
    division = Division(
        tensor=plan.tensor,
        sequence=plan.sequence,
        context=plan.context,
        partition=plan.partition_activations,
    )
    alone, kept = (
        saved_bytes(
            spec,
            rows=rows,
            precision=narrow,
            trained=trained,
            recompute=counted(plan.recompute),
            division=among,
            activations=plan.saved_activations,
            device=plan.device,
            pure=pure,
        )
        for among in (WHOLE, division)
    )
    activations = round(whole.activations * kept / alone) // plan.pipeline
    if plan.pipeline > 1:
        shape = Shape(ranks=plan.pipeline, microbatches=max(1, plan.microbatches), chunks=plan.chunks)
        activations = activations * peak_live(plan.schedule, rank=0, shape=shape) // plan.chunks
    return replace(
        whole,
        weights=-(-whole.weights // weights) + (_gathered(spec, plan) if plan.zero == 3 else 0),
        gradients=-(-whole.gradients // gradients),
        optimizer=-(-whole.optimizer // moments),
        activations=activations,
        workspace=-(-whole.workspace // (plan.tensor * plan.context)),
    )


def _gathered(spec: Spec, plan: Plan) -> int:
    """Bytes of gathered weights beside a rank's shards: two blocks (in use and prefetched) and all parameters outside
    blocks; in a pipeline the whole stage, for the duration of a step."""
    groups: Counter[str] = Counter()
    for name, shape in spec.shapes().items():
        in_block = name.startswith("blocks.")
        # As parallel/apply.py: the compute dtype.
        is_narrow = plan.precision in PURE or (plan.precision != "fp32" and in_block and len(shape) == 2)
        groups[name.split(".")[1] if in_block else ""] += (2 if is_narrow else 4) * prod(shape)
    if plan.pipeline > 1:
        return groups.total() // (plan.tensor * plan.pipeline)
    outside = groups.pop("")
    return (outside + sum(size for _, size in groups.most_common(2))) // plan.tensor
