"""Exact mode: the same bits of every weight however many ranks share the rows, and whoever keeps what."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import pytest
import torch

from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.pool import POOL
from tests.parallel.worlds import Arrays, gathered
from tests.tiny import random_batch, small_spec

pytestmark = pytest.mark.xdist_group("pool")

# Rows of 17 and 61 numbers, which no rank count divides; weights that float32 cannot add up without rounding.
SPEC = small_spec(sequence_length=16, bias=True, kv_heads=2, dropout=0.1, mlp_width=40)
ROWS, STEPS, CLIP = 16, 20, 0.2
State = tuple[Arrays, Arrays]


def plan_of(*, exact: bool = True, **degrees: Any) -> Plan:
    """8 microbatches of 2 rows, over all ranks."""
    return Plan(
        device="cpu",
        precision="fp32",
        batch_size=ROWS,
        microbatch_size=2,
        sequence_length=SPEC.sequence_length,
        exact=exact,
        **degrees,
    )


def trained(rank: int, plan: Plan, first: int, last: int, state: State | None) -> tuple[str, list[float], State]:
    """(hash of all weights, losses, whole state) after steps `first` to `last`, begun with `state`."""
    torch.set_num_threads(1)
    mesh = Mesh(plan, rank)

    def optimizer(parameters: Any, placements: Any) -> torch.optim.Optimizer:
        return make_optimizer(parameters, Optimizer(), placements=placements, exact=plan.exact)

    executor = apply(plan, build(SPEC, seed=1), mesh, optimizer, clip_norm=CLIP, seed=3)
    if state:
        executor.load_state(*({n: torch.from_numpy(array) for n, array in part.items()} for part in state))
    losses = []
    for number in range(first, last):
        batch = random_batch(SPEC, rows=ROWS, seed=number)
        batch.weight.copy_(torch.rand(batch.weight.shape, generator=torch.Generator().manual_seed(number)))
        result = executor.step(batch.strided(mesh.data.rank, mesh.data.size), lr=1e-2)
        losses.append(float(result.loss))
        assert float(result.grad_norm) > CLIP, "nothing was clipped"
    found = gathered(executor.model_state()), gathered(executor.optimizer_state())
    numbers = hashlib.sha256()
    for name in sorted(found[0]):
        numbers.update(found[0][name].tobytes())
    return numbers.hexdigest(), losses, found


@functools.cache
def on_one() -> tuple[str, list[float], State]:
    (found,) = POOL.run(trained, plan_of(), 0, STEPS, None, world=1)
    return found


QUICK: list[dict[str, Any]] = [
    {"replicate": 2},
    {"replicate": 8},
    {"shard": 4, "zero": 1, "bucket_bytes": 2000},
    {"replicate": 2, "shard": 2, "zero": 2},
    {"shard": 2, "zero": 3, "recompute": "full"},
]
"""Each way to share the rows and the state once."""
OTHERS: list[dict[str, Any]] = [
    {"replicate": 4},
    *({"shard": ranks, "zero": zero} for ranks in (2, 4, 8) for zero in (1, 2, 3)),
    *({"replicate": 2, "shard": 2, "zero": zero} for zero in (1, 3)),
    {"replicate": 2, "shard": 4, "zero": 3},
    {"replicate": 4, "shard": 2, "zero": 2},
    {"replicate": 2, "bucket_bytes": 0},
]
LAYOUTS = [*QUICK, *(pytest.param(layout, marks=pytest.mark.slow) for layout in OTHERS)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(f"{k} {v}" for k, v in layout.items()))
def test_twenty_steps_give_the_bits_of_one_process(layout: dict[str, Any]) -> None:
    plan = plan_of(**layout)
    expected, losses, _ = on_one()
    for number, found, _ in POOL.run(trained, plan, 0, STEPS, None, world=plan.world):
        assert found == losses
        assert number == expected


def test_run_begun_on_2_ranks_ends_on_4_with_the_bits_of_one_that_never_stopped() -> None:
    half = STEPS // 2
    before, after = plan_of(replicate=2), plan_of(shard=4, zero=3)
    _, early, state = POOL.run(trained, before, 0, half, None, world=2)[0]
    number, late, _ = POOL.run(trained, after, half, STEPS, state, world=4)[0]
    expected, losses, _ = on_one()
    assert early + late == losses
    assert number == expected


def test_without_exact_mode_the_bits_depend_on_the_ranks() -> None:
    """What the tests above would miss if hashes could not tell."""
    numbers = {POOL.run(trained, plan_of(exact=False, replicate=n), 0, STEPS, None, world=n)[0][0] for n in (1, 4)}
    assert len(numbers) == 2
