"""Kernels are chosen once for all ranks, whatever each rank would have measured."""

from __future__ import annotations

import pytest
import torch

from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply
from ropewalk.parallel.kernels import selection
from ropewalk.parallel.kernels.kernel_choice import decide
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.tiny import random_batch, small_spec

from .pool import POOL

pytestmark = pytest.mark.xdist_group("pool")

SPEC = small_spec(width=64, mlp_width=192, sequence_length=32)


def chosen(rank: int) -> tuple[list[str], dict[str, list[str]], torch.Tensor]:
    """Kernels by linear, order by contest, and the loss of a step, on one of two replicas, of which each finds another
    kernel quickest: the first rank the second that is tried, the other the third."""
    plan = Plan(device="cuda", precision="fp8", batch_size=4, microbatch_size=2, replicate=2, sequence_length=32)
    calls = iter(range(1 << 20))

    def timer(run: object, device: torch.device, repeats: int) -> float:
        return 1.0 if next(calls) % 3 == rank + 1 else 2.0

    made = apply(
        plan,
        build(SPEC, seed=0),
        Mesh(plan, rank),
        lambda parameters, _: make_optimizer(parameters, Optimizer(), spec=SPEC),
        timer=timer,
    )
    loss = made.step(random_batch(SPEC, rows=4).strided(rank, 2), lr=1e-3).loss
    kernels = [module.product.__name__ for module in made.model.linears().values()]
    return kernels, {each.what: list(each.milliseconds) for each in made.contests}, loss


def test_ranks_whose_measurements_differ_use_the_same_kernels() -> None:
    first, second = POOL.run(chosen, world=2)
    assert first == second
    kernels, contests, _ = first
    assert set(kernels) == {"product"}, "that of 8 bits with one scale, which the first rank finds quickest"
    assert len(contests) == 4
    assert all(order[0] == "fp8" for order in contests.values())


def tuned_by(rank: int) -> list[dict[str, dict[str, float]]]:
    """By which times the matmuls of one of two replicas get their kernels, each of which finds another one quickest."""
    plan = Plan(device="cuda", precision="fp32", batch_size=4, microbatch_size=2, replicate=2, sequence_length=32)
    found: list[dict[str, dict[str, float]]] = []
    with pytest.MonkeyPatch.context() as patch:
        mine = {"matmul": {f"kernel of rank {rank}": 1.0}}
        patch.setattr(selection, "measure_products", lambda *_, **__: mine)
        patch.setattr(selection, "tune_products", lambda *_, times, **__: found.append(times) or iter(()))
        apply(
            plan, build(SPEC, seed=0), Mesh(plan, rank), lambda named, _: make_optimizer(named, Optimizer(), spec=SPEC)
        )
    return found


def test_ranks_whose_matmuls_were_measured_otherwise_use_those_of_the_first() -> None:
    assert POOL.run(tuned_by, world=2) == [[{"matmul": {"kernel of rank 0": 1.0}}]] * 2


def decided(rank: int) -> dict[str, dict[str, float]]:
    """Both stages have the shape `block`, the last one also `head`; only ranks 0 and 2 are to measure."""
    mesh = Mesh(Plan(device="cpu", precision="fp32", batch_size=2, microbatch_size=1, replicate=2, pipeline=2), rank)
    shapes = ["block"] + ["head"] * (mesh.place["pipeline"] == 1)
    return decide(lambda: {shape: {f"kernel of rank {rank}": 1.5, "torch": 2.0} for shape in shapes}, mesh)


def test_the_first_rank_that_has_a_shape_decides_for_all_stages_of_a_pipeline() -> None:
    expected = {"block": "kernel of rank 0", "head": "kernel of rank 2"}
    for found in POOL.run(decided, world=4):
        assert {shape: next(iter(times)) for shape, times in found.items()} == expected
