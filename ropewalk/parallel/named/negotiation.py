"""Named collectives: which of them all ranks have asked for, in which order they run, and which travel together.

Ranks may ask in any order (Horovod: Sergeev and Del Balso 2018). In every cycle each rank tells all others what it has
asked for since the last one; from the same messages all ranks draw the same conclusions, so that collectives begin in
one order everywhere and no rank waits for another that is in a different one.
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
    """One rank's wish for a collective."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    device: str
    operation: str = ""
    """`average`, `sum` or `adasum`, with the factors before and after; of a broadcast the root."""

    def conflict(self, other: Request) -> str:
        """What keeps the two from being one collective; empty: nothing."""
        mine, theirs = asdict(self), asdict(other)
        if self.kind == "allgather":  # ranks may bring different numbers of rows
            mine["shape"], theirs["shape"] = self.shape[1:], other.shape[1:]
        return ", ".join(f"{key} {mine[key]} and {theirs[key]}" for key in mine if mine[key] != theirs[key])


@dataclass(frozen=True, slots=True)
class CycleMessage:
    """What one rank tells in a cycle."""

    requests: tuple[Request, ...] = ()
    joined: bool = False
    """It has no more data, and adds zeros to what the others reduce."""
    leaving: bool = False
    """It shuts down."""
    pending: bool = False
    """It waits for a collective."""
    fusion_bytes: int = 0
    """That of rank 0 counts."""

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @classmethod
    def read(cls, value: dict[str, Any]) -> CycleMessage:
        """The inverse of `plain`."""
        requests = [Request(**{**each, "shape": tuple(each["shape"])}) for each in value["requests"]]
        return cls(**{**value, "requests": tuple(requests)})


@dataclass(slots=True)
class Ready:
    """A collective that runs now."""

    request: Request
    rows: dict[int, int] = field(default_factory=dict)
    """Of an allgather: the rows that each rank brings."""
    error: str = ""
    """Why it cannot run; it ends with this message on all ranks."""


class RequestTable:
    """What ranks have asked for, the same on all of them after the same cycles."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._asked: dict[str, dict[int, Request]] = {}
        self.joined: list[int] = []
        """Ranks without more data, in the order in which they told."""

    def take(self, messages: Sequence[CycleMessage]) -> list[Ready]:
        """What is ready after a cycle in which rank i told `messages[i]`, in the order of first requests."""
        for rank, message in enumerate(messages):
            for request in message.requests:
                self._asked.setdefault(request.name, {})[rank] = request
            if message.joined and rank not in self.joined:
                self.joined.append(rank)
        expected = set(range(self._ranks)) - set(self.joined)
        names = [name for name, by_rank in self._asked.items() if expected <= by_rank.keys()]
        return [self._ready(self._asked.pop(name)) for name in names]

    def restart(self) -> None:
        """All ranks had joined, and go on."""
        self.joined = []

    def missing(self) -> dict[str, list[int]]:
        """The ranks that have not asked for each collective that others wait for."""
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
    """Collectives in groups that run together: all-reduces of one dtype, device and operation, as many as fit."""
    groups: list[list[Ready]] = []
    sizes: list[int] = []
    open_group: dict[tuple[str, ...], int] = {}
    for each in ready:
        request = each.request
        key = (request.dtype, request.device, request.operation)
        # An Adasum looks at each tensor by itself.
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
    """Of one number; of an unknown dtype 8."""
    sizes = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}
    return sizes.get(dtype, 8)


class FusionTuner:
    """Finds the fusion size at which most bytes a second are reduced: each candidate in turn, then the best.

    `size` is that of the moment. A candidate counts by the median over its windows, so that one slow moment does not
    decide.
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
        """So many bytes were reduced by the time `now`."""
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
