"""What the table of `doctor cluster` means: who is named, and with which remedy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest

from ropewalk.flow.cluster_doctor.findings import Finding, listed
from ropewalk.flow.cluster_doctor.verdict import judge
from ropewalk.train.cluster.brief import Brief

WORLD = 8
"""Four ranks on each of the hosts `hemp` and `jute`."""


def answered(values: Sequence[Any]) -> dict[str, Any]:
    answers = {str(rank): value for rank, value in enumerate(values)}
    return {"values": answers, "errors": {}, "not_begun": [], "not_ended": [], "seconds": 0.1}


def host(rank: int) -> str:
    return "hemp" if rank < 4 else "jute"


def facts(rank: int) -> dict[str, Any]:
    gpu = {"uuid": f"GPU-{rank}", "name": "H200", "gpus": 4, "memory_bytes": 140 << 30, "free_bytes": 139 << 30}
    gpu |= {"used_by_others_bytes": 0, "ecc_errors": 0, "driver": "570"}
    limits = {"open_files": 1 << 20, "open_files_now": 1024, "shared_memory_bytes": 1 << 34}
    memory = {"memory_bytes": 1 << 40, "available_bytes": 1 << 40}
    versions = {"python": "3.11.7", "torch": "2.13.0", "NCCL": "2.27.3", "ropewalk": "0.1.0", "sources": "abc"}
    return {
        "gpu": gpu,
        "host": {"cores": 64, "threads": 16, "processor": "x", **limits, **memory},
        "versions": versions,
    }


def group_figures(ranks: list[int], bytes_per_s: float = 11.8e9, latency_s: float = 2e-5) -> dict[str, Any]:
    return {"ranks": ranks, "operation": "all_gather", "latency_s": latency_s, "bytes_per_s": bytes_per_s}


def link(rank: int, bytes_per_s: float = 11.8e9) -> dict[str, Any]:
    pair = {"source": rank, "target": (rank + 1) % WORLD, "latency_s": 2e-5, "bytes_per_s": bytes_per_s}
    return {"ranks": list(range(WORLD)), "operation": "send", "pairs": [pair]}


def sound() -> dict[str, Any]:
    """A table of a launch in which all is well."""
    brief = Brief(device="cuda", replicate=2, shard=4, memory_bytes=1 << 36, checkpoint_bytes=1 << 34, checkpoints=3)
    storage = {"path": "runs", "sees": True, "seen_after_s": 0.01, "sees_rename": True, "rename_after_s": 0.02}
    speed = {"write_bytes_per_s": 1e9, "read_bytes_per_s": 2e9, "commit_s": 0.004, "free_bytes": 1 << 40, "torn": False}
    ranks = range(WORLD)
    steps = {
        "ranks": answered([{"host": host(rank), "local_rank": rank % 4} for rank in ranks]),
        "facts": answered([facts(rank) for rank in ranks]),
        "matmul": answered([{"flops": 7e14} for _ in ranks]),
        "storage": answered([storage | (speed if rank % 4 == 0 else {}) for rank in ranks]),
        "process group": answered([{"backend": "nccl"}] * WORLD),
        "clocks": answered([{"offset_s": 0.002, "error_s": 1e-4}] * WORLD),
        "control": answered([group_figures(list(ranks)) | {"operation": "all_reduce"}] * WORLD),
        "axis shard": answered([group_figures([0, 1, 2, 3] if rank < 4 else [4, 5, 6, 7]) for rank in ranks]),
        "ring": answered([link(rank) for rank in ranks]),
    }
    table = {"world": WORLD, "timeout_s": 60.0, "brief": brief.tree(), "terminated": False, "not_reached": []}
    return copy.deepcopy(table | {"steps": steps})


def values(table: dict[str, Any], step: str) -> dict[str, Any]:
    return table["steps"][step]["values"]


def faults(table: dict[str, Any], **named: Any) -> list[Finding]:
    return [finding for finding in judge(table, **named) if finding.outcome != "ok"]


def only_fault(table: dict[str, Any], **named: Any) -> Finding:
    (found,) = faults(table, **named)
    assert found.remedy
    return found


def test_a_sound_launch_is_ok_in_every_check() -> None:
    findings = judge(sound())
    assert {finding.outcome for finding in findings} == {"ok"}
    checks = ["ranks", "devices", "host", "versions", "matmul", "clocks", "control", "axis shard", "links", "storage"]
    assert [finding.check for finding in findings] == [*checks, "space", "plan memory"]


def test_a_slow_group_is_named_with_its_host_and_the_speed_of_the_others() -> None:
    table = sound()
    for rank in range(4, 8):
        values(table, "axis shard")[str(rank)]["bytes_per_s"] = 5.0e9
    found = only_fault(table)
    assert (found.check, found.outcome, found.ranks) == ("axis shard", "slow", (4, 5, 6, 7))
    assert found.found == "ranks 4-7: 5 GB/s, 20 us; the others 11.8 GB/s, 20 us"
    assert "jute" in found.remedy


def test_a_group_is_as_slow_as_its_slowest_rank() -> None:
    table = sound()
    values(table, "axis shard")["6"]["latency_s"] = 1e-3
    assert only_fault(table).found.startswith("ranks 4-7: 11.8 GB/s, 1 ms; the others 11.8 GB/s, 20 us")


def test_a_host_whose_links_are_all_slow_is_named() -> None:
    table = sound()
    for sender in (4, 5):
        values(table, "ring")[str(sender)]["pairs"][0]["bytes_per_s"] = 1.1e9
    found = only_fault(table)
    assert (found.check, found.outcome) == ("links", "slow")
    assert "all links of rank 5 are slow: check the network card and cable of jute" in found.remedy


def test_a_network_that_is_slow_everywhere_is_noticed_by_its_floor() -> None:
    table = sound()
    for value in values(table, "axis shard").values():
        value["bytes_per_s"] = 0.9e9
    found = only_fault(table)
    assert (found.outcome, found.ranks) == ("slow", tuple(range(8)))
    assert found.expected.startswith("at least 4 GB/s")


def test_links_between_hosts_are_not_compared_with_those_within() -> None:
    table = sound()
    for sender in (3, 7):
        values(table, "ring")[str(sender)]["pairs"][0]["bytes_per_s"] = 2e9
    assert faults(table) == []


def test_missing_ranks_are_named_and_nothing_else_is_judged() -> None:
    table = sound()
    table |= {"brief": None, "steps": {"ranks": table["steps"]["ranks"]}}
    for rank in (2, 5, 6):
        del values(table, "ranks")[str(rank)]
    table["steps"]["ranks"]["not_begun"] = [2, 5, 6]
    found = only_fault(table)
    assert (found.outcome, found.ranks) == ("missing", (2, 5, 6))
    assert found.found == "ranks 2, 5-6 of 8 did not start"
    assert "within 60 s" in found.expected


def test_a_rank_that_does_not_answer_in_a_step_is_named_before_those_that_wait_for_it() -> None:
    table = sound()
    step = table["steps"]["axis shard"]
    del table["steps"]["ring"]
    step |= {"values": {}, "not_begun": [6], "not_ended": [4, 5, 7]}
    table["not_reached"] = ["ring"]
    first, second = faults(table)
    assert (first.check, first.outcome, first.ranks) == ("axis shard", "missing", (6,))
    assert first.found == "rank 6 (jute) did not begin this step"
    assert (second.check, second.found) == ("not checked", "ring")


def test_an_error_of_a_rank_is_told_with_its_host() -> None:
    table = sound()
    del values(table, "matmul")["3"]
    table["steps"]["matmul"]["errors"] = {"3": "RuntimeError: CUDA error"}
    found = only_fault(table)
    assert (found.check, found.outcome, found.ranks) == ("matmul", "wrong", (3,))
    assert found.found == "rank 3 on hemp: RuntimeError: CUDA error"


def test_processes_that_ended_by_themselves_are_told_with_their_last_words() -> None:
    table = {"world": 2, "timeout_s": 60.0, "brief": None, "steps": {}}
    found = judge(table, failed={0: "was killed by signal 9: out of memory"})
    assert [(finding.check, finding.outcome) for finding in found] == [
        ("rank 0", "missing"),
        ("ranks", "missing"),
        ("not checked", "missing"),
    ]
    assert found[0].found == "was killed by signal 9: out of memory"


def test_differing_versions_are_named_against_the_majority() -> None:
    table = sound()
    values(table, "facts")["5"]["versions"]["NCCL"] = "2.21.5"
    found = only_fault(table)
    assert (found.check, found.outcome, found.ranks) == ("versions", "wrong", (5,))
    assert found.found == "NCCL: rank 5 (jute): 2.21.5"
    assert found.expected == "2.27.3, as on the others"


@pytest.mark.parametrize(("offset_s", "said"), [(3.2, "3.2 s behind"), (-1.6, "1.6 s ahead of")])
def test_a_clock_that_is_off_is_named_by_host(offset_s: float, said: str) -> None:
    table = sound()
    for rank in range(4, 8):
        values(table, "clocks")[str(rank)] = {"offset_s": offset_s, "error_s": 1e-4}
    found = only_fault(table)
    assert (found.check, found.outcome, found.ranks) == ("clocks", "wrong", (4, 5, 6, 7))
    assert found.found == f"jute: {said} rank 0's host"


def test_an_offset_within_the_error_of_its_measurement_is_no_fault() -> None:
    table = sound()
    values(table, "clocks")["4"] = {"offset_s": 1.5, "error_s": 0.8}
    for rank in (5, 6, 7):
        values(table, "clocks")[str(rank)] = {"offset_s": 1.5, "error_s": 0.9}
    assert faults(table) == []


def test_a_slow_device_is_named_against_the_median() -> None:
    table = sound()
    values(table, "matmul")["2"]["flops"] = 3e14
    found = only_fault(table)
    assert (found.check, found.outcome, found.ranks) == ("matmul", "slow", (2,))
    assert "300 TFLOP/s" in found.found
    assert "700 TFLOP/s" in found.expected


def test_two_ranks_on_one_gpu_are_named() -> None:
    table = sound()
    values(table, "facts")["1"]["gpu"]["uuid"] = "GPU-0"
    found = only_fault(table)
    assert (found.check, found.outcome, found.ranks) == ("devices", "wrong", (0, 1))
    assert found.found == "ranks 0-1 share GPU-0 of hemp"


@pytest.mark.parametrize(
    ("gpu", "outcome", "said"),
    [
        ({"used_by_others_bytes": 5 << 30}, "wrong", "other processes use 5.37 GB"),
        ({"ecc_errors": 2}, "wrong", "2 ECC errors"),
        ({"name": "A100"}, "slow", "rank 3 on hemp has A100"),
    ],
)
def test_a_gpu_that_is_in_use_broken_or_of_another_kind_is_named(gpu: dict[str, Any], outcome: str, said: str) -> None:
    table = sound()
    values(table, "facts")["3"]["gpu"] |= gpu
    found = only_fault(table)
    assert (found.check, found.outcome, found.ranks) == ("devices", outcome, (3,))
    assert said in found.found


def test_a_rank_without_a_gpu_is_named() -> None:
    table = sound()
    values(table, "facts")["3"]["gpu"] = {"gpus": 3}
    found = faults(table)[0]
    assert (found.check, found.outcome, found.ranks) == ("devices", "missing", (3,))
    assert "LOCAL_RANK 3, but torch sees 3 GPUs" in found.found


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"open_files": 1000}, "jute: 1000 open files"),
        ({"shared_memory_bytes": 64 << 20}, "jute: 67.1 MB free in /dev/shm"),
        ({"threads": 32}, "jute: 4 ranks with 128 threads on 64 cores"),
    ],
)
def test_limits_of_a_host_are_named(limits: dict[str, int], said: str) -> None:
    table = sound()
    for rank in range(4, 8):
        values(table, "facts")[str(rank)]["host"] |= limits
    found = only_fault(table)
    assert found.check == "host"
    assert said in found.found


def test_a_folder_that_a_rank_does_not_see_is_missing() -> None:
    table = sound()
    for rank in range(4, 8):
        values(table, "storage")[str(rank)] = {"path": "elsewhere", "sees": False, "seen_after_s": 10.0}
    found = only_fault(table)
    assert (found.check, found.outcome, found.ranks) == ("storage", "missing", (4, 5, 6, 7))
    assert "ranks 4-7 (jute) do not see in elsewhere" in found.found


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        ({"torn": True}, "wrong"),
        ({"sees_rename": False}, "wrong"),
        ({"rename_after_s": 7.0}, "slow"),
        ({"write_bytes_per_s": 2e8}, "slow"),
        ({"commit_s": 0.9}, "slow"),
    ],
)
def test_storage_that_tears_delays_or_crawls_is_named(seen: dict[str, Any], outcome: str) -> None:
    table = sound()
    values(table, "storage")["4"] |= seen
    found = only_fault(table)
    assert (found.check, found.outcome, found.ranks) == ("storage", outcome, (4,))


def test_space_for_all_checkpoints_that_are_kept_is_asked_for() -> None:
    table = sound()
    values(table, "storage")["4"]["free_bytes"] = 50 << 30
    assert faults(table) == []
    values(table, "storage")["4"]["free_bytes"] = 47 << 30
    found = only_fault(table)
    assert (found.check, found.outcome) == ("space", "wrong")
    assert found.expected == "51.5 GB: 3 checkpoints of 17.2 GB"


def test_a_plan_that_does_not_fit_what_is_free_is_wrong() -> None:
    table = sound()
    values(table, "facts")["6"]["gpu"]["free_bytes"] = 60 << 30
    found = only_fault(table)
    assert (found.check, found.outcome, found.ranks) == ("plan memory", "wrong", (6,))


def test_ranks_of_one_host_share_its_memory_on_a_cpu() -> None:
    table = sound()
    for rank in range(WORLD):
        values(table, "facts")[str(rank)] |= {"gpu": None}
        values(table, "facts")[str(rank)]["host"]["available_bytes"] = 4 * (1 << 36) - (rank >= 4)
    found = only_fault(table)
    assert (found.check, found.ranks) == ("plan memory", (4, 5, 6, 7))


def test_uneven_hosts_are_told() -> None:
    table = sound()
    values(table, "ranks")["3"]["host"] = "jute"
    assert "hemp 3, jute 5" in faults(table)[0].found


def test_ranks_are_listed_as_ranges() -> None:
    assert listed([7]) == "rank 7"
    assert listed([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
