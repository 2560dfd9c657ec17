"""Rows drawn by importance: the step is unbiased, and every rank learns the loss of every row."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from ropewalk.load.batch import Batch
from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import Executor, StepHooks
from ropewalk.parallel.mesh import Mesh
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.plans import Case, case
from tests.parallel.pool import POOL
from tests.parallel.worlds import batches

WEIGHTS = torch.tensor([3.0, 0.25, 1.5, 0.5, 2.0, 1.0, 0.75, 0.125])


def drawn(spec, count: int = 1) -> Batch:  # type: ignore[no-untyped-def]
    """Eight rows in which some targets do not count, with the weights of their draws."""
    (batch,) = batches(spec, count)
    counted = (batch.weight > 0).float()
    return Batch(batch.tokens, batch.targets, counted * WEIGHTS[:, None], batch.positions, batch.documents)


def start(each: Case, mesh: Mesh | None, points: StepHooks | None = None) -> Executor:
    torch.set_num_threads(1)
    make = functools.partial(_optimizer, spec=each.spec)
    model = build(each.spec, seed=1, dtype=torch.float64)
    return apply(each.plan, model, mesh, make, hooks=points, draws=True)


def _optimizer(parameters, _placements, spec):  # type: ignore[no-untyped-def]
    return make_optimizer(parameters, Optimizer(), spec=spec)


def stepped(rank: int, each: Case) -> tuple[float, list[float]]:
    """A rank's job: the loss of a step, and that of each row."""
    mesh = Mesh(each.plan, rank)
    result = start(each, mesh).step(drawn(each.spec).strided(mesh.data.rank, mesh.data.size), lr=0.0)
    assert result.sequence_losses is not None
    return float(result.loss), result.sequence_losses.tolist()


def by_hand(each: Case) -> tuple[float, np.ndarray]:
    """The weighted sum over the number of targets that count, and each row's own mean, from log-probabilities."""
    batch = drawn(each.spec)
    losses = -start(case("one", each.model), None).score(batch).log_probabilities
    counted = (batch.weight > 0).double()
    expected = (losses * batch.weight.double()).sum() / counted.sum()
    with np.errstate(invalid="ignore"):
        return float(expected), ((losses * counted).sum(1) / counted.sum(1)).numpy()


PLANS = [
    case("one process", microbatch_size=2),
    case("one process, one microbatch", microbatch_size=8),
    case("2 devices", devices=2, microbatch_size=2),
]
WORLDS = [
    case("replicate 2", replicate=2, microbatch_size=2),
    case("pipeline 2", pipeline=2, microbatch_size=2),
]
SLOW = [
    case("ring 2", context=2, microbatch_size=2),
    case("tensor 2", tensor=2, microbatch_size=2),
    case("ZeRO-3 over 2, exact", shard=2, zero=3, exact=True),
    case("replicate 2 x pipeline 2", replicate=2, pipeline=2),
    case("replicate 2, balanced", "rich", replicate=2, balance=True, microbatch_size=2),
]


def check(each: Case, found: list[tuple[float, list[float]]]) -> None:
    loss, rows = by_hand(each)
    for mine, losses in found:
        if not each.spec.dropout:
            assert mine == pytest.approx(loss, rel=1e-6)
            np.testing.assert_allclose(losses, rows, rtol=1e-6)
        assert losses[1:] == found[0][1][1:], "ranks see the same"
        assert np.isnan(losses[0]), "nothing of the first row counts"


@pytest.mark.parametrize("each", PLANS, ids=lambda each: each.name)
def test_a_step_tells_the_loss_of_every_row(each: Case) -> None:
    check(each, [stepped(0, each)])


@pytest.mark.xdist_group("pool")
@pytest.mark.parametrize(
    "each", [*WORLDS, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)], ids=lambda each: each.name
)
def test_every_rank_learns_the_loss_of_every_row(each: Case) -> None:
    check(each, POOL.run(stepped, each, world=each.plan.world))


def test_the_expected_gradient_of_a_weighted_draw_is_that_of_the_mean_over_all_rows() -> None:
    one = case("one row", batch_size=1)
    gradients: dict[str, Tensor] = {}
    points = StepHooks(on_gradients=[lambda named: gradients.update({k: v.clone() for k, v in named.items()})])
    executor = start(one, None, points)
    everything = Batch.of_rows(torch.randint(0, 61, (6, 17), generator=torch.Generator().manual_seed(5)))
    probability = torch.tensor([0.4, 0.05, 0.2, 0.15, 0.1, 0.1], dtype=torch.float64)
    loss, mean = 0.0, dict.fromkeys(gradients, torch.zeros(()))
    for number, p in enumerate(probability):
        row = everything.rows(torch.tensor([number]))
        weighted = Batch(row.tokens, row.targets, row.weight.double() / (6 * p), row.positions, row.documents)
        result = executor.step(weighted, lr=0.0)
        loss += float(p) * float(result.loss)
        mean = {name: mean.get(name, 0.0) + p * gradient for name, gradient in gradients.items()}
    expected = start(case("all rows", batch_size=6), None, points).step(everything, lr=0.0)
    assert loss == pytest.approx(float(expected.loss), rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(mean[name], gradient, rtol=1e-9, atol=1e-12)
