"""Every way to add up gradients gives the sum it promises, for the bytes it promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply, local
from ropewalk.parallel.comm import Pending
from ropewalk.parallel.data.gradient_compression import Compressor, Plain, PowerSgd, RoundedGradients, make_compressor
from ropewalk.parallel.executor import Executor
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.pool import POOL
from tests.tiny import random_batch, small_spec

pytestmark = pytest.mark.xdist_group("pool")

SHAPES = {"matrix": (24, 17), "vector": (11,), "small": (3, 2), "wide": (6, 40)}
RANK = 3
LOW = ("matrix", "wide")
"""Those that PowerSGD compresses."""


def mesh_of(rank: int, **degrees: int) -> Mesh:
    return Mesh(Plan(device="cpu", precision="fp32", batch_size=4, microbatch_size=1, **degrees), rank)


def gradients(rank: int, *, step: int = 0, inner: int | None = None, dtype: torch.dtype = torch.float64) -> Any:
    """A rank's gradients of a step; matrices of rank `inner` where given, all with the same columns."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    columns = torch.Generator().manual_seed(step)
    found = {}
    for name, shape in SHAPES.items():
        found[name] = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
        if inner and len(shape) == 2:
            left = torch.randn(shape[0], inner, generator=columns, dtype=torch.float64)
            found[name] = left @ torch.randn(inner, shape[1], generator=draw, dtype=torch.float64)
    return found


def in_bucket(named: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    flat = torch.cat([tensor.reshape(-1) for tensor in named.values()])
    parts = flat.split([tensor.numel() for tensor in named.values()])
    return flat, {name: part.view(named[name].shape) for name, part in zip(named, parts, strict=True)}


def summed(compressor: Compressor, named: dict[str, Tensor]) -> dict[str, Tensor]:
    flat, parts = in_bucket(named)
    assert compressor.start(flat, parts).wait() is flat
    return parts


def expected(world: int, **options: Any) -> dict[str, Tensor]:
    each = [gradients(rank, **options) for rank in range(world)]
    return {name: sum(g[name] for g in each) for name in SHAPES}  # type: ignore[misc]


def plain(rank: int, world: int) -> tuple[dict[str, Tensor], dict]:
    mesh = mesh_of(rank, replicate=world)
    return summed(Plain(mesh.group("replicate")), gradients(rank)), sent_by(mesh)


def sent_by(mesh: Mesh) -> dict[tuple[str, str], tuple[int, float]]:
    return {key: (sent.calls, sent.bytes) for key, sent in mesh.traffic.take().items()}


def numbers(names: Any = SHAPES) -> int:
    return sum(torch.Size(SHAPES[name]).numel() for name in names)


@pytest.mark.parametrize("world", [2, 4])
def test_plain_is_the_sum(world: int) -> None:
    for found, sent in POOL.run(plain, world, world=world):
        torch.testing.assert_close(found, expected(world), rtol=1e-14, atol=1e-14)
        assert sent == {("replicate", "all_reduce"): (1, pytest.approx(2 * numbers() * 8 * (world - 1) / world))}


def rounded(rank: int, world: int, dtype: torch.dtype, scale: float) -> tuple[dict[str, Tensor], dict]:
    mesh = mesh_of(rank, replicate=world)
    named = {name: g * scale for name, g in gradients(rank, dtype=torch.float32).items()}
    return summed(RoundedGradients(mesh.group("replicate"), dtype), named), sent_by(mesh)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_is_the_sum_of_two_rounded_gradients(dtype: torch.dtype) -> None:
    each = [gradients(rank, dtype=torch.float32) for rank in range(2)]
    for found, sent in POOL.run(rounded, 2, dtype, 1.0, world=2):
        for name in SHAPES:
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], (each[0][name].to(dtype) + each[1][name].to(dtype)).float())
        assert sent == {("replicate", "all_reduce"): (1, numbers() * 2)}


def test_four_rounded_gradients_lose_a_rounding_each() -> None:
    whole = expected(4, dtype=torch.float32)
    largest = {name: sum(gradients(rank)[name].abs() for rank in range(4)) for name in SHAPES}
    for found, _ in POOL.run(rounded, 4, torch.bfloat16, 1.0, world=4):
        for name in SHAPES:
            # Four gradients and three sums, 2^-9 of the largest possible sum at most in each.
            assert ((found[name] - whole[name]).abs() <= 7 * 2**-9 * largest[name]).all()


def test_what_exceeds_float16_is_seen_as_infinite() -> None:
    for found, _ in POOL.run(rounded, 2, torch.float16, 1e6, world=2):
        assert not all(torch.isfinite(tensor).all() for tensor in found.values())


def power_sgd(rank: int, world: int, inner: int | None, steps: int) -> list[tuple[dict[str, Tensor], dict, dict]]:
    mesh = mesh_of(rank, replicate=world)
    compressor = PowerSgd(mesh.group("replicate"), rank=RANK, seed=7)
    found = []
    for step in range(steps):
        parts = summed(compressor, gradients(rank, step=step, inner=inner))
        found.append((parts, {name: tensor.clone() for name, tensor in compressor.state.items()}, sent_by(mesh)))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_powersgd_of_matrices_of_its_rank_is_the_sum(world: int) -> None:
    for steps in POOL.run(power_sgd, world, RANK, 3, world=world):
        for step, (found, _, _) in enumerate(steps):
            torch.testing.assert_close(found, expected(world, step=step, inner=RANK), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world", [2, 4])
def test_what_was_applied_and_what_is_owed_make_up_the_gradients(world: int) -> None:
    ranks = POOL.run(power_sgd, world, None, 5, world=world)
    for name in SHAPES:
        applied = given = torch.zeros(SHAPES[name], dtype=torch.float64)
        for step in range(5):
            applied = applied + ranks[0][step][0][name]
            given = given + expected(world, step=step)[name]
            owed = sum(rank[step][1].get(f"error/{name}", torch.zeros(())) for rank in ranks)
            torch.testing.assert_close(applied + owed, given, rtol=1e-11, atol=1e-11)
            # One projection leaves something out of every random matrix.
            assert name not in LOW or torch.linalg.matrix_norm(owed) > 1


def test_powersgd_gives_all_ranks_the_same_low_rank_matrix() -> None:
    ranks = POOL.run(power_sgd, 4, None, 3, world=4)
    for step in range(3):
        for name in SHAPES:
            assert all(torch.equal(rank[step][0][name], ranks[0][step][0][name]) for rank in ranks)
        for name in LOW:
            assert torch.linalg.matrix_rank(ranks[0][step][0][name]) == RANK
            assert all(torch.equal(r[step][1][f"factor/{name}"], ranks[0][step][1][f"factor/{name}"]) for r in ranks)


def test_powersgd_sends_two_factors() -> None:
    first = sum(SHAPES[name][0] for name in LOW) * RANK + numbers(set(SHAPES) - set(LOW))
    second = sum(SHAPES[name][1] for name in LOW) * RANK
    for steps in POOL.run(power_sgd, 2, None, 2, world=2):
        assert [sent for *_, sent in steps] == [{("replicate", "all_reduce"): (2, (first + second) * 8)}] * 2


class Recorded:
    """Sums over one; notes in which order messages of which sizes start and are waited for."""

    def __init__(self, events: list[tuple[str, int]]) -> None:
        self._events = events

    def start_all_reduce(self, x: Tensor) -> Pending:
        self._events.append(("starts", x.numel()))
        return Pending((), x, finish=lambda: self._events.append(("waited for", x.numel())))


def test_powersgd_sends_the_factors_of_a_bucket_after_the_next_one_has_started() -> None:
    events: list[tuple[str, int]] = []
    compressor = PowerSgd(Recorded(events), rank=1, seed=7)
    shapes = [(20, 10), (21, 11), (22, 12)]
    buckets = [in_bucket({f"m{n}": torch.randn(shape, dtype=torch.float64)}) for n, shape in enumerate(shapes)]
    pending = [compressor.start(*bucket) for bucket in buckets]
    during = [("starts", 20), ("starts", 21), ("waited for", 20), ("starts", 10)]
    during += [("starts", 22), ("waited for", 21), ("starts", 11)]
    assert events == during, "only the factors of the last bucket are left"
    for each in pending:
        each.wait()
    after = [("waited for", 10), ("waited for", 11), ("waited for", 22), ("starts", 12), ("waited for", 12)]
    assert events[len(during) :] == after
    events.clear()
    compressor.start(*buckets[0])
    assert events == [("starts", 20)], "a step begins with nothing of the one before"


def after_infinity(rank: int) -> tuple[bool, bool]:
    """Whether the sum shows a broken gradient of rank 1, and whether the state is as before."""
    compressor = PowerSgd(mesh_of(rank, replicate=2).group("replicate"), rank=RANK, seed=7)
    summed(compressor, gradients(rank))
    before = {name: tensor.clone() for name, tensor in compressor.state.items()}
    broken = gradients(rank, step=1)
    for name in LOW:
        broken[name][0, 0] = float("inf") if rank else 0.0
    found = summed(compressor, broken)
    shown = not any(torch.isfinite(found[name]).all() for name in LOW)
    return shown, all(torch.equal(before[name], tensor) for name, tensor in compressor.state.items())


def test_an_infinite_gradient_is_passed_on_and_not_owed() -> None:
    assert POOL.run(after_infinity, world=2) == [(True, True)] * 2


def carried_on(rank: int) -> bool:
    """Whether a compressor with the state of another goes on as that one does."""
    group = mesh_of(rank, replicate=2).group("replicate")
    first, second = (PowerSgd(group, rank=RANK, seed=7) for _ in range(2))
    for step in range(2):
        summed(first, gradients(rank, step=step))
    second.state = {name: tensor.clone() for name, tensor in first.state.items()}
    one, other = (summed(each, gradients(rank, step=2)) for each in (first, second))
    return all(torch.equal(one[name], other[name]) for name in SHAPES)


def test_the_state_is_all_that_a_checkpoint_needs() -> None:
    assert POOL.run(carried_on, world=2) == [True, True]


class Nobody:
    """Sums over one."""

    def start_all_reduce(self, x: Tensor) -> Pending:
        return Pending((), x)


@pytest.mark.parametrize(
    ("compression", "kind"),
    [("none", Plain), ("bf16", RoundedGradients), ("fp16", RoundedGradients), ("powersgd", PowerSgd)],
)
def test_the_plan_names_the_compressor(compression: Any, kind: type) -> None:
    plan = Plan(device="cpu", precision="fp32", batch_size=1, microbatch_size=1, gradient_compression=compression)
    assert isinstance(make_compressor(plan, Nobody(), seed=0), kind)


def interrupted(rank: int, at: int) -> dict[str, Tensor]:
    """Weights after six steps with PowerSGD; from `at` on in a new executor that took over the state of the first."""
    plan = Plan(
        device="cpu",
        precision="fp32",
        batch_size=4,
        microbatch_size=1,
        replicate=2,
        gradient_compression="powersgd",
        powersgd_rank=1,
    )
    spec = small_spec()
    mesh = Mesh(plan, rank)

    def make() -> Executor:
        return apply(
            plan, build(spec, seed=0), mesh, lambda p, placements: make_optimizer(p, Optimizer(), placements=placements)
        )

    executor = make()
    for step in range(6):
        if step == at:
            whole = [
                {name: part.placement.gather(part.local) for name, part in state.items()}
                for state in (executor.model_state(), executor.optimizer_state())
            ]
            assert any(name.startswith("compression/error/") for name in whole[1])
            executor = make()
            executor.load_state(*whole)
        executor.step(random_batch(spec, rows=4, seed=step).strided(rank, 2), lr=1e-2)
    return local(executor.model_state())


def test_what_powersgd_owes_outlives_an_interruption() -> None:
    straight, stopped = POOL.run(interrupted, 6, world=2), POOL.run(interrupted, 3, world=2)
    for one, other in zip(straight, stopped, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
