"""Adafactor with relative steps against torch's, transformers' and the paper's text."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply
from ropewalk.parallel.mesh import Mesh
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.plans import case
from tests.parallel.pool import POOL
from tests.parallel.worlds import gathered
from tests.tiny import random_batch, small_spec

pytestmark = pytest.mark.xdist_group("pool")

SPEC = small_spec(position="learned", norm="layer", bias=True, tie_embeddings=False)
STEPS = 30


def parameters() -> dict[str, torch.nn.Parameter]:
    """Of sizes from 1e-4, below epsilon 2, to 10."""
    named = dict(build(SPEC, seed=0, dtype=torch.float64).named_parameters())
    with torch.no_grad():
        for place, parameter in enumerate(named.values()):
            parameter *= 10.0 ** (place % 4 - 2)
    return named


def train(optimizer: Any, named: dict[str, torch.nn.Parameter], rates: list[float]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    for number, lr in enumerate(rates):
        for parameter in named.values():
            scale = 10.0 ** (number % 4 - 2)
            parameter.grad = torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * scale
        for group in optimizer.param_groups:
            if group["lr"] is not None:
                group["lr"] = lr
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def ours(rates: list[float], **settings: Any) -> dict[str, Tensor]:
    named = parameters()
    optimizer = make_optimizer(named, Optimizer(kind="adafactor", relative_step=True, **settings))
    return train(optimizer, named, rates)


def assert_same_way(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    start = {name: parameter.detach() for name, parameter in parameters().items()}
    for name, weight in expected.items():
        assert (got[name] - weight).norm() <= 1e-9 * (weight - start[name]).norm(), name


@pytest.mark.parametrize("rate", [0.01, 0.9])
def test_steps_are_those_of_torch(rate: float) -> None:
    """0.9 is above 1/sqrt(step) from the second step on."""
    rates = [rate * (1 + number / STEPS) for number in range(STEPS)]
    named = parameters()
    theirs = torch.optim.Adafactor(named.values(), eps=(1e-30, 1e-3), weight_decay=0.0)
    assert_same_way(ours(rates, weight_decay=0.0), train(theirs, named, rates))


def test_decay_is_that_of_torch() -> None:
    rates = [0.02] * STEPS
    named = parameters()
    matrices = [p for name, p in named.items() if name in ("head.weight", "blocks.0.mlp.up.weight")]
    theirs = torch.optim.Adafactor(matrices, eps=(1e-30, 1e-3), weight_decay=0.1)
    expected = train(theirs, named, rates)
    got = ours(rates, weight_decay=0.1)
    for name in ("head.weight", "blocks.0.mlp.up.weight"):
        torch.testing.assert_close(got[name], expected[name], rtol=1e-10, atol=1e-14)


def test_steps_at_a_constant_rate_of_a_hundredth_are_those_of_transformers() -> None:
    """Its relative step is min(0.01, 1/sqrt(step)), the paper's."""
    transformers = pytest.importorskip("transformers")
    named = parameters()
    theirs = transformers.Adafactor(named.values(), relative_step=True, scale_parameter=True, warmup_init=False)
    assert_same_way(ours([0.01] * STEPS, weight_decay=0.0), train(theirs, named, [0.01] * STEPS))


def test_a_relative_step_is_in_proportion_to_the_parameter() -> None:
    """The first update has an RMS of 1 at most: the way is max(0.001, RMS(X)) times the rate."""
    start = {name: parameter.detach().clone() for name, parameter in parameters().items()}
    got = ours([0.01], weight_decay=0.0)
    for name in ("blocks.0.attention_norm.bias", "norm.weight"):
        root = float(start[name].square().mean().sqrt())
        way = float((got[name] - start[name]).square().mean().sqrt())
        assert math.isclose(way, 0.01 * max(1e-3, root), rel_tol=1e-9), name


def test_the_setting_of_a_recipe_takes_effect_and_other_kinds_refuse_it() -> None:
    assert [key for key, _ in Optimizer(relative_step=True).check()] == ["relative_step"]
    assert list(Optimizer(kind="adafactor", relative_step=True).check()) == []
    absolute = parameters()
    plain = train(make_optimizer(absolute, Optimizer(kind="adafactor", weight_decay=0.0)), absolute, [0.01])
    assert any(not torch.equal(plain[name], each) for name, each in ours([0.01], weight_decay=0.0).items())


WITHOUT_BIAS = small_spec()
"""The gradient of a key's bias is 0 but for rounding, which Adafactor would divide by its own size."""


def three_steps(rank: int, degrees: dict[str, int]) -> dict[str, Any]:
    plan = case("", batch_size=8, **degrees).plan
    mesh = Mesh(plan, rank)
    settings = Optimizer(kind="adafactor", relative_step=True)
    executor = apply(
        plan,
        build(WITHOUT_BIAS, seed=1, dtype=torch.float64),
        mesh,
        lambda named, placements: make_optimizer(named, settings, spec=WITHOUT_BIAS, placements=placements),
    )
    batch = random_batch(WITHOUT_BIAS, rows=8).strided(mesh.data.rank, mesh.data.size)
    for _ in range(3):
        executor.step(batch, lr=0.05)
    return gathered(executor.model_state())


def test_ranks_that_hold_parts_take_the_steps_of_the_whole() -> None:
    (alone,) = POOL.run(three_steps, {}, world=1)
    for found in POOL.run(three_steps, {"shard": 2, "zero": 3}, world=2):
        for name, weight in alone.items():
            assert abs(found[name] - weight).max() < 1e-10, name
