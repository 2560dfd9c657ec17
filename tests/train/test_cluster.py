"""The measurements of `doctor cluster`: real groups, real folders."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.config.ranks import Ranks
from ropewalk.parallel.mesh import Mesh
from ropewalk.train.cluster import network
from ropewalk.train.cluster.brief import Brief
from ropewalk.train.cluster.control import Control
from ropewalk.train.cluster.storage import FILE, probe_folder, remove
from tests.parallel.pool import NCCL, POOL

pytestmark = pytest.mark.xdist_group("pool")

SECONDS = 0.002


def measure_all(rank: int, brief: Brief, late_s: float) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device()) if brief.device == "cuda" else torch.device("cpu")
    mesh = Mesh(brief.plan, rank)
    network.connect(mesh, brief, device)
    found: dict[str, Any] = {
        axis: network.measure_group(mesh.group(axis), kind, device=device, seconds=SECONDS)
        for axis, kind in network.axis_kinds(brief).items()
    }
    found["world"] = {
        kind: network.measure_group(mesh.world, kind, device=device, seconds=SECONDS)
        for kind in ("all_reduce", "all_gather", "all_to_all", "send")
    }
    off = late_s if rank == brief.plan.world - 1 else 0.0
    found["clock"] = network.clock_offset(mesh.control, lambda: time.time() - off)
    return found


def check_all(found: list[dict[str, Any]], brief: Brief) -> None:
    world = brief.plan.world
    for rank, each in enumerate(found):
        for kind in ("all_reduce", "all_gather", "all_to_all"):
            figures = each["world"][kind]
            assert figures["ranks"] == list(range(world))
            assert figures["bytes_per_s"] > 0
            assert figures["latency_s"] > 0
        for axis in network.axis_kinds(brief):
            assert rank in each[axis]["ranks"]
            assert len(each[axis]["ranks"]) == getattr(brief, axis)
    links = [(pair["source"], pair["target"]) for each in found for pair in each["world"]["send"]["pairs"]]
    assert sorted(links) == [(rank, (rank + 1) % world) for rank in range(world)]
    *others, late = (each["clock"] for each in found)
    # One machine has one clock: what is measured is wrong by at most half of a round trip.
    assert all(abs(clock["offset_s"]) <= clock["error_s"] + 1e-6 for clock in others)
    assert abs(late["offset_s"] - 5.0) <= late["error_s"] + 1e-6


def test_every_group_and_every_link_is_measured_and_a_late_clock_is_found() -> None:
    brief = Brief(device="cpu", pipeline=2, tensor=2)
    found = POOL.run(measure_all, brief, 5.0, world=4)
    check_all(found, brief)
    assert found[0]["pipeline"]["ranks"] == [0, 2]
    assert found[3]["tensor"]["ranks"] == [2, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_on_nccl() -> None:
    brief = Brief(device="cuda", shard=2)
    check_all(NCCL.run(measure_all, brief, 5.0, world=2), brief)


@pytest.mark.parametrize(
    ("kind", "factor"), [("all_reduce", 1.75), ("all_gather", 0.875), ("all_to_all", 0.875), ("send", 1.0)]
)
def test_bus_bandwidth_of_eight_ranks_is_that_of_nccl_tests(kind: network.Kind, factor: float) -> None:
    assert network.bus_factor(kind, 8) == factor


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_pairs_of_a_round_are_disjoint_and_all_rounds_make_a_ring(size: int) -> None:
    rounds = list(network.rounds(size))
    for pairs in rounds:
        members = [place for pair in pairs for place in pair]
        assert len(members) == len(set(members))
    assert sorted(pair for pairs in rounds for pair in pairs) == [(i, (i + 1) % size) for i in range(size)]


def test_every_axis_of_several_ranks_is_measured_by_what_it_sends_most() -> None:
    brief = Brief(device="cpu", pipeline=2, replicate=2, shard=2, context=2, tensor=2)
    kinds = {"pipeline": "send", "replicate": "all_reduce", "shard": "all_gather", "context": "send"}
    assert network.axis_kinds(brief) == {**kinds, "tensor": "all_reduce"}
    assert network.axis_kinds(dataclasses.replace(brief, context_method="ulysses"))["context"] == "all_to_all"
    assert network.axis_kinds(Brief(device="cpu", shard=2)) == {"shard": "all_gather"}


def probe(folders: list[Path], monkeypatch: pytest.MonkeyPatch, *, visible_s: float) -> list[dict[str, Any]]:
    """`probe_folder` by as many ranks, each with its own idea of the run directory."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    found: dict[int, dict[str, Any]] = {}
    controls = [Control(Ranks(rank=rank, world=len(folders)), timeout_s=60) for rank in range(len(folders))]

    def work(rank: int) -> None:
        found[rank] = probe_folder(
            folders[rank], controls[rank], seconds=0.001, timeout_s=60, measures=rank == 1, visible_s=visible_s
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(folders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    remove(folders[0], controls[0])
    return [found[rank] for rank in range(len(folders))]


def test_ranks_that_see_one_folder_see_files_and_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = probe([tmp_path / "run"] * 3, monkeypatch, visible_s=60)
    assert all(each["sees"] for each in (first, second, third))
    assert all(each["sees_rename"] and not each["torn"] for each in (second, third))
    assert min(second["write_bytes_per_s"], second["read_bytes_per_s"], second["commit_s"]) > 0
    assert "commit_s" not in third
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_folder_is_another_one_does_not_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    first, second = probe([tmp_path / "shared", tmp_path / "own"], monkeypatch, visible_s=0.1)
    assert (first["sees"], second["sees"]) == (True, False)
    assert second["path"] == str(tmp_path / "own")
    assert FILE not in second
