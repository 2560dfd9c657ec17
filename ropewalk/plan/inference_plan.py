"""Plans for evaluation and generation: the layout of a training plan without what only training needs. No torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ropewalk.base.errors import UserError
from ropewalk.model.spec import Spec

from .layout import problems
from .plan import Plan
from .stage_split import split_layers


def inference(plan: Plan, *, length: int) -> Plan:
    """`plan` for scoring and generating rows of `length` tokens: every rank holds the parts that it trains.

    `batch_size` is what fills all ranks once: a microbatch for each data rank, and each stage of its pipeline.
    `sequence` is left out too: it shares the positions of a row, and generation brings one at a time.
    """
    rows = max(1, plan.microbatch_size * (plan.sequence_length or length) // length)
    return dataclasses.replace(
        plan,
        batch_size=rows * plan.data * plan.pipeline,
        microbatch_size=rows,
        sequence_length=None,
        compile=False,
        sequence=False,
        schedule="1f1b" if plan.schedule == "zero-bubble" else plan.schedule,
        recompute="none",
        recompute_bytes=None,
        saved_activations="whole",
        partition_activations=False,
        offload=tuple(what for what in plan.offload if what == "parameters"),
        exact=False,
        balance=False,
        devices=1,
        gradient_compression="none",
    )


def generation(
    trained: Plan | None, spec: Spec, *, processes: int, device: Literal["cpu", "cuda"], where: str = ""
) -> Plan:
    """The plan with which so many `processes` generate with a model that `trained` was made for (None: not known).

    That plan, if it is for as many. Otherwise its tensor and pipeline degrees, and all other ranks share the weights
    (ZeRO-3); UserError where the number is no multiple of these degrees. `where` names the run.
    """
    known = trained or Plan(device=device, precision="fp32", batch_size=1, microbatch_size=1)
    if known.world != processes:
        cut = known.tensor * known.pipeline
        if processes % cut:
            raise UserError(
                f"{processes} processes cannot share this model: {where} cuts it by tensor {known.tensor} x pipeline "
                f"{known.pipeline}; start {known.world} as in training, another multiple of {cut}, or one"
            )
        shard = processes // cut
        known = dataclasses.replace(known, replicate=1, context=1, shard=shard, zero=3 if shard > 1 else 0)
    # In float32, whatever the run trained in: the same tokens as one process draws.
    known = dataclasses.replace(known, device=device, precision="fp32", microbatch_size=1, sequence_length=None)
    plan = inference(known, length=spec.sequence_length)
    if plan.pipeline > 1 and sum(map(len, plan.stages)) != spec.layers:
        plan = dataclasses.replace(plan, stages=split_layers(spec, plan.pipeline * plan.chunks))
    if plan.zero != 3:
        plan = dataclasses.replace(plan, offload=())
    wrong = list(problems(plan, spec))
    if wrong:
        raise UserError("\n".join(wrong))
    return plan
