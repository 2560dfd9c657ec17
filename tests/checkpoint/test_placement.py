"""Placement of copies against brute force over every set of lost machines."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from ropewalk.checkpoint.tiers.peer_tier import Holders, PlacementKind, place_replicas, rings

from .survival import survival, survives

KINDS: list[PlacementKind] = ["groups", "ring"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_the_closed_form_equals_trying_every_set_of_lost_machines(kind: PlacementKind, copies: int) -> None:
    for machines in range(copies, 11):
        holders = place_replicas(machines, copies=copies, kind=kind)
        for lost in range(machines + 1):
            outcomes = [survives(holders, gone) for gone in combinations(range(machines), lost)]
            exact = survival(machines, copies=copies, kind=kind, lost=lost)
            assert exact == pytest.approx(sum(outcomes) / len(outcomes), abs=1e-12), (machines, lost)


@pytest.mark.parametrize("kind", KINDS)
def test_every_machine_keeps_its_own_and_holds_as_many_as_the_others(kind: PlacementKind) -> None:
    for machines in range(1, 12):
        for copies in range(1, machines + 1):
            holders = place_replicas(machines, copies=copies, kind=kind)
            assert all(held[0] == machine for machine, held in enumerate(holders))
            assert all(len(set(held)) == copies for held in holders)
            held_by = [sum(machine in held for held in holders) for machine in range(machines)]
            assert held_by == [copies] * machines


def test_the_papers_example_of_sixteen_machines() -> None:
    # Gemini, section 4: 16 machines, 2 copies, 2 lost: 93.3 % recover; with 3 lost 80.0 %.
    assert survival(16, copies=2, kind="groups", lost=2) == pytest.approx(1 - 8 / math.comb(16, 2))
    assert survival(16, copies=2, kind="groups", lost=2) == pytest.approx(0.933, abs=5e-4)
    assert survival(16, copies=2, kind="groups", lost=3) == pytest.approx(0.800, abs=5e-4)


def test_groups_never_survive_less_than_a_ring() -> None:
    for machines in range(2, 40):
        for copies in range(2, min(5, machines) + 1):
            for lost in range(machines + 1):
                by_groups = survival(machines, copies=copies, kind="groups", lost=lost)
                assert by_groups >= survival(machines, copies=copies, kind="ring", lost=lost)


def test_the_remainder_joins_the_last_group() -> None:
    assert rings(7, copies=2, kind="groups") == (2, 2, 3)
    assert rings(8, copies=2, kind="groups") == (2, 2, 2, 2)
    assert rings(7, copies=2, kind="ring") == (7,)


def survives_any_rack(holders: Holders, racks: list[int]) -> bool:
    lost = [[machine for machine, rack in enumerate(racks) if rack == gone] for gone in set(racks)]
    return all(survives(holders, machines) for machines in lost)


def test_losing_any_rack_loses_no_shard_where_racks_allow_it() -> None:
    for sizes in ([4, 4], [3, 3, 3], [4, 2, 2], [2, 2, 2, 2], [1, 2, 3]):
        racks = [rack for rack, size in enumerate(sizes) for _ in range(size)]
        holders = place_replicas(len(racks), copies=2, kind="groups", racks=racks)
        if max(sizes) <= len(racks) // 2 and len(racks) % 2 == 0:
            assert all(racks[a] != racks[b] for a, b in holders), sizes
            assert survives_any_rack(holders, racks)
    assert not survives_any_rack(place_replicas(4, copies=2, kind="groups"), [0, 0, 1, 1])
