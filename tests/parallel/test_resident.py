"""Resident memory of a rank while it trains: what the system counts, with gathered units and buffers of collectives."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from ropewalk.model.decoder import Decoder
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import apply
from ropewalk.parallel.mesh import Mesh
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.plans import case
from tests.parallel.pool import Pool
from tests.parallel.resident import Resident, needs_peaks
from tests.tiny import random_batch, small_spec

pytestmark = pytest.mark.xdist_group("pool")

SPEC = small_spec(sequence_length=8, width=512, layers=22, heads=4, mlp_width=1408)
"""71 M parameters: their state of 16 bytes each is more than the 1 GiB of free memory that a process may keep."""
SMALL = small_spec(sequence_length=8)
UNIT = 4 * sum(math.prod(shape) for name, shape in SPEC.shapes().items() if name.startswith("blocks.0."))
"""Bytes of a block, gathered."""


def growth(rank: int, settings: dict[str, Any]) -> int:
    """A rank's job: the most memory that building the executor and two steps take, beyond what libraries take when
    they are first used."""
    train(rank, settings, SMALL)
    memory = Resident()
    train(rank, settings, SPEC)
    return memory.growth()


def train(rank: int, settings: dict[str, Any], spec: Spec) -> None:
    plan = case("", batch_size=4, bucket_bytes=UNIT, **settings).plan
    mesh = Mesh(plan, rank)
    with torch.device("meta"):
        model = Decoder(spec)
    executor = apply(
        plan,
        model,
        mesh,
        lambda named, placements: make_optimizer(named, Optimizer(), spec=spec, placements=placements),
    )
    batch = random_batch(spec, rows=4).strided(mesh.data.rank, mesh.data.size)
    for _ in range(2):
        executor.step(batch, lr=1e-3)


@functools.cache
def of(ranks: int, zero: int) -> int:
    """The most of any rank, in processes that have done nothing before."""
    pool = Pool()
    try:
        return max(pool.run(growth, {"shard": ranks, "zero": zero} if ranks > 1 else {}, world=ranks))
    finally:
        pool.close()


@needs_peaks
@pytest.mark.slow
@pytest.mark.parametrize(("zero", "whole"), [(1, 8), (2, 4), (3, 0)])
def test_resident_memory_falls_with_the_number_of_ranks(zero: int, whole: int) -> None:
    """`whole` bytes a parameter are on every rank, of the other 16 - `whole` each has its share."""
    found = {1: of(1, 0), 2: of(2, zero), 4: of(4, zero)}
    assert found[4] < 0.6 * found[1]
    for ranks, each in found.items():
        # Two units that are gathered and two that are reduced have a copy on the way; then what lies between tensors.
        state = (whole + (16 - whole) / ranks) * SPEC.parameters()
        assert each <= state + 12 * UNIT, (ranks, each)


@pytest.mark.parametrize(("spec", "zero", "size"), [(SPEC, 0, 1 << 25), (SPEC, 3, 1 << 20), (SMALL, 3, 1 << 25)])
def test_a_large_sharded_model_gives_memory_back(
    spec: Spec, zero: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("ropewalk.parallel.apply.keep_freed_memory", lambda *, up_to_bytes: asked.append(up_to_bytes))
    plan = case("", zero=zero).plan
    with torch.device("meta"):
        model = Decoder(spec)
    apply(plan, model, None, None, init_seed=None)
    assert asked == [size]
