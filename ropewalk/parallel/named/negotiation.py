"""Negotiates named collectives: which are requested by all ranks, their order, and which are fused.

Ranks may request in any order (Horovod: Sergeev and Del Balso 2018). In every cycle each rank sends all others its new
requests; all ranks derive the same schedule from the same messages, so that collectives start in one order everywhere
and cannot deadlock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["allreduce", "allgather", "broadcast"]
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """One rank's request for a collective."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    device: str
    operation: str = ""
    """`average`, `sum` or `adasum` with pre- and postscale factors; the root of a broadcast."""

    def conflict(self, other: Request) -> str:
        """Describes how the two requests disagree; empty if they match."""
        mine, theirs = asdict(self), asdict(other)
        if self.kind == "allgather":  # row counts may differ
            mine["shape"], theirs["shape"] = self.shape[1:], other.shape[1:]
        return ", ".join(f"{key} {mine[key]} and {theirs[key]}" for key in mine if mine[key] != theirs[key])


@dataclass(frozen=True, slots=True)
class CycleMessage:
    """One rank's message in a cycle."""

    requests: tuple[Request, ...] = ()
    joined: bool = False
    """Out of data: the rank contributes zeros to reductions."""
    leaving: bool = False
    """The rank is shutting down."""
    pending: bool = False
    """The rank waits for a collective."""
    fusion_bytes: int = 0
    """Only rank 0's value is used."""

    def plain(self) -> dict[str, Any]:
        """Converts to JSON types."""
        return asdict(self)

    @classmethod
    def read(cls, value: dict[str, Any]) -> CycleMessage:
        """Inverts `plain`."""
        requests = [Request(**{**each, "shape": tuple(each["shape"])}) for each in value["requests"]]
        return cls(**{**value, "requests": tuple(requests)})


@dataclass(slots=True)
class Ready:
    """A collective that runs now."""

    request: Request
    rows: dict[int, int] = field(default_factory=dict)
    """The row count of each rank, for an allgather."""
    error: str = ""
    """Why it cannot run; it fails with this message on all ranks."""


class RequestTable:
    """Pending requests; identical on all ranks after the same cycles."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._asked: dict[str, dict[int, Request]] = {}
        self.joined: list[int] = []
        """Ranks out of data, in the order in which they joined."""

    def take(self, messages: Sequence[CycleMessage]) -> list[Ready]:
        """Adds `messages[i]` of each rank i; returns the ready collectives in order of first request."""
        for rank, message in enumerate(messages):
            for request in message.requests:
                self._asked.setdefault(request.name, {})[rank] = request
            if message.joined and rank not in self.joined:
                self.joined.append(rank)
        expected = set(range(self._ranks)) - set(self.joined)
        names = [name for name, by_rank in self._asked.items() if expected <= by_rank.keys()]
        return [self._ready(self._asked.pop(name)) for name in names]

    def restart(self) -> None:
        """Clears the joined ranks, after all have joined."""
        self.joined = []

    def missing(self) -> dict[str, list[int]]:
        """Returns, for each pending collective, the ranks that have not requested it."""
        everybody = set(range(self._ranks)) - set(self.joined)
        return {name: sorted(everybody - by_rank.keys()) for name, by_rank in self._asked.items()}

    def _ready(self, by_rank: dict[int, Request]) -> Ready:
        first = by_rank[min(by_rank)]
        for rank, request in sorted(by_rank.items()):
            conflict = first.conflict(request)
            if conflict:
                return Ready(first, error=f"`{first.name}` differs on ranks {min(by_rank)} and {rank}: {conflict}")
        if first.kind == "allgather":
            return Ready(first, {rank: by_rank[rank].shape[0] if rank in by_rank else 0 for rank in range(self._ranks)})
        if first.kind == "broadcast" and int(first.operation) not in by_rank:
            return Ready(first, error=f"`{first.name}` is a broadcast of rank {first.operation}, which has joined")
        return Ready(first)


def fuse(ready: Sequence[Ready], fusion_bytes: int) -> list[list[Ready]]:
    """Groups fused collectives: all-reduces of one dtype, device and operation, up to `fusion_bytes`."""
    groups: list[list[Ready]] = []
    sizes: list[int] = []
    open_group: dict[tuple[str, ...], int] = {}
    for each in ready:
        request = each.request
        key = (request.dtype, request.device, request.operation)
        # Adasum needs each tensor separately.
        alone = request.kind != "allreduce" or each.error or request.operation.startswith("adasum")
        at = None if alone else open_group.get(key)
        size = math.prod(request.shape) * bytes_of(request.dtype)
        if at is not None and sizes[at] + size <= fusion_bytes:
            groups[at].append(each)
            sizes[at] += size
            continue
        groups.append([each])
        sizes.append(size)
        if not alone:
            open_group[key] = len(groups) - 1
    return groups


def bytes_of(dtype: str) -> int:
    """Returns the bytes per element; 8 for an unknown dtype."""
    sizes = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}
    return sizes.get(dtype, 8)


class FusionTuner:
    """Finds the fusion size with the highest throughput: tries each candidate in turn, then keeps the best.

    `size` is the current one. A candidate is scored by the median over its windows, robust to one slow window.
    """

    CANDIDATES = tuple(size * MEBIBYTE for size in (1, 4, 16, 64, 256))
    WINDOWS = 3

    def __init__(self, *, window_s: float = 1.0) -> None:
        self._window_s = window_s
        self._rates: dict[int, list[float]] = {size: [] for size in self.CANDIDATES}
        self._bytes, self._begin = 0, 0.0
        self.size = self.CANDIDATES[0]
        self.done = False

    def saw(self, size: int, now: float) -> None:
        """Records `size` bytes reduced by the time `now`."""
        if self.done:
            return
        if not self._begin:
            self._begin = now
            return
        self._bytes += size
        if now - self._begin < self._window_s or not self._bytes:
            return
        self._rates[self.size].append(self._bytes / (now - self._begin))
        self._bytes, self._begin = 0, 0.0
        self._choose()

    def _choose(self) -> None:
        fewest = min(self.CANDIDATES, key=lambda size: len(self._rates[size]))
        if len(self._rates[fewest]) < self.WINDOWS:
            self.size = fewest
        else:
            self.size = max(self.CANDIDATES, key=lambda size: statistics.median(self._rates[size]))
            self.done = True
