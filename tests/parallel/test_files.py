"""Checkpoint files that ranks write together under one plan are read under any other, with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ropewalk.checkpoint.commit import Attempt
from ropewalk.checkpoint.tensors import State, load, save
from ropewalk.parallel.mesh import Mesh
from tests.parallel.plans import CASES
from tests.parallel.pool import POOL
from tests.parallel.worlds import RATE, batches, start

pytestmark = pytest.mark.xdist_group("pool")

CHAINS = {
    "adamw": [
        "one process, 4 rows a microbatch",
        "tensor 2 with sequence, rich",
        "ZeRO-3 over 4, rich",
        "pipeline 2, zero-bubble",
        "replicate 2 x ZeRO-3 over 4",
        "ZeRO-2 over 2 x pipeline 2",
        "interleaved 2 x replicate 2 x tensor 2",
        "pipeline 2 x ZeRO-3 over 2 x ring 2",
        "ZeRO-3 over 2 x ring 2 x tensor 2",
    ],
    # Moments that are shorter than their parameters.
    "adafactor": [
        "adafactor, replicate 2",
        "adafactor, ZeRO-3 over 4",
        "adafactor, tensor 2",
        "adafactor, pipeline 2 x ZeRO-3 over 2 x tensor 2",
    ],
    "muon": ["muon, ZeRO-1 over 2", "muon, pipeline 2 x ZeRO-3 over 2 x tensor 2", "muon, tensor 2"],
    "tied": ["one process", "pipeline 2, 1F1B", "ZeRO-3 over 4", "tensor 2 x ulysses 2", "pipeline 2, GPipe"],
}
"""Plans of one model and optimizer: each goes on from the files of the one before it."""


def hand_over(rank: int, name: str, source: Path | None, target: Path) -> None:
    """Takes the state from `source`, or trains one, and saves it below `target`."""
    case = CASES[name]
    mesh = Mesh(case.plan, rank)
    executor, _ = start(case, mesh)
    if source:
        given = load(source)
        executor.load_state(given.model, given.optimizer)  # type: ignore[arg-type]
    else:
        for batch in batches(case.spec, 2):
            executor.step(batch.strided(mesh.data.rank, mesh.data.size), lr=RATE)
    state = State(
        step=2,
        tokens=0,
        seed=0,
        spec=case.spec,
        data={},
        model=executor.model_state(),
        optimizer=executor.optimizer_state(),
        tokenizer=b"{}",
    )
    save(target, state, attempt=Attempt(rank=rank, world=case.plan.world))


@pytest.mark.parametrize("chain", CHAINS)
def test_state_goes_through_the_files_of_every_plan_unchanged(chain: str, tmp_path: Path) -> None:
    source: Path | None = None
    for number, name in enumerate(CHAINS[chain]):
        target = tmp_path / str(number)
        POOL.run(hand_over, name, source, target, world=CASES[name].plan.world)
        (path,) = target.glob("step-*[0-9]")
        before, after = load(source or path), load(path)
        assert set(after.model) == set(CASES[name].spec.shapes())
        for kind in ("model", "optimizer"):
            old, new = getattr(before, kind), getattr(after, kind)
            assert old.keys() == new.keys(), name
            assert all(torch.equal(old[key], new[key]) for key in old), name
        source = path
