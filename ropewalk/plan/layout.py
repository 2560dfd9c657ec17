"""`[parallel]` and a number of processes become the degrees of a plan; what does not fit together is said at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ropewalk.base.errors import UserError
from ropewalk.model.sharding import splits
from ropewalk.model.spec import Spec

from .config import Parallel
from .forecast import PURE
from .plan import Plan
from .schedules import Shape, check_shape
from .stage_split import split_layers


def degrees(parallel: Parallel, processes: int | None) -> dict[str, int]:
    """The five degrees for so many processes (None: as many as they multiply to)."""
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
    """`plan` with the degrees and options of `parallel`; UserError names all that does not fit."""
    sides = degrees(parallel, processes)
    chunks = parallel.chunks or (2 if parallel.schedule == "interleaved" and parallel.pipeline > 1 else 1)
    several = parallel.pipeline > 1
    options: dict[str, Any] = {
        "zero": parallel.zero if parallel.shard > 1 else 0,
        "sequence": parallel.sequence and parallel.tensor > 1,
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
    """Why `plan` cannot train a model of `spec`, each with what to change."""
    if plan.batch_size % plan.data:
        yield (
            f"{plan.data} ranks cannot share the {plan.batch_size} rows of a step evenly; choose `train.batch_size` as "
            "a multiple, or fewer replicas"
        )
    elif plan.batch_size // plan.data % plan.microbatch_size:
        yield (
            f"each of {plan.data} ranks has {plan.batch_size // plan.data} rows, which microbatches of "
            f"{plan.microbatch_size} do not divide; choose another `plan.microbatch_size`"
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
            yield "`parallel.partition_activations` deals activations to tensor ranks, and there is one; leave it out"
        return
    if spec.kv_heads % plan.tensor:
        yield (
            f"`parallel.tensor` ({plan.tensor}) does not divide the {spec.kv_heads} key and value heads; choose "
            "`model.kv_heads` as a multiple"
        )
    units = [split.units for name, split in splits(spec).items() if ".mlp." in name and split.units > 1]
    if any(unit % plan.tensor for unit in units):
        yield f"`parallel.tensor` ({plan.tensor}) cuts `model.mlp_width` ({spec.mlp_width}) inside a chunk; lower it"
    if plan.sequence and spec.sequence_length // plan.context % plan.tensor:
        yield (
            f"`parallel.sequence` splits the {spec.sequence_length // plan.context} places of a row over "
            f"{plan.tensor} tensor ranks; choose another `load.sequence_length`, or `parallel.sequence = false`"
        )
    if plan.partition_activations and plan.sequence:
        yield "`parallel.sequence` shares activations already; leave `parallel.partition_activations` out"


def _context_problems(plan: Plan, spec: Spec) -> Iterator[str]:
    if plan.context == 1:
        return
    parts = plan.context * (2 if plan.context_method == "ring" else 1)
    if spec.sequence_length % parts:
        yield (
            f"`parallel.context` ({plan.context}, {plan.context_method}) cuts rows in {parts} parts, which do not "
            f"divide {spec.sequence_length} tokens; choose another `load.sequence_length`"
        )
    if plan.context_method == "ulysses" and spec.heads // plan.tensor % plan.context:
        yield (
            f"ulysses deals the {spec.heads // plan.tensor} heads of a rank to {plan.context} ranks; choose "
            '`model.heads` as a multiple, or `parallel.context_method = "ring"`'
        )


def _data_problems(plan: Plan) -> Iterator[str]:
    if plan.gradient_compression != "none" and plan.zero:
        yield "`parallel.gradient_compression` is for replicas, `parallel.shard` has none; leave one of them out"
    whole = plan.tensor * plan.pipeline * plan.context == 1
    if plan.gradient_compression == "powersgd" and (plan.precision == "fp16" or not whole):
        yield "`parallel.gradient_compression` powersgd needs whole models without loss scaling; choose bf16"
    if "parameters" in plan.offload and plan.zero != 3:
        yield "`parallel.offload` of parameters is for ranks that gather them: set `parallel.shard`, with `zero = 3`"
    if "optimizer" in plan.offload and plan.precision == "fp16":
        yield "`parallel.offload` of the optimizer knows no loss scaling; choose bf16"
    if plan.backend == "mpi" and plan.device == "cuda":
        yield "`parallel.backend` mpi stages through the host; leave it to `auto` for GPUs"


def _packing_problems(plan: Plan) -> Iterator[str]:
    said = f'`parallel.saved_activations = "{plan.saved_activations}"`'
    if plan.recompute in ("full", "auto"):
        why = {
            "8-bit": "a block computed again from rounded inputs would be another block",
            "packed": "it packs what a block keeps, and one that is computed again keeps its input alone",
        }
        yield (
            f"{said} does not go together with `parallel.recompute` {plan.recompute}: {why[plan.saved_activations]}; "
            "leave one of them out"
        )
    if "activations" in plan.offload:
        yield f"{said} and `parallel.offload` of activations are two places for them; leave one of them out"
    if plan.pipeline > 1 and plan.schedule == "zero-bubble":
        yield f"{said} does not reach the inputs that the schedule zero-bubble keeps for later; choose 1f1b"
    if plan.devices > 1:
        yield f"{said} is for one device a process; leave `parallel.devices` out, and start processes with `--nproc`"


def compile_problems(plan: Plan) -> Iterator[str]:
    """Why the blocks of `plan` cannot be compiled."""
    said = '`plan.compile = "on"`'
    kept_elsewhere = "activations" in plan.offload or plan.saved_activations != "whole"
    if plan.recompute in ("attention", "auto") or kept_elsewhere:
        # Full recomputation needs nothing from inside a block, but is no help to what is kept elsewhere.
        other = "" if kept_elsewhere else ", or set `parallel.recompute` full"
        yield (
            f"{said} hides what is inside a block, which `recompute` attention or auto and other places for "
            f"activations must see; leave it to `auto`{other}"
        )
    if plan.pipeline > 1 and plan.schedule == "zero-bubble":
        yield f"{said} makes a backward pass of one piece, the schedule zero-bubble wants two; choose 1f1b"
    if plan.devices > 1:
        yield f"{said} is for one device a process; leave `parallel.devices` out, and start processes with `--nproc`"


def _fp8_problems(plan: Plan) -> Iterator[str]:
    if plan.pipeline > 1 and plan.schedule == "zero-bubble":
        yield "`train.precision` fp8 makes both gradients at once, the schedule zero-bubble wants two; choose 1f1b"
    if plan.saved_activations != "whole":
        yield "`train.precision` fp8 keeps inputs in 8 bits already; leave `parallel.saved_activations` out"


def _devices_problems(plan: Plan) -> Iterator[str]:
    if plan.world > 1:
        yield "`parallel.devices` is for one process; leave it out, and start a process for each device with `--nproc`"
    if plan.microbatches % plan.devices:
        yield (
            f"{plan.devices} devices cannot share the {plan.microbatches} microbatches of a step evenly; choose "
            "`train.batch_size` as a multiple, or another `plan.microbatch_size`"
        )
    if plan.offload or plan.recompute == "auto" or plan.precision in PURE:
        yield (
            "`parallel.devices` knows no offload, no `recompute` by memory and no bfloat16 weights; leave it out, "
            "and start a process for each device with `--nproc`"
        )


def _exact_problems(plan: Plan) -> Iterator[str]:
    if plan.tensor * plan.context * plan.pipeline > 1:
        yield "`parallel.exact` holds for replicas and shards; tensor, context and pipeline must be 1"
    total = plan.batch_size // plan.microbatch_size
    if plan.data & (plan.data - 1) or total & (total - 1):
        yield (
            f"`parallel.exact` adds up in binary trees: {plan.data} data ranks and {total} microbatches must both be "
            "powers of two"
        )
    if plan.gradient_compression != "none":
        yield "`parallel.exact` has an order of sums of its own; leave `parallel.gradient_compression` out"
    if plan.balance:
        yield "`parallel.exact` fixes which rows are added up first, `parallel.balance` changes it; leave one out"
    if plan.devices > 1:
        yield "`parallel.exact` holds for processes, not for the `parallel.devices` of one; leave one of them out"
