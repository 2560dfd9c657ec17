"""Process groups: each rank makes its own and no others, as many as every other rank."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ropewalk.config.nccl import DUMPS, ERRORS
from ropewalk.config.ranks import Ranks
from ropewalk.parallel.mesh import Mesh, join
from ropewalk.plan.plan import Plan
from tests.parallel.plans import case
from tests.parallel.pool import POOL

pytestmark = pytest.mark.xdist_group("pool")

MOST_GROUPS = 20


def groups_made(rank: int, plan: Plan) -> list[tuple[int, ...]]:
    """The members of the groups that a rank asks torch for."""
    sound, found = dist.new_group, []

    def count(ranks: list[int], **options: object) -> object:
        found.append(tuple(ranks))
        return sound(ranks, **options)

    dist.new_group = count
    try:
        mesh = Mesh(plan, rank)
    finally:
        dist.new_group = sound
    assert all(mesh.group(axis).size == mesh.degrees[axis] for axis in mesh.degrees)
    return found


@pytest.mark.parametrize(
    ("plan", "world"),
    [
        ({"pipeline": 2, "replicate": 2, "tensor": 2}, 8),
        ({"pipeline": 2, "chunks": 2, "schedule": "interleaved", "shard": 2, "zero": 3, "context": 2}, 8),
        ({"pipeline": 4, "balance": False}, 4),
    ],
    ids=str,
)
def test_a_rank_makes_only_its_own_groups_and_as_many_as_the_others(plan: dict, world: int) -> None:
    made = POOL.run(groups_made, case("", "deep", **plan).plan, world=world)
    assert all(rank in members for rank, own in enumerate(made) for members in own)
    assert len({len(own) for own in made}) == 1
    assert len(made[0]) <= MOST_GROUPS


@pytest.mark.parametrize(("backend", "expected"), [("nccl", 12), ("gloo", 11)])
def test_the_number_of_groups_does_not_grow_with_the_ranks(
    backend: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 ranks, worked out by the code itself: torch is asked for as many groups as with 128, by ranks at the ends
    of the pipeline and between them. docs/guides/clusters.md has the numbers."""
    calls: list[int] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: calls.append(len(ranks)) or object())
    monkeypatch.setattr(dist, "get_backend", lambda *_: backend)
    monkeypatch.setattr(Mesh, "_connect_channels", lambda mesh: None)
    plan = Plan(device="cpu", precision="fp32", batch_size=8, microbatch_size=1, sequence_length=8)
    settings = {"pipeline": 8, "chunks": 2, "schedule": "interleaved", "tensor": 8, "zero": 3}
    for shard, rank in ((2, 5), (64, 0), (64, 1234), (64, 4095)):
        calls.clear()
        Mesh(dataclasses.replace(plan, shard=shard, **settings), rank)
        assert len(calls) == expected <= MOST_GROUPS
    page = (Path(__file__).parents[2] / "docs/guides/clusters.md").read_text()
    assert "12 calls, as with 128" in page


def test_nccl_leaves_the_failure_of_a_rank_to_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings are there before the first process group is."""
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.append(dict(os.environ)))
    plan = Plan(device="cuda", precision="fp32", batch_size=2, microbatch_size=1, sequence_length=8, replicate=2)
    for name in (ERRORS, DUMPS):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    join(plan, Ranks(world=2))
    assert {name: seen[0][name] for name in (ERRORS, DUMPS)} == {ERRORS: "0", DUMPS: "0"}
