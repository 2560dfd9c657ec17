"""On a GPU: a step never waits for the device, and its numbers are those of the CPU."""

from __future__ import annotations

import pytest
import torch

from ropewalk.load.batch import Batch
from ropewalk.model.config import Model
from ropewalk.model.decoder import build
from ropewalk.model.spec import resolve
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import Executor
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optimizer import make_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def executor(device: str, precision: str = "fp32") -> Executor:
    spec = resolve(Model(layers=2, width=64, heads=4, kv_heads=2), vocabulary=128, sequence_length=32)
    plan = Plan(device=device, precision=precision, batch_rows=8, microbatch_rows=4)
    model = build(spec, seed=0, device=device)
    return apply(plan, model, lambda parameters: make_optimizer(parameters, Optimizer()), clip_norm=1.0)


def batch() -> Batch:
    tokens = torch.randint(0, 128, (8, 33), generator=torch.Generator().manual_seed(0))
    return Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        weight=torch.ones(8, 32),
        positions=torch.arange(32).expand(8, -1),
        documents=torch.zeros(8, 32, dtype=torch.int32),
    )


def test_a_step_does_not_wait_for_the_device() -> None:
    made, rows = executor("cuda", "bf16"), batch().pinned()
    made.step(rows, lr=1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            made.step(rows, lr=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_steps_on_a_gpu_equal_steps_on_the_cpu() -> None:
    here, there = executor("cpu"), executor("cuda")
    for _ in range(3):
        ours, theirs = here.step(batch(), lr=1e-3), there.step(batch(), lr=1e-3)
    assert abs(ours.loss.item() - theirs.loss.item()) < 1e-4


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    made = executor("cuda")
    made.step(batch(), lr=1e-3)
    before = {name: value.clone() for name, value in {**made.model_state(), **made.optimizer_state()}.items()}
    made.points.before_update.append(lambda gradients: next(iter(gradients.values())).fill_(float("nan")))
    made.points.on_gradients.append(lambda gradients: next(iter(gradients.values())).fill_(float("nan")))
    assert made.step(batch(), lr=1e-3).skipped.item() == 1
    after = {**made.model_state(), **made.optimizer_state()}
    assert all(torch.equal(before[name], after[name]) for name in before)
