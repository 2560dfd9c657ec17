"""Steps without a run, on random tokens: for `profile` and `bench train`.

The model has fresh weights; no data is read and no run directory is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ropewalk.config.ranks import ranks
from ropewalk.load.batch import Batch
from ropewalk.model.protocol import build_stage
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import apply
from ropewalk.parallel.compat import deterministic
from ropewalk.parallel.mesh import pick_device
from ropewalk.plan.forecast import Precision
from ropewalk.plan.plan import PhasePlan, Plan

from ..config import Optimizer, Train
from ..optim.optimizers import make_optimizer
from .ceilings import measure_ceilings, nominal_bytes, peak_flops
from .step_profiler import StepFunction, profile_steps

LEARNING_RATE = 1e-4
DOCUMENT_TOKENS = 500
"""Of a web page, roughly."""


def measure_phase(planned: PhasePlan, train: Train, *, seed: int, steps: int) -> dict[str, Any]:
    """Device figures and step profile of a recipe's phase, as plain values."""
    if train.threads:
        torch.set_num_threads(train.threads)
    device = pick_device(planned.plan, ranks())
    figures = device_figures(device, planned.plan.precision)
    step = own_step(
        planned.spec,
        planned.plan,
        device=device,
        optimizer=train.optimizer,
        clip_norm=train.clip_norm,
        trained=planned.trained,
        seed=seed,
    )
    return figures | dataclasses.asdict(profile_steps(step, device=device, steps=steps))


def device_figures(device: torch.device, precision: Precision) -> dict[str, Any]:
    """The device's ceilings, as measured now and from its data sheet if known."""
    ceilings = measure_ceilings(device, precision)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        threads = torch.get_num_threads()
        name = f"{threads} {'thread' if threads == 1 else 'threads'}"
    return {
        "device": str(device),
        "device_name": name,
        "torch": torch.__version__,
        "ceilings": dataclasses.asdict(ceilings),
        "nominal_flops": peak_flops(device, precision) if device.type == "cuda" else None,
        "nominal_bytes": nominal_bytes(device),
    }


def own_step(
    spec: Spec,
    plan: Plan,
    *,
    device: torch.device,
    optimizer: Optimizer,
    clip_norm: float,
    trained: Collection[str] | None = None,
    seed: int = 0,
) -> StepFunction:
    """A training step under `plan`, for one process."""
    with torch.device("meta"):
        model = build_stage(spec)
    executor = apply(
        plan,
        model,
        None,
        lambda parameters, placements: make_optimizer(
            parameters, optimizer, spec=spec, placements=placements, exact=plan.exact
        ),
        device=device,
        trained=trained,
        clip_norm=clip_norm,
        seed=seed,
        init_seed=seed,
    )
    batch = random_batch(spec, rows=plan.batch_size, device=device)

    def step() -> Tensor:
        with deterministic(device) if plan.deterministic else contextlib.nullcontext():
            return executor.step(batch, lr=LEARNING_RATE).loss

    return step


def random_batch(spec: Spec, *, rows: int, device: torch.device) -> Batch:
    """Full sequences of random tokens, every target with weight 1. A sequence is a single document, or several of about
    DOCUMENT_TOKENS tokens for a spec with separate documents."""
    length, draw = spec.sequence_length, torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocabulary, (rows, length + 1), generator=draw)
    documents = torch.zeros(rows, length, dtype=torch.int32)
    if spec.documents == "separate":
        documents = (torch.rand(rows, length, generator=draw) < 1 / DOCUMENT_TOKENS).cumsum(1, dtype=torch.int32)
    return Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        weight=torch.ones(rows, length),
        positions=torch.arange(length).expand(rows, -1),
        documents=documents,
    ).to(device)
