"""The plan of a phase: device, precision, degrees, and the largest microbatch that fits."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Literal

from ropewalk.base.errors import UserError
from ropewalk.base.progress import amount, counted
from ropewalk.model.spec import Spec

from .config import Layout, Parallel, Recompute
from .forecast import FUSED_ADAMW, Memory, OptimizerCosts, Precision, memory
from .layout import compile_problems, degrees, laid_out
from .machine import Machine
from .memory_per_rank import of_rank
from .plan import PhasePlan, Plan
from .schedules import PIPELINE_SCHEDULES


def choose(
    spec: Spec,
    layout: Layout,
    machine: Machine,
    *,
    parallel: Parallel | None = None,
    processes: int | None = None,
    batch_size: int,
    steps: int,
    precision: Precision | Literal["auto"],
    optimizer: OptimizerCosts = FUSED_ADAMW,
    tokens: int | None = None,
    trained: tuple[str, ...] | None = None,
) -> PhasePlan:
    """The plan of a phase: the device, the degrees of `parallel` for `processes` (None: their product), and the largest
    microbatch whose memory forecast fits a rank.

    `spec` has the phase's sequence length; `tokens` is less than that of full steps where ramps shorten them; `trained`
    names the trained parameters if not all are.
    """
    device = layout.device
    if device == "auto":
        device = "cuda" if machine.gpus else "cpu"
    if device == "cuda" and not machine.gpus:
        raise UserError("`plan.device` is cuda, but this machine shows no GPU; set `plan.device=cpu`")
    parallel = parallel or Parallel()
    sides = degrees(parallel, processes)
    world, readers = prod(sides.values()), sides["replicate"] * sides["shard"] * parallel.devices
    # Processes and threads on a CPU share its memory; each GPU has its own.
    share = machine.gpus[0].memory_bytes if device == "cuda" else machine.memory_bytes // (world * parallel.devices)
    budget = layout.memory_bytes or round(0.8 * share)
    if precision == "auto":
        hardware = machine.gpus[0].capability >= 8.0 if device == "cuda" else machine.bf16
        precision = "bf16" if hardware else "fp32"

    def planned_with(rows: int) -> Plan:
        plan = Plan(
            device=device,
            precision=precision,
            batch_size=batch_size,
            microbatch_size=rows,
            sequence_length=spec.sequence_length,
            compile=layout.compile == "on",
            deterministic=layout.deterministic,
            fp8=layout.fp8,
            tuning=layout.tuning,
        )
        laid = laid_out(plan, parallel, spec, processes=processes)
        compiles = layout.compile == "auto" and device == "cuda" and not any(compile_problems(laid))
        return dataclasses.replace(laid, compile=True) if compiles else laid

    def needed_with(rows: int, recompute: Recompute = parallel.recompute) -> Memory:
        whole = memory(
            spec,
            rows=rows,
            precision=precision,
            optimizer=optimizer,
            trained=trained,
            activations=parallel.saved_activations,
            recompute=recompute,
            device=device,
            accumulates=not (device == "cuda" and rows == batch_size and world == 1 and recompute == "none"),
        )
        if world == 1:
            return whole
        return of_rank(whole, dataclasses.replace(planned_with(rows), recompute=recompute), spec, trained=trained)

    if batch_size % readers:
        raise UserError(
            f"{readers} ranks cannot share `train.batch_size` ({batch_size}) evenly; choose a multiple, or fewer ranks"
        )
    divisors = _candidates(spec, batch_size // readers, device, parallel=parallel, batch_size=batch_size)
    rows = layout.microbatch_size or next(r for r in divisors if needed_with(r).total <= budget or r == divisors[-1])
    if batch_size // readers % rows:
        raise UserError(
            f"`plan.microbatch_size` ({rows}) does not divide `train.batch_size` ({batch_size})"
            + (f" of {readers} ranks" if readers > 1 else "")
            + "; choose a divisor"
        )
    needed, least = needed_with(rows), needed_with(rows, "full")
    plan = planned_with(rows)
    if parallel.recompute == "auto":
        # The memory that is left for activations.
        left = max(0, budget - needed.total + needed.activations)
        plan = dataclasses.replace(plan, recompute_bytes=left)
        kept = min(needed.activations, left)
        needed = least if least.total > budget else dataclasses.replace(needed, activations=kept)
    if needed.total > budget:
        recompute_fits = least.total <= budget and parallel.saved_activations == "whole"
        raise UserError(_does_not_fit(needed, budget, rows, recompute_fits=recompute_fits))
    read = steps * batch_size * spec.sequence_length if tokens is None else tokens
    return PhasePlan(plan=plan, spec=spec, memory=needed, steps=steps, tokens=read, trained=trained)


CPU_MICROBATCH_TOKENS = 4096
"""Largest useful microbatch on a CPU: the matrices are big enough, and larger ones miss the cache."""


EXACT_MICROBATCHES = 8
"""Microbatches per step in exact mode for any number of ranks; also the most ranks that can share a step."""


def _candidates(spec: Spec, rank_rows: int, device: str, *, parallel: Parallel, batch_size: int) -> list[int]:
    """Microbatch sizes to try, largest first."""
    if parallel.exact:
        return [max(1, batch_size // EXACT_MICROBATCHES)]
    # A pipeline needs several microbatches per rank: with four the bubble is at most (p - 1) / (p + 3).
    least = 4 * parallel.pipeline if parallel.pipeline > 1 else 1
    most = max(1, rank_rows // least)
    if parallel.pipeline > 1 and PIPELINE_SCHEDULES[parallel.schedule].interleaves:
        divisors = [r for r in range(most, 0, -1) if rank_rows % r == 0 and rank_rows // r % parallel.pipeline == 0]
    else:
        divisors = [r for r in range(most, 0, -1) if rank_rows % r == 0]
    divisors = divisors or [1]
    if device == "cpu":
        small = [rows for rows in divisors if rows * spec.sequence_length <= CPU_MICROBATCH_TOKENS]
        return small or divisors[-1:]
    return divisors


def _does_not_fit(needed: Memory, budget: int, rows: int, *, recompute_fits: bool) -> str:
    parts = ", ".join(f"{name} {amount(value, 'B')}" for name, value in dataclasses.asdict(needed).items())
    remedy = "set a smaller `plan.microbatch_size`" if rows > 1 else "choose a smaller model or shorter sequences"
    if needed.weights + needed.gradients + needed.optimizer > budget:
        remedy = "choose a smaller model, or shard it over more processes (`parallel.shard`)"
    elif recompute_fits:
        remedy = 'it fits with `parallel.recompute = "full"`; set that or "auto"'
    return (
        f"plan: {amount(needed.total, 'B')} needed with {counted(rows, 'sequence')} per microbatch, "
        f"{amount(budget, 'B')} allowed ({parts}); {remedy}, or raise `plan.memory_bytes`"
    )
