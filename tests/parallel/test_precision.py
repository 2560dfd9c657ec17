"""Narrow numbers: bfloat16 weights with float32 masters, and float16 with a loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply, local
from ropewalk.parallel.executor import Executor, StepHooks
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.precision import LossScale
from ropewalk.plan.forecast import Precision
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.plans import MODELS, case
from tests.parallel.pool import POOL
from tests.parallel.worlds import batches, gathered
from tests.tiny import random_batch, small_spec

SPEC = small_spec()
ROWS = 8


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def executor(precision: Precision, *, microbatch: int = 4) -> Executor:
    plan = Plan(device="cpu", precision=precision, batch_size=ROWS, microbatch_size=microbatch)
    return apply(plan, build(SPEC, seed=0), None, lambda p, _: make_optimizer(p, Optimizer()), clip_norm=1.0)


def scale_of(made: Executor) -> float:
    return local(made.optimizer_state())["loss_scale/value"].item()


def set_scale(made: Executor, value: float) -> None:
    made.load_state(local(made.model_state()), {"loss_scale/value": torch.tensor(value)})


def copy_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("precision", ["bf16-pure", "fp16"])
def test_losses_stay_close_to_fp32(precision: Precision) -> None:
    wide, narrow = executor("fp32"), executor(precision)
    # Longer, while eight rows are learned by heart, roundings grow: 1.4 % after 30 steps, 0.4 % in bf16.
    for _ in range(12):
        losses = [each.step(random_batch(SPEC, rows=ROWS), lr=1e-2).loss.item() for each in (wide, narrow)]
        # bfloat16 has 8 bits: 0.4 % a rounding, and the loss is a mean of many.
        assert losses[1] == pytest.approx(losses[0], rel=4e-3)
    # From ln 61 = 4.1: there was something to follow.
    assert losses[0] < 3.2


def test_the_model_computes_in_bfloat16_and_the_optimizer_in_float32() -> None:
    made = executor("bf16-pure")
    made.step(random_batch(SPEC, rows=ROWS), lr=1e-3)
    masters = local(made.model_state())
    assert {p.dtype for p in made.model.parameters()} == {torch.bfloat16}
    assert {t.dtype for t in [*masters.values(), *local(made.optimizer_state()).values()]} == {torch.float32}
    for name, weight in made.model.named_parameters():
        assert torch.equal(weight, masters[name].bfloat16())
        assert weight.grad is None


def test_steps_too_small_for_bfloat16_add_up() -> None:
    made = executor("bf16-pure")
    start = {name: weight.detach().clone() for name, weight in made.model.named_parameters()}
    for _ in range(100):
        made.step(random_batch(SPEC, rows=ROWS), lr=2e-5)
    scale = "norm.weight"
    # A step of 2e-5 is lost beside 1, where bfloat16 numbers are 4e-3 apart; a hundred of them are not.
    assert (local(made.model_state())[scale] - 1).abs().max() > 1.5e-3
    assert any(not torch.equal(weight, start[name]) for name, weight in made.model.named_parameters())


@pytest.mark.parametrize("precision", ["bf16-pure", "fp16"])
def test_accumulation_is_the_large_batch(precision: Precision) -> None:
    whole, parts = executor(precision, microbatch=ROWS), executor(precision, microbatch=1)
    gradients: list[dict[str, Tensor]] = []
    for each in (whole, parts):
        each.hooks.on_gradients.append(lambda g: gradients.append(copy_of(g)))  # type: ignore[arg-type]
        each.step(random_batch(SPEC, rows=ROWS), lr=1e-3)
    for name, expected in gradients[0].items():
        assert expected.dtype == torch.float32
        # One rounding to bfloat16 of a microbatch's gradient, not one for each sum.
        assert (gradients[1][name] - expected).norm() < 8e-3 * expected.norm(), name


def test_scaled_gradients_are_given_back_their_size() -> None:
    norms = []
    for value in (2.0**4, 2.0**12):
        made = executor("fp16")
        set_scale(made, value)
        norms.append(made.step(random_batch(SPEC, rows=ROWS), lr=1e-3).grad_norm.item())
    true = executor("fp32").step(random_batch(SPEC, rows=ROWS), lr=1e-3).grad_norm.item()
    assert norms == pytest.approx([true, true], rel=5e-3)


def test_an_overflow_skips_the_update_and_halves_the_scale() -> None:
    made = executor("fp16")
    made.step(random_batch(SPEC, rows=ROWS), lr=1e-3)
    set_scale(made, 2.0**40)
    before = copy_of({**local(made.model_state()), **local(made.optimizer_state())})
    result = made.step(random_batch(SPEC, rows=ROWS), lr=1e-3)
    assert (result.skipped.item(), result.loss_scale.item()) == (1, 2.0**40)  # type: ignore[union-attr]
    assert torch.isfinite(result.loss)
    after = {**local(made.model_state()), **local(made.optimizer_state())}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed <= {"loss_scale/value", "loss_scale/good_steps"}
    assert scale_of(made) == 2.0**39


def test_the_scale_falls_until_steps_are_taken_again() -> None:
    made = executor("fp16")
    set_scale(made, 2.0**30)
    skipped = [made.step(random_batch(SPEC, rows=ROWS), lr=1e-3).skipped.item() for _ in range(20)]
    assert skipped == sorted(skipped, reverse=True)
    assert 0 < sum(skipped) < 20
    assert scale_of(made) == 2.0 ** (30 - sum(skipped))


def test_the_scale_doubles_after_enough_good_steps_in_a_row() -> None:
    scale = LossScale(torch.device("cpu"), start=4.0, grow_after=3)
    seen = []
    for skipped in (0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1):
        scale.update(torch.tensor(float(skipped)))
        seen.append(scale.value.item())
    assert seen == [4, 4, 2, 2, 2, 4, 4, 2, 1, 1, 1]


@pytest.mark.parametrize("precision", ["bf16-pure", "fp16"])
def test_state_taken_over_goes_on_the_same(precision: Precision) -> None:
    first, second = executor(precision), executor(precision)
    for number in range(3):
        first.step(random_batch(SPEC, rows=ROWS, seed=number), lr=1e-2)
    second.load_state(copy_of(local(first.model_state())), copy_of(local(first.optimizer_state())))
    for each in (first, second):
        each.step(random_batch(SPEC, rows=ROWS, seed=9), lr=1e-2)
    for mine, theirs in (
        (local(first.model_state()), local(second.model_state())),
        (local(first.optimizer_state()), local(second.optimizer_state())),
    ):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_scoring_alone_leaves_the_weights_as_they_are() -> None:
    model = build(SPEC, seed=0)
    plan = Plan(device="cpu", precision="bf16-pure", batch_size=ROWS, microbatch_size=ROWS)
    scores = apply(plan, model, None, None).score(random_batch(SPEC, rows=ROWS))
    assert scores.log_probabilities.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def in_pure_bfloat16(rank: int, plan: Plan, steps: int) -> dict[str, np.ndarray]:
    """The gradients of the first step and the float32 weights after some steps, whole, without clipping."""
    each, mesh = MODELS["deep"], Mesh(plan, rank)
    first: dict[str, Tensor] = {}

    def look(gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            first.setdefault(name, gradient.clone())

    made = apply(
        plan,
        build(each, seed=1),
        mesh,
        lambda named, placements: make_optimizer(named, Optimizer(), spec=each, placements=placements),
        hooks=StepHooks(on_gradients=[look]),
    )
    for batch in batches(each, steps):
        made.step(batch.strided(mesh.data.rank, mesh.data.size), lr=1e-2)
    placements = {name: part.placement for name, part in made.model_state().items()}
    gradients = {f"gradient/{n}": placements[n].gather(g).numpy().copy() for n, g in first.items() if n in placements}
    return gradients | gathered(made.model_state())


def pure(**settings: Any) -> Plan:
    return case("", "deep", precision="bf16-pure", **settings).plan


@pytest.mark.xdist_group("pool")
@pytest.mark.parametrize("zero", [2, 3])
def test_sharded_bfloat16_has_the_bits_of_replicas(zero: int) -> None:
    """Of one microbatch a rank both add up the same two numbers; clipping would divide by norms of another order."""
    expected = POOL.run(in_pure_bfloat16, pure(replicate=2, microbatch_size=4), 3, world=2)[0]
    found = POOL.run(in_pure_bfloat16, pure(shard=2, zero=zero, microbatch_size=4), 3, world=2)[0]
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


@pytest.mark.xdist_group("pool")
def test_sharded_gradients_of_microbatches_are_added_up_in_float32() -> None:
    """Of matrices, each microbatch's gradient is bfloat16 in any case."""
    expected = POOL.run(in_pure_bfloat16, pure(replicate=2, microbatch_size=1), 1, world=2)[0]
    found = POOL.run(in_pure_bfloat16, pure(shard=2, zero=1, microbatch_size=1), 1, world=2)[0]
    matrices = [name for name in expected if name.startswith("gradient/blocks.") and expected[name].ndim == 2]
    assert matrices
    for name in matrices:
        assert np.array_equal(found[name], expected[name]), name


@pytest.mark.xdist_group("pool")
@pytest.mark.parametrize("settings", [{}, {"shard": 2, "zero": 3}], ids=["one", "ZeRO-3"])
def test_gradients_that_a_pipeline_computes_later_reach_the_masters(settings: dict[str, Any]) -> None:
    plans = [pure(pipeline=2, schedule=schedule, **settings) for schedule in ("1f1b", "zero-bubble")]
    soon, later = (POOL.run(in_pure_bfloat16, plan, 1, world=plan.world)[0] for plan in plans)
    for name in (name for name in soon if name.startswith("gradient/")):
        assert np.allclose(later[name], soon[name], rtol=1e-2, atol=1e-2 * np.abs(soon[name]).max()), name
