"""Kernel selection: measures where worthwhile, decides once for all ranks, then configures this rank's stages."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ropewalk.model.protocol import ModelStage
from ropewalk.plan.plan import Plan

from ..executor import StepHooks
from ..mesh import Mesh
from ..precision import PRODUCTS
from .kernel_choice import (
    ATTENTION,
    Contest,
    Timer,
    Times,
    choose_8_bits,
    compile_stage,
    decide,
    measure_8_bits,
    measure_attention,
)
from .matmul_tuning import budget_s, measure_products, tune_products


def choose_kernels(
    plan: Plan,
    stages: Mapping[int, ModelStage],
    mesh: Mesh,
    *,
    device: torch.device | None,
    trains: bool,
    hooks: StepHooks,
    run_s: float,
    timer: Timer,
) -> list[Contest]:
    """Configures `stages` with the fastest kernels on their device and returns the timings. All ranks must call.

    `run_s` is the expected time of the run's steps: short runs measure less, and scoring is too short for measuring
    matmuls. Weights may still be on torch's `meta` device: `device` is their destination.
    """
    some = next(iter(stages.values()))
    there = next(some.parameters()).device
    device = (device or torch.device("cpu")) if there.type == "meta" else there
    dtype = PRODUCTS.get(plan.precision, torch.float32)

    def measure_tuned() -> dict[str, Times]:
        return measure_products(
            stages.values(),
            plan,
            device=device,
            dtype=dtype,
            budget=budget_s(plan, run_s) if trains else 0.0,
            timer=timer,
            before=hooks.before_tuning,
            after=hooks.after_tuning if trains else (),
        )

    def measure_others() -> dict[str, Times]:
        found = measure_attention(some.spec, plan, device, dtype=dtype, timer=timer)
        if plan.precision == "fp8":
            for stage in stages.values():
                found |= measure_8_bits(stage, plan, device, timer=timer)
        return found

    on_gpu = plan.device == "cuda"
    contests: list[Contest] = []
    times = decide(measure_tuned, mesh) if on_gpu else {}
    for stage in stages.values():
        contests += tune_products(stage, plan, device=device, dtype=dtype, times=times)
    # After matmul tuning: bfloat16 matmuls must be as fast as in the step.
    times = decide(measure_others, mesh) if on_gpu else {}
    for stage in stages.values():
        if plan.precision == "fp8":
            contests += choose_8_bits(stage, plan, times)
        if plan.compile:
            compile_stage(stage)
    if ATTENTION in times:
        contests.insert(0, Contest(what=ATTENTION, milliseconds=times[ATTENTION]))
    return contests
