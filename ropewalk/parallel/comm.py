"""Collectives over groups of ranks: the only module that calls torch.distributed's.

A group of one rank communicates nothing. Every operation counts the bytes that this rank sends under the best known
algorithm (Thakur et al. 2005): an all-reduce of n bytes over p ranks sends 2 n (p - 1) / p, half each for its
reduce-scatter and all-gather. tests/parallel/test_wire.py checks the counts on the network. collectives.py has these
operations with gradients, also for compiled code.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .compat import all_gather_flat, reduce_scatter_flat
from .timing import StreamClock

MOST_QUEUED = 1024
"""Unread GPU timings that trigger a `settle`."""
Operation = Literal["sum", "max", "min"]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(slots=True)
class Sent:
    """Calls and bytes of one kind of collective."""

    calls: int = 0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Moment:
    """Timing of one collective; seconds of `time.perf_counter`."""

    group: str
    kind: str
    bytes: float
    begin: float
    end: float
    """When a wait for its result returned: a collective overlapped with compute ends late without being slow."""


@dataclass(slots=True)
class Traffic:
    """Bytes this rank sends, by group and kind of collective, since the last `take`, and seconds it waits for others.

    On a GPU the stream waits: two CUDA events around the wait measure its idle time, and are read once the GPU has
    passed them (`settle`).
    """

    sent: dict[tuple[str, str], Sent] = field(default_factory=dict)
    timeline: list[Moment] | None = None
    """Collects timings while it is a list."""
    observers: list[Callable[[Moment], None]] = field(default_factory=list)
    """Called with the timing of every finished collective."""
    on_begin: list[Callable[[str, float], None]] = field(default_factory=list)
    """Called with the group and start time of every collective; not on a GPU, where only the stream has the time."""
    waited_s: float = 0.0
    """Exposed communication: time in which this rank only waits for collectives."""
    on_gpu: bool = False
    """Whether steps run on a GPU: then the stream's waits count, not the host's, which runs ahead."""
    clock: Callable[[], float] = time.perf_counter
    _stream: StreamClock = field(default_factory=StreamClock)
    _queued: deque[_Flight] = field(default_factory=deque)

    def add(self, group: str, kind: str, size: float) -> None:
        sent = self.sent.setdefault((group, kind), Sent())
        sent.calls, sent.bytes = sent.calls + 1, sent.bytes + size

    def take(self) -> dict[tuple[str, str], Sent]:
        """Returns what was sent since the last call."""
        sent, self.sent = self.sent, {}
        return sent

    def take_waited(self) -> float:
        """Returns seconds of waiting since the last call; unfinished GPU collectives count in a later one."""
        self.settle()
        waited, self.waited_s = self.waited_s, 0.0
        return waited

    def settle(self, *, wait: bool = False) -> None:
        """Reads finished GPU timings, or, with `wait`, all queued ones."""
        if wait and self._queued:
            self._queued[-1].synchronize()
        while self._queued and self._queued[0].is_over():
            self._queued.popleft().tell()

    def calibrate(self) -> None:
        """Aligns GPU timestamps with the host's clock; call it now and then, when the GPU is idle."""
        if self.on_gpu:
            self.settle()
            self._stream.calibrate()

    def drop_queued(self) -> None:
        """Drops timings not yet read."""
        self._queued.clear()


class _Flight:
    """Times a collective in flight on its result's device: the GPU's current stream, or the host."""

    def __init__(self, traffic: Traffic, group: str, kind: str, size: float) -> None:
        self._traffic, self._what = traffic, (group, kind, size)
        self._timeline: list[Moment] | None = None
        self._begin: float | torch.cuda.Event = (begin := traffic.clock())
        if not traffic.on_gpu:
            for observer in traffic.on_begin:
                observer(group, begin)
        self._waits: list[torch.cuda.Event] = []
        self._on_gpu = False

    def issued(self, *, on_gpu: bool) -> None:
        """Marks the launch; on a GPU, the start is when the stream reaches this point."""
        self._on_gpu, traffic = on_gpu, self._traffic
        if on_gpu and (traffic.timeline is not None or traffic.observers):
            self._begin = traffic._stream.stamp()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Times the block, which only waits for the collective's end."""
        traffic = self._traffic
        self._timeline = traffic.timeline
        if self._on_gpu:
            self._waits.append(traffic._stream.stamp())
            yield
            self._waits.append(traffic._stream.stamp())
            traffic._queued.append(self)
            if len(traffic._queued) > MOST_QUEUED:
                traffic.settle()
        else:
            start = traffic.clock()
            yield
            end = traffic.clock()
            if not traffic.on_gpu:
                traffic.waited_s += end - start
            self._show(cast(float, self._begin), end)

    def is_over(self) -> bool:
        """Whether the GPU has passed the end."""
        return self._waits[1].query()

    def synchronize(self) -> None:
        """Waits until the GPU has passed the end."""
        self._waits[1].synchronize()

    def tell(self) -> None:
        """Adds a finished timing to the traffic."""
        (before, after), stream, begin = self._waits, self._traffic._stream, self._begin
        self._traffic.waited_s += before.elapsed_time(after) / 1e3
        if isinstance(begin, torch.cuda.Event):
            start, end = stream.host_seconds(begin), stream.host_seconds(after)
            if start is not None and end is not None:
                self._show(start, end)
            stream.release(begin)
        stream.release(before, after)

    def _show(self, begin: float, end: float) -> None:
        moment = Moment(*self._what, begin, end)
        if self._timeline is not None:
            self._timeline.append(moment)
        for observer in self._traffic.observers:
            observer(moment)


class Pending:
    """A collective in flight."""

    def __init__(
        self,
        works: Sequence[Any],
        result: Any,
        *,
        finish: Callable[[], None] | None = None,
        moment: _Flight | None = None,
    ) -> None:
        self._works, self._result, self._finish, self._moment = works, result, finish, moment
        if moment:
            moment.issued(on_gpu=_is_on_gpu(result))

    def wait(self) -> Any:
        """Waits and returns the result. On a GPU the stream waits, not the host."""
        with self._moment.waiting() if self._moment else contextlib.nullcontext():
            for work in self._works:
                work.wait()
        if self._finish:
            self._finish()
        self._works, self._finish, self._moment = (), None, None
        return self._result


class Group:
    """A process group named for its purpose. All members must call each operation.

    With `exact`, sums are binary trees over the ranks in order: bit-identical for any power-of-two number of ranks.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        place: int,
        handle: Any,
        traffic: Traffic | None = None,
        *,
        exact: bool = False,
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        """Global ranks of the members."""
        self.size = len(ranks)
        self.rank = self.ranks.index(place)
        """This process's rank in the group."""
        self.traffic = traffic or Traffic()
        self.exact = exact
        self._handle = handle
        self._on_gloo = self.size > 1 and handle is not None and dist.get_backend(handle) == "gloo"
        self.key = _add_key(self) if self.size > 1 else ""
        """Identifies the group in compiled code, which holds no objects."""
        self.kept: dict[str, Any] = {}
        """Objects that compiled code looks up by name; freed with the group."""

    def all_reduce(self, x: Tensor, *, operation: Operation = "sum") -> Tensor:
        """Sums `x` over the ranks, in place."""
        return self.start_all_reduce(x, operation=operation).wait()

    def start_all_reduce(self, x: Tensor, *, operation: Operation = "sum") -> Pending:
        """Starts `all_reduce`; `x` must not be touched before its end."""
        if self.size == 1:
            return Pending((), x)
        if self.exact and operation == "sum":
            return Pending((), x, finish=lambda: self._tree_all_reduce(x))
        moment = self._count("all_reduce", 2 * _share(x, self.size))
        whole = x if x.is_contiguous() else x.contiguous()
        work = dist.all_reduce(whole, _OPERATIONS[operation], group=self._handle, async_op=True)
        return Pending([work], x, finish=None if whole is x else lambda: _copy(x, whole), moment=moment)

    def all_gather(self, x: Tensor, *, dim: int = 0) -> Tensor:
        """Concatenates the ranks' `x`, all of one shape, along `dim`."""
        if self.size == 1:
            return x
        parts = self.start_all_gather(x).wait()
        return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)

    def start_all_gather(self, x: Tensor, out: Tensor | None = None) -> Pending:
        """Starts to gather `x` of every rank along a new first dimension."""
        if self.size == 1:
            return Pending((), x.unsqueeze(0) if out is None else out.copy_(x.unsqueeze(0)))
        out = x.new_empty((self.size, *x.shape)) if out is None else out
        moment = self._count("all_gather", _share(out, self.size))
        work = all_gather_flat(out.view(-1), x.contiguous().view(-1), group=self._handle)
        return Pending([work], out, moment=moment)

    def reduce_scatter(self, x: Tensor, *, dim: int = 0) -> Tensor:
        """Returns this rank's chunk, along `dim`, of the sum of all ranks' `x`."""
        if self.size == 1:
            return x
        parts = x.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        return self.start_reduce_scatter(parts).wait()

    def start_reduce_scatter(self, parts: Tensor, out: Tensor | None = None) -> Pending:
        """Starts to sum `parts` over ranks; the first dimension is the rank, and each rank gets its own slice."""
        if self.size == 1:
            return Pending((), parts[0] if out is None else out.copy_(parts[0]))
        out = torch.empty_like(parts[0]) if out is None else out
        if self.exact:
            return Pending((), out, finish=lambda: _copy(out, _tree_sum(self.all_to_all(parts))))
        moment = self._count("reduce_scatter", _share(parts, self.size))
        if self._on_gloo:
            # gloo's own is an all-reduce, twice the bytes. Here each rank sums what the others send it.
            arrived = torch.empty_like(parts, memory_format=torch.contiguous_format)
            work = dist.all_to_all_single(arrived, parts.contiguous(), group=self._handle, async_op=True)
            return Pending([work], out, finish=lambda: _sum_into(out, arrived), moment=moment)
        work = reduce_scatter_flat(out.view(-1), parts.contiguous().view(-1), group=self._handle)
        return Pending([work], out, moment=moment)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Sends row i of `parts` to rank i; row i of the result comes from rank i."""
        if self.size == 1:
            return parts
        out = torch.empty_like(parts, memory_format=torch.contiguous_format)
        moment = self._count("all_to_all", _share(parts, self.size))
        work = dist.all_to_all_single(out, parts.contiguous(), group=self._handle, async_op=True)
        return Pending([work], out, moment=moment).wait()

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        """Broadcasts `x` from the group's rank `source`, in place."""
        if self.size > 1:
            moment = self._count("broadcast", _bytes(x) if self.rank == source else 0)
            work = dist.broadcast(x, self.ranks[source], group=self._handle, async_op=True)
            return Pending([work], x, moment=moment).wait()
        return x

    def start_shift(self, tensors: Sequence[Tensor]) -> Pending:
        """Starts to send `tensors` to the next rank of the ring and to receive the previous rank's."""
        if self.size == 1:
            return Pending((), list(tensors))
        after, before = self.ranks[(self.rank + 1) % self.size], self.ranks[self.rank - 1]
        here = [tensor.contiguous() for tensor in tensors]
        there = [torch.empty_like(tensor) for tensor in here]
        moment = self._count("shift", sum(map(_bytes, here)))
        orders = [dist.P2POp(dist.isend, tensor, after, self._handle) for tensor in here]
        orders += [dist.P2POp(dist.irecv, tensor, before, self._handle) for tensor in there]
        return Pending(dist.batch_isend_irecv(orders), there, moment=moment)

    def start_send(self, x: Tensor, to: int, *, tag: int = 0) -> Pending:
        """Starts to send `x` to the group's rank `to`, which must receive it; only gloo and MPI use `tag`."""
        moment = self._count("send", _bytes(x))
        there = x.detach().contiguous()
        # In a batch of one: otherwise NCCL creates another communicator for the pair.
        order = dist.P2POp(dist.isend, there, self.ranks[to], self._handle, tag)
        return Pending(dist.batch_isend_irecv([order]), there, moment=moment)

    def start_receive(self, out: Tensor, source: int, *, tag: int = 0) -> Pending:
        """Starts to receive `out` from the group's rank `source`."""
        moment = self._count("receive", 0)
        order = dist.P2POp(dist.irecv, out, self.ranks[source], self._handle, tag)
        return Pending(dist.batch_isend_irecv([order]), out, moment=moment)

    def gather_numbers(self, value: int, *, device: torch.device | str = "cpu") -> list[int]:
        """Returns the `value` of every rank, in order."""
        return self.all_gather(torch.tensor([value], dtype=torch.int64, device=device)).tolist()

    def broadcast_json(self, value: Any, *, source: int = 0) -> Any:
        """Broadcasts `value` from the group's rank `source` as JSON; for groups of hosts."""
        if self.size == 1:
            return value
        text = bytearray(json.dumps(value).encode() if self.rank == source else b"")
        size = int(self.broadcast(torch.tensor([len(text)]), source=source))
        data = torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(size, dtype=torch.uint8)
        return json.loads(self.broadcast(data, source=source).numpy().tobytes())

    def _tree_all_reduce(self, x: Tensor) -> None:
        flat = x.reshape(-1)
        side = -(-flat.numel() // self.size)
        parts = flat.new_zeros(self.size * side)
        parts[: flat.numel()] = flat
        mine = _tree_sum(self.all_to_all(parts.view(self.size, side)))
        x.copy_(self.start_all_gather(mine).wait().view(-1)[: flat.numel()].view_as(x))

    def _count(self, kind: str, size: float) -> _Flight:
        """Counts a starting collective and returns its timer for `Pending`."""
        self.traffic.add(self.name, kind, size)
        return _Flight(self.traffic, self.name, kind, size)


def group_of(key: str) -> Group:
    """Returns the group with this `key`; the key alone does not keep it alive."""
    return _GROUPS[key]


_GROUPS: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()


def _add_key(group: Group) -> str:
    """Registers `group` under its name, so that compiled code finds a new mesh's group by the same key; numbered while
    both are alive."""
    key, number = group.name, 1
    while key in _GROUPS:
        key, number = f"{group.name} {number + 1}", number + 1
    _GROUPS[key] = group
    return key


def alone(name: str = "alone") -> Group:
    """Returns a group of this process only."""
    return Group(name, (0,), 0, None)


def _tree_sum(parts: Tensor) -> Tensor:
    """Sums along the first dimension as a binary tree of neighbours."""
    terms = list(parts.unbind(0))
    assert len(terms) & (len(terms) - 1) == 0, "a binary tree has a power of two of leaves"
    while len(terms) > 1:
        terms = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
    return terms[0]


def _is_on_gpu(result: Any) -> bool:
    """Whether a tensor, or any of several, is on a GPU."""
    return any(each.is_cuda for each in ((result,) if isinstance(result, Tensor) else result))


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x)


def _sum_into(out: Tensor, parts: Tensor) -> None:
    """Writes to `out` the sum along the first dimension, in rank order."""
    out.copy_(parts[0])
    for part in parts[1:]:
        out += part


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _share(x: Tensor, ranks: int) -> float:
    return _bytes(x) * (ranks - 1) / ranks
