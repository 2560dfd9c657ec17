"""Latency and bandwidth of a run's groups of ranks, measured with the collectives that the run uses.

Bandwidths are bus bandwidths as defined by nccl-tests (doc/PERFORMANCE.md there), so that groups of different sizes
compare with each other and with the speed of a link. For n ranks, t seconds and S bytes:

    all-reduce    S / t * 2 (n - 1) / n     S: the tensor
    all-gather    S / t * (n - 1) / n       S: the gathered tensor
    all-to-all    S / t * (n - 1) / n       S: what one rank sends
    send          S / t                     S: the message

All groups of an axis are measured concurrently, as in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from ropewalk.parallel.comm import Group
from ropewalk.parallel.mesh import AXES, Axis, Mesh

from .brief import Brief

Kind = Literal["all_reduce", "all_gather", "all_to_all", "send"]
LARGE_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}
"""Message size for bandwidth, at which latency does not matter."""
SMALL_NUMBERS = 2
BATCHES = 3
"""Batches of calls; the best counts, so that disturbances do not."""
MOST = 2000
"""Most calls in a batch."""
EXCHANGES = 16
"""Round trips to rank 0's clock; the fastest counts."""


def axis_kinds(brief: Brief) -> dict[Axis, Kind]:
    """Axes of more than one rank, each with the operation that carries most of its bytes."""
    kinds: dict[Axis, Kind] = {
        "pipeline": "send",
        "replicate": "all_reduce",
        "shard": "all_gather",
        "context": "send" if brief.context_method == "ring" else "all_to_all",
        "tensor": "all_reduce",
    }
    return {axis: kinds[axis] for axis in AXES if getattr(brief, axis) > 1}


def measure_group(group: Group, kind: Kind, *, device: torch.device, seconds: float) -> dict[str, Any]:
    """Latency and bus bandwidth of one group; all of its ranks must call."""
    if kind == "send":
        return {"ranks": list(group.ranks), "operation": kind, "pairs": _ring(group, device=device, seconds=seconds)}
    large = LARGE_BYTES[device.type]
    small_s = _seconds_of(group, _operation(group, kind, SMALL_NUMBERS * group.size, device), device, seconds / 4)
    large_s = _seconds_of(group, _operation(group, kind, large // 4, device), device, seconds)
    return {
        "ranks": list(group.ranks),
        "operation": kind,
        "bytes": large,
        "latency_s": small_s,
        "bytes_per_s": large / large_s * bus_factor(kind, group.size),
    }


def bus_factor(kind: Kind, size: int) -> float:
    """Ratio of bus bandwidth to message bytes per second for a group of `size` ranks."""
    return {"all_reduce": 2 * (size - 1) / size, "send": 1.0}.get(kind, (size - 1) / size)


def clock_offset(control: Group, clock: Callable[[], float] = time.time) -> dict[str, float]:
    """Seconds that rank 0's clock is ahead of this rank's, from the midpoint of the fastest round trip (as NTP does),
    and its maximum error, half of that round trip. All ranks must call."""
    best = (float("inf"), 0.0)
    now, theirs = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for rank in range(1, control.size):
        for _ in range(EXCHANGES):
            if control.rank == 0:
                control.start_receive(theirs, rank).wait()
                now[0] = clock()
                control.start_send(now, rank).wait()
            elif control.rank == rank:
                sent = clock()
                control.start_send(now, 0).wait()
                control.start_receive(theirs, 0).wait()
                received = clock()
                best = min(best, (received - sent, theirs.item() - (sent + received) / 2))
    if control.rank == 0:
        return {"offset_s": 0.0, "error_s": 0.0}
    return {"offset_s": best[1], "error_s": best[0] / 2}


def connect(mesh: Mesh, brief: Brief, device: torch.device) -> None:
    """Sends a first message in every measured group, for which NCCL creates its communicators."""
    for group in (mesh.world, *(mesh.group(axis) for axis in axis_kinds(brief))):
        group.all_reduce(torch.ones(1, device=device))
    mesh.control.all_reduce(torch.ones(1))
    _synchronize(device)


def _operation(group: Group, kind: Kind, numbers: int, device: torch.device) -> Callable[[], object]:
    """A function that calls the collective on a tensor of `numbers` float32 zeros."""
    part = max(1, numbers // group.size)
    if kind == "all_reduce":
        x = torch.zeros(part * group.size, device=device)
        return lambda: group.all_reduce(x)
    parts = torch.zeros(group.size, part, device=device)
    if kind == "all_to_all":
        return lambda: group.all_to_all(parts)
    mine = parts[group.rank].clone()
    return lambda: group.start_all_gather(mine, parts).wait()


def _seconds_of(group: Group, work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds per call, from the best batch; batches take `seconds` in total, with equal call counts on all ranks."""
    work()
    once = torch.tensor([_timed(work, 1, device)], device=device)
    slowest = group.all_reduce(once, operation="max").item()
    calls = int(min(MOST, max(1, seconds / BATCHES / max(slowest, 1e-7))))
    return min(_timed(work, calls, device) for _ in range(BATCHES)) / calls


def _ring(group: Group, *, device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """Measures the links from each rank to the next; returns those that this rank sends on. Pairs of one round share no
    rank and are measured concurrently."""
    found = []
    for round_of_pairs in rounds(group.size):
        for source, target in round_of_pairs:
            if group.rank == source:
                found.append(_send(group, target, device=device, seconds=seconds / 2))
            elif group.rank == target:
                _answer(group, source, device=device)
        # Without this, a pair that finishes early would disturb the others with its next round.
        group.all_reduce(torch.zeros(1, device=device))
        _synchronize(device)
    return found


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs (i, i + 1) of a ring in rounds of disjoint pairs."""
    yield [(place, place + 1) for place in range(0, size - 1, 2)]
    if size > 2:
        yield [(place, place + 1) for place in range(1, size - 1, 2)]
    yield [(size - 1, 0)]


PINGS = 20
"""Round trips of a small message; the first quartile is reported, because a busy core disturbs some."""


def _send(group: Group, target: int, *, device: torch.device, seconds: float) -> dict[str, Any]:
    small, large = torch.zeros(SMALL_NUMBERS, device=device), torch.zeros(LARGE_BYTES[device.type] // 4, device=device)

    def round_trip() -> None:
        group.start_send(small, target).wait()
        group.start_receive(small, target).wait()
        _synchronize(device)

    def transfer(messages: int) -> float:
        start = time.perf_counter()
        for _ in range(messages):
            group.start_send(large, target).wait()
        group.start_receive(small, target).wait()
        _synchronize(device)
        return time.perf_counter() - start

    round_trip()
    trips = [_timed(round_trip, 1, device) for _ in range(PINGS)]
    transfer(1)
    messages = int(min(MOST, max(1, seconds / BATCHES / max(transfer(1), 1e-7))))
    group.start_send(torch.tensor([float(messages)], device=device), target).wait()
    best = min(transfer(messages) for _ in range(BATCHES))
    return {
        "source": group.ranks[group.rank],
        "target": group.ranks[target],
        "bytes": large.numel() * 4,
        "latency_s": sorted(trips)[PINGS // 4] / 2,
        "bytes_per_s": messages * large.numel() * 4 / best,
    }


def _answer(group: Group, source: int, *, device: torch.device) -> None:
    small, large = torch.zeros(SMALL_NUMBERS, device=device), torch.zeros(LARGE_BYTES[device.type] // 4, device=device)
    for _ in range(1 + PINGS):
        group.start_receive(small, source).wait()
        group.start_send(small, source).wait()

    def receive(messages: int) -> None:
        for _ in range(messages):
            group.start_receive(large, source).wait()
        group.start_send(small, source).wait()

    receive(1)
    receive(1)
    wanted = torch.zeros(1, device=device)
    group.start_receive(wanted, source).wait()
    messages = int(wanted.item())
    for _ in range(BATCHES):
        receive(messages)
    _synchronize(device)


def _timed(work: Callable[[], object], calls: int, device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
