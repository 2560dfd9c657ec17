"""Compiled blocks under plans of several processes, and of blocks that are recomputed."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest
import torch
import torch._dynamo

from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.plans import CASES, Case
from tests.parallel.pool import POOL
from tests.parallel.worlds import batches
from tests.tiny import random_batch, small_spec

pytestmark = [
    pytest.mark.xdist_group("pool"),
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler on a CPU"),
]


def trained_under(rank, changes):
    """The losses of three steps on this rank."""
    spec = small_spec(layers=4)
    plan = Plan(device="cpu", precision="fp32", batch_size=8, microbatch_size=2, **changes)
    mesh = Mesh(plan, rank)
    made = apply(
        plan,
        build(spec, seed=0),
        mesh,
        lambda p, placements: make_optimizer(p, Optimizer(), spec=spec, placements=placements),
        clip_norm=1.0,
    )
    batches = [random_batch(spec, rows=8, seed=step).strided(mesh.data.rank, mesh.data.size) for step in range(3)]
    return [made.step(batch, lr=1e-3).loss.item() for batch in batches]


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": "full"},
        {"shard": 2, "zero": 2},
        {"shard": 2, "zero": 3, "recompute": "full"},
        {"pipeline": 2, "stages": ((0, 1), (2, 3))},
    ],
    ids=str,
)
def test_compiled_blocks_fit_every_plan_that_takes_them(changes):
    world = Plan(device="cpu", precision="fp32", batch_size=8, microbatch_size=2, **changes).world
    plain = POOL.run(trained_under, changes, world=world)
    compiled = POOL.run(trained_under, {**changes, "compile": True}, world=world, timeout_s=200)
    for mine, theirs in zip(compiled, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def trained_in_float64(rank: int, each: Case, compiled: bool) -> tuple[list[float], dict[Any, Any], dict[str, int]]:
    """(losses and norms of two steps, what was sent, reasons for breaks of the graph)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plan = dataclasses.replace(each.plan, compile=compiled)
    mesh = Mesh(plan, rank)
    executor = apply(
        plan,
        build(each.spec, seed=1, dtype=torch.float64).to(plan.device),
        mesh,
        lambda p, placements: make_optimizer(p, Optimizer(), spec=each.spec, placements=placements),
        trained=each.trained,
        clip_norm=1.0,
        seed=3,
    )
    mesh.traffic.take()
    found = []
    for batch in batches(each.spec, 2):
        result = executor.step(batch.strided(mesh.data.rank, mesh.data.size), lr=1e-3)
        found += [result.loss.item(), result.grad_norm.item()]
    sent = {key: (each.calls, each.bytes) for key, each in mesh.traffic.take().items()}
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == compiled
    return found, sent, dict(torch._dynamo.utils.counters["graph_break"])


@pytest.mark.parametrize(
    "name",
    ["tensor 2", "tensor 2 with sequence", "ring 2", "ulysses 2", "ring 2, rich", "ZeRO-3 over 2 x tensor 2"],
)
def test_blocks_that_communicate_compile_as_one_graph_and_send_the_same(name: str) -> None:
    each = CASES[name]
    plain = POOL.run(trained_in_float64, each, False, world=each.plan.world)
    compiled = POOL.run(trained_in_float64, each, True, world=each.plan.world, timeout_s=600)
    for (mine, sent, breaks), (theirs, expected, _) in zip(compiled, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12)
        assert sent == expected
        assert not breaks
