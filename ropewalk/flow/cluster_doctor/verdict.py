"""Judges the table of `doctor cluster`: one finding per check, with the figure, the expectation and a remedy.

Pure functions of the table (`train/cluster/examine.py`). Speeds are compared with those of the other ranks or groups,
so that a slow one is found on any hardware; with nothing to compare, a fixed floor detects a wrong network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ropewalk.base.progress import amount, counted

from .findings import (
    SLOW,
    Finding,
    Table,
    backend_of,
    hosts_of,
    listed,
    median_of_others,
    more,
    on_host,
    values,
    within,
)
from .network_findings import judge_network
from .storage_findings import judge_storage

CLOCK_S = 1.0
"""Larger clock differences garble merged logs and file times on shared storage."""
OTHERS_BYTES = 1 << 30
"""Memory of a GPU used by other processes before it is reported: more than an idle display or driver uses."""
SHARED_MEMORY_BYTES = 1 << 29
"""Free /dev/shm per host that is ample for NCCL; a container's default is 64 MB."""


def judge(table: Table, *, failed: Mapping[int, str] | None = None) -> list[Finding]:
    """All findings of a table; `failed` has the ranks whose processes failed, and how."""
    checks: list[Callable[[Table], Iterable[Finding]]] = [
        judge_devices,
        judge_hosts,
        judge_versions,
        judge_matmul,
        judge_clocks,
        judge_network,
        judge_storage,
        judge_memory,
    ]
    findings = [*judge_ranks(table, failed or {}), *judge_steps(table, failed or {})]
    return [*findings, *(finding for check in checks for finding in check(table)), *_not_reached(table)]


def _not_reached(table: Table) -> Iterator[Finding]:
    left = table.get("not_reached") or ([] if table["steps"] else ["everything"])
    if left:
        yield Finding(
            check="not checked",
            outcome="missing",
            found=", ".join(left),
            remedy="fix what is wrong or missing above, then check again",
        )


def judge_ranks(table: Table, failed: Mapping[int, str]) -> Iterator[Finding]:
    """Ranks that started, and their spread over hosts."""
    world, step = table["world"], table["steps"].get("ranks", {"values": {}, "errors": {}})
    present = {int(rank): value for rank, value in step["values"].items()}
    for rank, how in failed.items():
        yield Finding(
            check=f"rank {rank}",
            outcome="missing",
            found=how,
            expected="a running process",
            ranks=(rank,),
            remedy="see its output above, or start it by hand with the same environment",
        )
    missing = [rank for rank in range(world) if rank not in present and str(rank) not in step["errors"]]
    if missing:
        yield Finding(
            check="ranks",
            outcome="missing",
            found=f"{listed(missing)} of {world} did not start",
            expected=f"{world} ranks" + within(table),
            remedy="check the output of these processes, and that their hosts reach MASTER_ADDR",
            ranks=tuple(missing),
        )
    elif not step["errors"]:
        per_host = Counter(value["host"] for value in present.values())
        uneven = len(set(per_host.values())) > 1
        spread = ", ".join(f"{host} {count}" for host, count in sorted(per_host.items()))
        yield Finding(
            check="ranks",
            outcome="slow" if uneven else "ok",
            found=f"{counted(world, 'rank')} on {counted(len(per_host), 'host')}"
            + (f": {spread}" if uneven or len(per_host) <= 4 else ""),
            expected="the same number on each host" if uneven else f"{world}",
            remedy="start the same number of ranks on each host" if uneven else "",
        )


def judge_steps(table: Table, failed: Mapping[int, str]) -> Iterator[Finding]:
    """Steps that a rank did not start or finish, or that failed."""
    for name, step in table["steps"].items():
        for rank, text in step["errors"].items():
            yield Finding(
                check=name,
                outcome="wrong",
                found=f"{on_host(table, int(rank))}: {text}",
                remedy=_STEP_REMEDIES.get(name, "fix what the message names"),
                ranks=(int(rank),),
            )
        # After an error, ranks that began the step wait for the failed rank.
        silent = step["not_begun"] or ([] if step["errors"] else step["not_ended"])
        if silent and name != "ranks":
            how = "did not begin" if step["not_begun"] else "began and did not end"
            yield Finding(
                check=name,
                outcome="missing",
                found=f"{listed(silent)} ({hosts_of(table, silent)}) {how} this step",
                expected=f"an answer{within(table)}",
                remedy=_STEP_REMEDIES.get(
                    name, "check that the process still runs, and what it waits for (py-spy dump)"
                ),
                ranks=tuple(silent),
            )
    if table.get("terminated") and not failed:
        yield Finding(
            check="launch",
            outcome="missing",
            found="the launcher ended rank 0 before the check was complete",
            remedy="another rank failed; see the launcher's output",
        )


_STEP_REMEDIES = {
    "process group": "check that hosts reach each other at any port; choose the interface with NCCL_SOCKET_IFNAME and "
    "GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO shows more",
    "storage": "check the folder of runs (`--runs`): every rank must be able to write it",
    "matmul": "check the device of this rank (`nvidia-smi`, LOCAL_RANK, CUDA_VISIBLE_DEVICES)",
}


def judge_devices(table: Table) -> Iterator[Finding]:
    """GPUs: present, not shared, of one kind, free and without errors."""
    gpus = {rank: value["gpu"] for rank, value in values(table, "facts").items() if value["gpu"] is not None}
    if not gpus:
        return
    without = [rank for rank, gpu in gpus.items() if "uuid" not in gpu]
    for rank in without:
        local = values(table, "ranks")[rank]["local_rank"]
        yield Finding(
            check="devices",
            outcome="missing",
            ranks=(rank,),
            expected="a GPU for each local rank",
            found=f"{on_host(table, rank)}: LOCAL_RANK {local}, but torch sees {counted(gpus[rank]['gpus'], 'GPU')}",
            remedy="start fewer ranks on this host, or check CUDA_VISIBLE_DEVICES and the torch build",
        )
    there = {rank: gpu for rank, gpu in gpus.items() if "uuid" in gpu}
    problems = [*_shared_gpus(table, there), *_unlike(table, {r: g["name"] for r, g in there.items()})]
    for rank, gpu in there.items():
        if (gpu["used_by_others_bytes"] or 0) > OTHERS_BYTES:
            used = amount(gpu["used_by_others_bytes"], "B")
            problems.append(
                Finding(
                    check="devices",
                    outcome="wrong",
                    found=f"{on_host(table, rank)}: other processes use {used} of its GPU",
                    expected=f"less than {amount(OTHERS_BYTES, 'B')}",
                    ranks=(rank,),
                    remedy="end the processes that `nvidia-smi` lists",
                )
            )
        if gpu.get("ecc_errors"):
            problems.append(
                Finding(
                    check="devices",
                    outcome="wrong",
                    found=f"{on_host(table, rank)}: {gpu['ecc_errors']} ECC errors",
                    expected="no uncorrected errors",
                    ranks=(rank,),
                    remedy="drain the host and reset or replace the GPU",
                )
            )
    yield from problems
    if there and not problems and not without:
        names = Counter(gpu["name"] for gpu in there.values())
        free = min(gpu["free_bytes"] for gpu in there.values())
        kinds = ", ".join(f"{count} x {name}" for name, count in names.items())
        yield Finding(check="devices", outcome="ok", found=f"{kinds}, at least {amount(free, 'B')} free")


def _shared_gpus(table: Table, gpus: Mapping[int, Any]) -> Iterator[Finding]:
    by_uuid: dict[str, list[int]] = {}
    for rank, gpu in gpus.items():
        by_uuid.setdefault(gpu["uuid"], []).append(rank)
    for uuid, ranks in by_uuid.items():
        if len(ranks) > 1:
            yield Finding(
                check="devices",
                outcome="wrong",
                found=f"{listed(ranks)} share {uuid} of {hosts_of(table, ranks)}",
                expected="a GPU for each rank",
                ranks=tuple(ranks),
                remedy="start at most one rank per GPU: check --nproc, LOCAL_RANK and CUDA_VISIBLE_DEVICES",
            )


def _unlike(table: Table, kinds: Mapping[int, str]) -> Iterator[Finding]:
    if not kinds:
        return
    usual = Counter(kinds.values()).most_common(1)[0][0]
    others = [rank for rank, kind in kinds.items() if kind != usual]
    if others:
        yield Finding(
            check="devices",
            outcome="slow",
            found="; ".join(f"{on_host(table, rank)} has {kinds[rank]}" for rank in others[:4]) + more(others, 4),
            expected=f"{usual}, as on most ranks",
            remedy="all ranks wait for the slowest: use hosts of one kind",
            ranks=tuple(others),
        )


def judge_hosts(table: Table) -> Iterator[Finding]:
    """Threads, open files and shared memory of each host."""
    facts = {rank: value["host"] for rank, value in values(table, "facts").items()}
    if not facts:
        return
    hosts = {rank: value["host"] for rank, value in values(table, "ranks").items()}
    world, problems = table["world"], []
    for host in dict.fromkeys(hosts.values()):
        here = [rank for rank in facts if hosts[rank] == host]
        if not here:
            continue
        first = facts[here[0]]
        threads, cores = sum(facts[rank]["threads"] for rank in here), first["cores"]
        if threads > max(cores, len(here)):
            problems.append(
                Finding(
                    check="host",
                    outcome="slow",
                    ranks=tuple(here),
                    expected="at most one thread per core",
                    found=f"{host}: {counted(len(here), 'rank')} with {threads} threads on {counted(cores, 'core')}",
                    remedy=f"set OMP_NUM_THREADS={max(1, cores // len(here))}",
                )
            )
        if first["open_files"] < world + 1024:
            problems.append(
                Finding(
                    check="host",
                    outcome="wrong",
                    found=f"{host}: {first['open_files']} open files allowed",
                    expected=f"{world + 1024}: a socket to every rank",
                    ranks=tuple(here),
                    remedy="raise `ulimit -Hn`",
                )
            )
        if backend_of(table) == "nccl" and len(here) > 1 and first["shared_memory_bytes"] < SHARED_MEMORY_BYTES:
            free = amount(first["shared_memory_bytes"], "B")
            problems.append(
                Finding(
                    check="host",
                    outcome="wrong",
                    found=f"{host}: {free} free in /dev/shm",
                    ranks=tuple(here),
                    expected=amount(SHARED_MEMORY_BYTES, "B"),
                    remedy="start the container with `--shm-size=1g` or more",
                )
            )
    yield from problems
    if not problems:
        least = min(fact["available_bytes"] for fact in facts.values())
        threads = sorted({fact["threads"] for fact in facts.values()})
        per_rank = "-".join(map(str, dict.fromkeys((threads[0], threads[-1]))))
        cores = min(fact["cores"] for fact in facts.values())
        yield Finding(
            check="host",
            outcome="ok",
            found=f"{counted(cores, 'core')}, threads per rank {per_rank}, {amount(least, 'B')} of memory available",
        )


def judge_versions(table: Table) -> Iterator[Finding]:
    """Differences between ranks, by name."""
    told = {rank: value["versions"] for rank, value in values(table, "facts").items()}
    if not told:
        return
    differs = False
    for name in dict.fromkeys(name for versions in told.values() for name in versions):
        found = {rank: versions.get(name, "none") for rank, versions in told.items()}
        usual, _ = Counter(found.values()).most_common(1)[0]
        others = [rank for rank, version in found.items() if version != usual]
        if others:
            differs = True
            shown = ", ".join(sorted({found[rank] for rank in others}))
            yield Finding(
                check="versions",
                outcome="wrong",
                found=f"{name}: {listed(others)} ({hosts_of(table, others)}): {shown}",
                expected=f"{usual}, as on the others",
                remedy="install the same environment on all hosts",
                ranks=tuple(others),
            )
    if not differs:
        shown = ", ".join(f"{name} {version}" for name, version in told[min(told)].items() if name != "sources")
        yield Finding(check="versions", outcome="ok", found=shown, expected="the same on all ranks")


def judge_matmul(table: Table) -> Iterator[Finding]:
    """Devices slower than the others."""
    flops = {rank: value["flops"] for rank, value in values(table, "matmul").items()}
    if not flops:
        return
    slow = {rank: median for rank in flops if flops[rank] < SLOW * (median := median_of_others(flops, rank))}
    for rank, median in slow.items():
        yield Finding(
            check="matmul",
            outcome="slow",
            found=f"{on_host(table, rank)}: {amount(flops[rank])}FLOP/s",
            expected=f"at least half of the others' median, {amount(median)}FLOP/s",
            ranks=(rank,),
            remedy="check for other processes, throttling (`nvidia-smi -q -d PERFORMANCE`) and too few threads",
        )
    if not slow:
        shown = f"{amount(min(flops.values()))}FLOP/s to {amount(max(flops.values()))}FLOP/s"
        yield Finding(
            check="matmul", outcome="ok", found=f"{shown} per rank", expected="no rank below half of the others"
        )


def judge_clocks(table: Table) -> Iterator[Finding]:
    """Hosts with a wrong clock."""
    offsets = values(table, "clocks")
    if not offsets:
        return
    hosts = {rank: value["host"] for rank, value in values(table, "ranks").items()}
    best: dict[str, tuple[float, float]] = {}
    for rank, value in offsets.items():
        if rank == 0 and len(offsets) > 1:
            continue  # rank 0 would be compared with itself
        each = (value["error_s"], value["offset_s"])
        best[hosts[rank]] = min(best.get(hosts[rank], each), each)
    off = {host: offset for host, (error, offset) in best.items() if abs(offset) - error > CLOCK_S}
    for host, offset in off.items():
        at = [rank for rank in offsets if hosts[rank] == host]
        side = "behind" if offset > 0 else "ahead of"
        yield Finding(
            check="clocks",
            outcome="wrong",
            found=f"{host}: {abs(offset):.3g} s {side} rank 0's host",
            expected=f"within {CLOCK_S:g} s",
            remedy="synchronize its clock (chrony, ntpd)",
            ranks=tuple(at),
        )
    if not off:
        furthest = max(abs(offset) for _, offset in best.values())
        error = max(error for error, _ in best.values())
        found = f"at most {furthest * 1e3:.3g} ms apart (+- {error * 1e3:.2g} ms)"
        yield Finding(check="clocks", outcome="ok", found=found, expected=f"within {CLOCK_S:g} s")


def judge_memory(table: Table) -> Iterator[Finding]:
    """The plan's memory forecast against what is free: on the GPU, or in a host's memory shared by its ranks."""
    brief, facts = table["brief"], values(table, "facts")
    if not facts or not brief["memory_bytes"]:
        return
    hosts = {rank: value["host"] for rank, value in values(table, "ranks").items()}
    sharing = Counter(hosts.values())
    free = {
        rank: value["gpu"].get("free_bytes", 0)
        if value["gpu"] is not None
        else value["host"]["available_bytes"] // sharing[hosts[rank]]
        for rank, value in facts.items()
    }
    need = amount(brief["memory_bytes"], "B")
    short = [rank for rank in free if free[rank] < brief["memory_bytes"]]
    if short:
        least = min(short, key=lambda rank: free[rank])
        yield Finding(
            check="plan memory",
            outcome="wrong",
            ranks=tuple(short),
            expected=f"{need} per rank, as the plan forecasts",
            found=f"{listed(short)}: at least {on_host(table, least)} has {amount(free[least], 'B')} free",
            remedy="end other processes, lower `plan.microbatch_size`, set `parallel.recompute`, or shard the model "
            "over more ranks (`parallel.shard`)",
        )
    else:
        found = f"{amount(min(free.values()), 'B')} free per rank"
        yield Finding(check="plan memory", outcome="ok", found=found, expected=f"{need}, as the plan forecasts")
