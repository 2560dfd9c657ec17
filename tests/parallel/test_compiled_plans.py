"""Compiled blocks under plans of several processes, and of blocks that are computed again."""

from __future__ import annotations

import shutil

import pytest

from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optimizer import make_optimizer
from tests.parallel.pool import POOL
from tests.tiny import random_batch, small_spec

pytestmark = [
    pytest.mark.xdist_group("pool"),
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler on a CPU"),
]


def trained_under(rank, changes):
    """The losses of three steps on this rank."""
    spec = small_spec(layers=4)
    plan = Plan(device="cpu", precision="fp32", batch_rows=8, microbatch_rows=2, **changes)
    mesh = Mesh(plan, rank)
    made = apply(
        plan,
        build(spec, seed=0),
        mesh,
        lambda p, cuts: make_optimizer(p, Optimizer(), spec=spec, cuts=cuts),
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
    world = Plan(device="cpu", precision="fp32", batch_rows=8, microbatch_rows=2, **changes).world
    plain = POOL.run(trained_under, changes, world=world)
    compiled = POOL.run(trained_under, {**changes, "compile": True}, world=world, timeout_s=200)
    for mine, theirs in zip(compiled, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
