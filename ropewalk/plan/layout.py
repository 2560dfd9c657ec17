"""Turns `[parallel]` and a number of processes into the degrees of a plan; reports all conflicts at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ropewalk.base.errors import UserError
from ropewalk.model.components import MODELS
from ropewalk.model.sharding import splits
from ropewalk.model.spec import Spec

from .config import Parallel
from .forecast import PURE
from .plan import Plan
from .schedules import PIPELINE_SCHEDULES, Shape, check_shape
from .stage_split import split_layers


def degrees(parallel: Parallel, processes: int | None) -> dict[str, int]:
    """The five degrees for `processes` (None: their product)."""
    fixed = parallel.shard * parallel.context * parallel.tensor * parallel.pipeline
    named = (
        f"shard {parallel.shard} x context {parallel.context} x tensor {parallel.tensor} x pipeline {parallel.pipeline}"
    )
    if processes is None:
        processes = fixed * (parallel.replicate or 1)
    replicate = parallel.replicate or processes // fixed
    if replicate * fixed != processes:
        wanted = f"replicate {parallel.replicate} x {named}" if parallel.replicate else named
        total = fixed * (parallel.replicate or 1)
        raise UserError(
            f"{processes} processes do not fit `[parallel]`: {wanted} = {total}; start "
            f"{'' if parallel.replicate else 'a multiple of '}{total}, or change a degree"
        )
    return {
        "pipeline": parallel.pipeline,
        "replicate": replicate,
        "shard": parallel.shard,
        "context": parallel.context,
        "tensor": parallel.tensor,
    }


def laid_out(plan: Plan, parallel: Parallel, spec: Spec, *, processes: int | None) -> Plan:
    """`plan` with the degrees and options of `parallel`; UserError lists all problems."""
    sides = degrees(parallel, processes)
    chunks = parallel.chunks or (
        2 if PIPELINE_SCHEDULES[parallel.schedule].interleaves and parallel.pipeline > 1 else 1
    )
    several = parallel.pipeline > 1
    options: dict[str, Any] = {
        "zero": parallel.zero if parallel.shard > 1 else 0,
        "sequence": parallel.sequence and parallel.tensor > 1 and MODELS[spec.kind].shares_positions,
        "chunks": chunks if several else 1,
        "stages": split_layers(spec, parallel.pipeline * chunks) if several else (),
    }
    for field in dataclasses.fields(Parallel):
        if field.name not in sides and field.name not in options:
            options[field.name] = getattr(parallel, field.name)
    made = dataclasses.replace(plan, **{**options, **sides})
    wrong = list(problems(made, spec))
    if wrong:
        raise UserError("\n".join(f"plan: {each}" for each in wrong))
    return made


def problems(plan: Plan, spec: Spec) -> Iterator[str]:
    """The reasons why `plan` cannot train a model of `spec`, each with a remedy."""
    if plan.batch_size % plan.data:
        yield (
            f"`train.batch_size` ({plan.batch_size}) is not a multiple of the {plan.data} data-parallel ranks; "
            "choose a multiple, or fewer replicas"
        )
    elif plan.batch_size // plan.data % plan.microbatch_size:
        yield (
            f"`plan.microbatch_size` ({plan.microbatch_size}) does not divide the {plan.batch_size // plan.data} "
            f"sequences of each of {plan.data} ranks; choose a divisor"
        )
    yield from _tensor_problems(plan, spec)
    yield from _context_problems(plan, spec)
    if plan.pipeline > 1:
        shape = Shape(ranks=plan.pipeline, microbatches=max(1, plan.microbatches), chunks=plan.chunks)
        try:
            check_shape(plan.schedule, shape)
        except UserError as error:
            yield str(error)
    yield from _data_problems(plan)
    if plan.saved_activations != "whole":
        yield from _packing_problems(plan)
    if plan.devices > 1:
        yield from _devices_problems(plan)
    if plan.exact:
        yield from _exact_problems(plan)
    if plan.compile:
        yield from compile_problems(plan)
    if plan.precision == "fp8":
        yield from _fp8_problems(plan)


def _tensor_problems(plan: Plan, spec: Spec) -> Iterator[str]:
    if plan.tensor == 1:
        if plan.partition_activations:
            yield "`parallel.partition_activations` needs `parallel.tensor` above 1; leave it out"
        return
    if spec.kv_heads % plan.tensor:
        yield (
            f"`parallel.tensor` ({plan.tensor}) does not divide `model.kv_heads` ({spec.kv_heads}); choose a "
            "multiple of the tensor degree"
        )
    units = [split.units for name, split in splits(spec).items() if ".mlp." in name and split.units > 1]
    if any(unit % plan.tensor for unit in units):
        yield f"`parallel.tensor` ({plan.tensor}) cannot split `model.mlp_width` ({spec.mlp_width}) evenly; lower it"
    if plan.sequence and spec.sequence_length // plan.context % plan.tensor:
        yield (
            f"`parallel.sequence` cannot split {spec.sequence_length // plan.context} positions over {plan.tensor} "
            "tensor ranks; choose another `load.sequence_length`, or `parallel.sequence = false`"
        )
    if plan.partition_activations and plan.sequence:
        yield "`parallel.sequence` already partitions activations; leave `parallel.partition_activations` out"


def _context_problems(plan: Plan, spec: Spec) -> Iterator[str]:
    if plan.context == 1:
        return
    if not MODELS[spec.kind].shares_positions:
        yield f"`parallel.context` splits positions, which `{spec.kind}` needs together; leave it out"
    parts = plan.context * (2 if plan.context_method == "ring" else 1)
    if spec.sequence_length % parts:
        yield (
            f"`parallel.context` ({plan.context}, {plan.context_method}) splits sequences into {parts} parts, but "
            f"`load.sequence_length` ({spec.sequence_length}) is not a multiple of {parts}; choose one that is"
        )
    if plan.context_method == "ulysses" and spec.heads // plan.tensor % plan.context:
        yield (
            f"ulysses cannot split the {spec.heads // plan.tensor} heads of a tensor rank over {plan.context} context "
            'ranks; choose `model.heads` as a multiple, or `parallel.context_method = "ring"`'
        )


def _data_problems(plan: Plan) -> Iterator[str]:
    if plan.gradient_compression != "none" and plan.zero:
        yield "`parallel.gradient_compression` works with replicas, not with `parallel.shard`; drop one of them"
    whole = plan.tensor * plan.pipeline * plan.context == 1
    if plan.gradient_compression == "powersgd" and (plan.precision == "fp16" or not whole):
        yield "`parallel.gradient_compression` powersgd needs unsplit models without loss scaling; use bf16"
    if "parameters" in plan.offload and plan.zero != 3:
        yield "`parallel.offload` of parameters needs ZeRO-3; set `parallel.shard`, with `zero = 3`"
    if "optimizer" in plan.offload and plan.precision == "fp16":
        yield "`parallel.offload` of the optimizer does not support loss scaling; use `train.precision` bf16"
    if plan.backend == "mpi" and plan.device == "cuda":
        yield "`parallel.backend` mpi copies through host memory; use `auto` for GPUs"


def _packing_problems(plan: Plan) -> Iterator[str]:
    setting = f'`parallel.saved_activations = "{plan.saved_activations}"`'
    if plan.recompute in ("full", "auto"):
        why = {
            "8-bit": "recomputing a block from rounded inputs would change its result",
            "packed": "it packs saved activations, and a recomputed block saves only its input",
        }
        yield (
            f"{setting} does not work with `parallel.recompute` {plan.recompute}: {why[plan.saved_activations]}; "
            "drop one of them"
        )
    if "activations" in plan.offload:
        yield f"{setting} does not work with `parallel.offload` of activations; drop one of them"
    if plan.pipeline > 1 and PIPELINE_SCHEDULES[plan.schedule].splits_backward:
        yield f"{setting} does not work with the schedule {plan.schedule}, which keeps inputs itself; use 1f1b"
    if plan.devices > 1:
        yield f"{setting} does not work with `parallel.devices`; start a process per device with `--nproc`"


def compile_problems(plan: Plan) -> Iterator[str]:
    """The reasons why the blocks of `plan` cannot be compiled."""
    setting = '`plan.compile = "on"`'
    kept_elsewhere = "activations" in plan.offload or plan.saved_activations != "whole"
    if plan.recompute in ("attention", "auto") or kept_elsewhere:
        # Full recomputation needs nothing inside a block, but does not help with offloaded or packed activations.
        other = "" if kept_elsewhere else ", or set `parallel.recompute` full"
        yield (
            f"{setting} does not work with `recompute` attention or auto, nor with offloaded or packed activations: "
            f"they need the inside of a block; use `auto`{other}"
        )
    if plan.pipeline > 1 and PIPELINE_SCHEDULES[plan.schedule].splits_backward:
        yield f"{setting} does not work with the schedule {plan.schedule}, which splits the backward pass; use 1f1b"
    if plan.devices > 1:
        yield f"{setting} does not work with `parallel.devices`; start a process per device with `--nproc`"


def _fp8_problems(plan: Plan) -> Iterator[str]:
    if plan.pipeline > 1 and PIPELINE_SCHEDULES[plan.schedule].splits_backward:
        yield f"`train.precision` fp8 does not work with the schedule {plan.schedule}; use 1f1b"
    if plan.saved_activations != "whole":
        yield "`train.precision` fp8 already saves inputs in 8 bits; leave `parallel.saved_activations` out"


def _devices_problems(plan: Plan) -> Iterator[str]:
    if plan.world > 1:
        yield "`parallel.devices` needs a single process; leave it out, and start a process per device with `--nproc`"
    if plan.microbatches % plan.devices:
        yield (
            f"{plan.devices} devices cannot share the {plan.microbatches} microbatches of a step evenly; choose a "
            "multiple for `train.batch_size`, or another `plan.microbatch_size`"
        )
    if plan.offload or plan.recompute == "auto" or plan.precision in PURE:
        yield (
            "`parallel.devices` does not support offload, `recompute` auto or bfloat16 weights; leave it out, and "
            "start a process per device with `--nproc`"
        )


def _exact_problems(plan: Plan) -> Iterator[str]:
    if plan.tensor * plan.context * plan.pipeline > 1:
        yield "`parallel.exact` supports replicas and shards only; set tensor, context and pipeline to 1"
    total = plan.batch_size // plan.microbatch_size
    if plan.data & (plan.data - 1) or total & (total - 1):
        yield (
            f"`parallel.exact` sums in binary trees: {plan.data} data-parallel ranks and {total} microbatches must "
            "both be powers of two"
        )
    if plan.gradient_compression != "none":
        yield "`parallel.exact` does not work with `parallel.gradient_compression`; drop one of them"
    if plan.balance:
        yield "`parallel.exact` does not work with `parallel.balance`, which reorders sums; drop one of them"
    if plan.devices > 1:
        yield "`parallel.exact` does not work with `parallel.devices`; start a process per device with `--nproc`"
