"""Process groups: each rank makes its own and no others, as many as every other rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch.distributed as dist

from ropewalk.parallel.mesh import Mesh
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


def test_the_number_of_groups_does_not_grow_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 ranks, worked out by the code itself: torch is asked for as many groups as with 32."""
    calls: list[int] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: calls.append(len(ranks)) or object())
    monkeypatch.setattr(dist, "get_backend", lambda *_: "gloo")
    counts = {}
    for shard, rank in ((2, 5), (64, 1234)):
        plan = Plan(device="cpu", precision="fp32", batch_size=8, microbatch_size=1, sequence_length=8)
        settings = {"pipeline": 8, "chunks": 2, "schedule": "interleaved", "tensor": 8, "shard": shard, "zero": 3}
        calls.clear()
        Mesh(dataclasses.replace(plan, **settings), rank)
        counts[shard] = len(calls)
    assert counts[2] == counts[64] <= MOST_GROUPS
