"""Training with narrower state or activations ends where wide training does, nearer than another seed would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.load.batch import Batch
from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.tiny import small_spec

SPEC = small_spec(vocabulary=32, sequence_length=32, width=32, mlp_width=64)
STEPS, ROWS, SEEDS = 120, 8, (0, 1, 2)


def text(rows: int, draw: torch.Generator) -> Tensor:
    """Rows of a Markov chain, in which a few tokens often follow each."""
    likely = torch.softmax(3 * torch.randn(32, 32, generator=torch.Generator().manual_seed(7)), 1)
    tokens = [torch.randint(32, (rows,), generator=draw)]
    for _ in range(SPEC.sequence_length):
        tokens.append(torch.multinomial(likely[tokens[-1]], 1, generator=draw).squeeze(1))
    return torch.stack(tokens, 1)


def curve(kind: str, seed: int, **way: Any) -> list[float]:
    """The loss of every step."""
    plan = Plan(device="cpu", precision="fp32", batch_size=ROWS, microbatch_size=ROWS, **way)

    def make(named: Any, placements: Any) -> torch.optim.Optimizer:
        return make_optimizer(named, Optimizer(kind=kind), spec=SPEC, placements=placements)

    executor = apply(plan, build(SPEC, seed=seed), None, make, clip_norm=1.0)
    draw = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(STEPS):
        tokens = text(ROWS, draw)
        batch = Batch(
            tokens=tokens[:, :-1],
            targets=tokens[:, 1:],
            weight=torch.ones(ROWS, SPEC.sequence_length),
            positions=torch.arange(SPEC.sequence_length).expand(ROWS, -1),
            documents=torch.zeros(ROWS, SPEC.sequence_length, dtype=torch.int32),
        )
        losses.append(executor.step(batch, lr=1e-2 * (1 - step / STEPS)).loss)
    return torch.stack(losses).tolist()


def end(losses: list[float]) -> float:
    return sum(losses[-20:]) / 20


@pytest.fixture(scope="module")
def wide() -> dict[int, list[float]]:
    torch.set_num_threads(1)
    return {seed: curve("adamw", seed) for seed in SEEDS}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param("adamw-8bit", {}, id="state", marks=pytest.mark.slow),
        pytest.param("adamw", {"saved_activations": "8-bit"}, id="activations", marks=pytest.mark.slow),
        pytest.param("adamw-8bit", {"saved_activations": "8-bit"}, id="both"),
    ],
)
def test_eight_bits_end_nearer_to_wide_training_than_another_seed(
    kind: str, way: dict[str, Any], wide: dict[int, list[float]]
) -> None:
    ends = [end(losses) for losses in wide.values()]
    assert max(ends) < wide[0][0] - 1  # there was something to learn
    spread = max(ends) - min(ends)
    for seed in SEEDS:
        narrow = curve(kind, seed, **way)
        assert narrow[0] == pytest.approx(wide[seed][0], rel=1e-6)  # the same start
        assert narrow[-1] != wide[seed][-1]
        assert abs(end(narrow) - end(wide[seed])) < spread


def test_masks_of_a_bit_give_the_very_same_curve(wide: dict[int, list[float]]) -> None:
    assert curve("adamw", 0, saved_activations="packed") == wide[0]
