"""Plans for evaluation and generation: a training plan without its training-only options. No torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ropewalk.base.errors import UserError
from ropewalk.model.spec import Spec

from .layout import problems
from .plan import Plan
from .schedules import PIPELINE_SCHEDULES
from .stage_split import split_layers


def inference(plan: Plan, *, length: int) -> Plan:
    """`plan` for scoring and generating sequences of `length` tokens; every rank keeps its shards of the model.

    `batch_size` occupies every rank once: one microbatch per data-parallel rank and pipeline stage. `sequence` is off,
    because it splits positions and generation has one at a time.
    """
    rows = max(1, plan.microbatch_size * (plan.sequence_length or length) // length)
    return dataclasses.replace(
        plan,
        batch_size=rows * plan.data * plan.pipeline,
        microbatch_size=rows,
        sequence_length=None,
        compile=False,
        sequence=False,
        schedule="1f1b" if PIPELINE_SCHEDULES[plan.schedule].splits_backward else plan.schedule,
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
    trained: Plan | None,
    spec: Spec,
    *,
    processes: int,
    device: Literal["cpu", "cuda"],
    precision: Literal["fp32", "bf16"] = "fp32",
    where: str = "",
) -> Plan:
    """The plan for generation in `processes` processes with a model trained under `trained` (None: unknown). In
    float32 the tokens are those of a single process.

    That plan if it is for this many processes. Otherwise its tensor and pipeline degrees, with the weights sharded over
    the remaining ranks (ZeRO-3); UserError if the number is not a multiple of these degrees. `where` names the run.
    """
    known = trained or Plan(device=device, precision="fp32", batch_size=1, microbatch_size=1)
    if known.world != processes:
        cut = known.tensor * known.pipeline
        if processes % cut:
            raise UserError(
                f"{processes} processes cannot share this model: {where} splits it by tensor {known.tensor} x pipeline "
                f"{known.pipeline}; start {known.world} as in training, another multiple of {cut}, or one"
            )
        shard = processes // cut
        known = dataclasses.replace(known, replicate=1, context=1, shard=shard, zero=3 if shard > 1 else 0)
    known = dataclasses.replace(known, device=device, precision=precision, microbatch_size=1, sequence_length=None)
    plan = inference(known, length=spec.sequence_length)
    if plan.pipeline > 1 and sum(map(len, plan.stages)) != spec.layers:
        plan = dataclasses.replace(plan, stages=split_layers(spec, plan.pipeline * plan.chunks))
    if plan.zero != 3:
        plan = dataclasses.replace(plan, offload=())
    wrong = list(problems(plan, spec))
    if wrong:
        raise UserError("\n".join(wrong))
    return plan
