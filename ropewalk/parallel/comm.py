"""The only caller of collectives: groups of ranks.

A group of one rank communicates nothing. Every operation counts the bytes that this rank sends, as the best algorithm
known for it does (Thakur et al. 2005): an all-reduce of n bytes over p ranks sends 2 n (p - 1) / p, its two halves
one of these each. The same operations with gradients, also in compiled code, are in collectives.py.
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
"""Collectives of a GPU that are not read yet, before somebody looks which of them are over."""
Operation = Literal["sum", "max", "min"]
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(slots=True)
class Sent:
    """What went out by one kind of collective."""

    calls: int = 0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Moment:
    """One collective, as it was seen; seconds of `time.perf_counter`."""

    group: str
    kind: str
    bytes: float
    begin: float
    end: float
    """When its result was waited for and there: what overlaps with computing ends late, not slowly."""


@dataclass(slots=True)
class Traffic:
    """What this rank sends, by group and kind of collective, since the last `take`, and how long it waits for others.

    On a GPU it is the stream that waits: the time between two CUDA events around the wait, in which the stream did
    nothing else. They are read when the GPU has passed them (`settle`).
    """

    sent: dict[tuple[str, str], Sent] = field(default_factory=dict)
    timeline: list[Moment] | None = None
    """Filled while it is a list."""
    observers: list[Callable[[Moment], None]] = field(default_factory=list)
    """Are told of every collective when it is over."""
    on_begin: list[Callable[[str, float], None]] = field(default_factory=list)
    """Are told the group of every collective that begins, and when. Not on a GPU, where only the stream knows."""
    waited_s: float = 0.0
    """Time in which this rank did nothing but wait for collectives."""
    on_gpu: bool = False
    """Whether steps are computed on a GPU: then its waiting counts, and not the host's, which goes on beside it."""
    clock: Callable[[], float] = time.perf_counter
    _stream: StreamClock = field(default_factory=StreamClock)
    _queued: deque[_Flight] = field(default_factory=deque)

    def add(self, group: str, kind: str, size: float) -> None:
        sent = self.sent.setdefault((group, kind), Sent())
        sent.calls, sent.bytes = sent.calls + 1, sent.bytes + size

    def take(self) -> dict[tuple[str, str], Sent]:
        """What was sent since the last call."""
        sent, self.sent = self.sent, {}
        return sent

    def take_waited(self) -> float:
        """Seconds of waiting since the last call; those of collectives that a GPU has not passed yet come later."""
        self.settle()
        waited, self.waited_s = self.waited_s, 0.0
        return waited

    def settle(self, *, wait: bool = False) -> None:
        """Reads what a GPU has passed by now, or, with `wait`, all that is queued."""
        if wait and self._queued:
            self._queued[-1].synchronize()
        while self._queued and self._queued[0].is_over():
            self._queued.popleft().tell()

    def calibrate(self) -> None:
        """To be called now and then, when the GPU has nothing to do: its moments are told in the host's seconds."""
        if self.on_gpu:
            self.settle()
            self._stream.calibrate()

    def drop_queued(self) -> None:
        """Waits that are not read yet do not count."""
        self._queued.clear()


class _Flight:
    """A collective under way, timed where its result is: on the current stream of a GPU, or on the host."""

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
        """It was just launched. On a GPU it begins when the stream comes to this point."""
        self._on_gpu, traffic = on_gpu, self._traffic
        if on_gpu and (traffic.timeline is not None or traffic.observers):
            self._begin = traffic._stream.stamp()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Its end is waited for in this block, and that is all that happens there."""
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
        """Whether the GPU has passed its end."""
        return self._waits[1].query()

    def synchronize(self) -> None:
        """Waits until the GPU has passed its end."""
        self._waits[1].synchronize()

    def tell(self) -> None:
        """Adds it to the traffic, when it is over."""
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
    """A collective under way."""

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
        """The result, when it is there. On a GPU it is the stream that waits, not the host."""
        with self._moment.waiting() if self._moment else contextlib.nullcontext():
            for work in self._works:
                work.wait()
        if self._finish:
            self._finish()
        self._works, self._finish, self._moment = (), None, None
        return self._result


class Group:
    """Ranks that communicate with each other; `name` says what for. All of them must call each operation.

    With `exact`, sums are binary trees over the ranks in order: the same bits however many ranks share the work, as
    long as their number is a power of two.
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
        """Numbers of its members in the world."""
        self.size = len(ranks)
        self.rank = self.ranks.index(place)
        """This process's place among them."""
        self.traffic = traffic or Traffic()
        self.exact = exact
        self._handle = handle
        self.key = _add_key(self) if self.size > 1 else ""
        """Its name in compiled code, which holds no objects."""
        self.kept: dict[str, Any] = {}
        """What compiled code finds again by name; goes with the group."""

    def all_reduce(self, x: Tensor, *, operation: Operation = "sum") -> Tensor:
        """`x` summed over the ranks, in place."""
        return self.start_all_reduce(x, operation=operation).wait()

    def start_all_reduce(self, x: Tensor, *, operation: Operation = "sum") -> Pending:
        """Begins `all_reduce`; `x` is not to be touched before the end."""
        if self.size == 1:
            return Pending((), x)
        if self.exact and operation == "sum":
            return Pending((), x, finish=lambda: self._tree_all_reduce(x))
        moment = self._count("all_reduce", 2 * _share(x, self.size))
        whole = x if x.is_contiguous() else x.contiguous()
        work = dist.all_reduce(whole, _OPERATIONS[operation], group=self._handle, async_op=True)
        return Pending([work], x, finish=None if whole is x else lambda: _copy(x, whole), moment=moment)

    def all_gather(self, x: Tensor, *, dim: int = 0) -> Tensor:
        """The ranks' `x` one after the other along `dim`; all of one shape."""
        if self.size == 1:
            return x
        parts = self.start_all_gather(x).wait()
        return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)

    def start_all_gather(self, x: Tensor, out: Tensor | None = None) -> Pending:
        """Begins to gather `x` of every rank along a new first dimension."""
        if self.size == 1:
            return Pending((), x.unsqueeze(0) if out is None else out.copy_(x.unsqueeze(0)))
        out = x.new_empty((self.size, *x.shape)) if out is None else out
        moment = self._count("all_gather", _share(out, self.size))
        work = all_gather_flat(out.view(-1), x.contiguous().view(-1), group=self._handle)
        return Pending([work], out, moment=moment)

    def reduce_scatter(self, x: Tensor, *, dim: int = 0) -> Tensor:
        """This rank's part, along `dim`, of the sum of all ranks' `x`."""
        if self.size == 1:
            return x
        parts = x.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        return self.start_reduce_scatter(parts).wait()

    def start_reduce_scatter(self, parts: Tensor, out: Tensor | None = None) -> Pending:
        """Begins to sum over ranks `parts`, whose first dimension counts them; each rank gets its own."""
        if self.size == 1:
            return Pending((), parts[0] if out is None else out.copy_(parts[0]))
        out = torch.empty_like(parts[0]) if out is None else out
        if self.exact:
            return Pending((), out, finish=lambda: _copy(out, _tree_sum(self.all_to_all(parts))))
        moment = self._count("reduce_scatter", _share(parts, self.size))
        work = reduce_scatter_flat(out.view(-1), parts.contiguous().view(-1), group=self._handle)
        return Pending([work], out, moment=moment)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Row i of `parts` goes to rank i; the result's row i comes from it."""
        if self.size == 1:
            return parts
        out = torch.empty_like(parts, memory_format=torch.contiguous_format)
        moment = self._count("all_to_all", _share(parts, self.size))
        work = dist.all_to_all_single(out, parts.contiguous(), group=self._handle, async_op=True)
        return Pending([work], out, moment=moment).wait()

    def broadcast(self, x: Tensor, *, source: int = 0) -> Tensor:
        """`x` of the group's rank `source`, in place."""
        if self.size > 1:
            moment = self._count("broadcast", _bytes(x) if self.rank == source else 0)
            work = dist.broadcast(x, self.ranks[source], group=self._handle, async_op=True)
            return Pending([work], x, moment=moment).wait()
        return x

    def start_shift(self, tensors: Sequence[Tensor]) -> Pending:
        """Begins to send `tensors` to the next rank of the ring and to receive those of the one before."""
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
        """Begins to send `x` to the group's rank `to`, which must receive it; `tag` counts on gloo and MPI only."""
        moment = self._count("send", _bytes(x))
        there = x.detach().contiguous()
        # As a batch of one: by itself it would have NCCL make another communicator for the pair.
        order = dist.P2POp(dist.isend, there, self.ranks[to], self._handle, tag)
        return Pending(dist.batch_isend_irecv([order]), there, moment=moment)

    def start_receive(self, out: Tensor, source: int, *, tag: int = 0) -> Pending:
        """Begins to receive `out` from the group's rank `source`."""
        moment = self._count("receive", 0)
        order = dist.P2POp(dist.irecv, out, self.ranks[source], self._handle, tag)
        return Pending(dist.batch_isend_irecv([order]), out, moment=moment)

    def gather_numbers(self, value: int, *, device: torch.device | str = "cpu") -> list[int]:
        """The `value` of every rank, in order."""
        return self.all_gather(torch.tensor([value], dtype=torch.int64, device=device)).tolist()

    def broadcast_json(self, value: Any, *, source: int = 0) -> Any:
        """`value` of the group's rank `source`, as JSON gives it back; for groups of hosts."""
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
        """Counts a collective that begins, and returns what `Pending` times it with."""
        self.traffic.add(self.name, kind, size)
        return _Flight(self.traffic, self.name, kind, size)


def group_of(key: str) -> Group:
    """The group with this `key`; somebody else keeps it alive."""
    return _GROUPS[key]


_GROUPS: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()


def _add_key(group: Group) -> str:
    """Its name, so that a group of a new mesh is the same to compiled code as the one before; with a number where both
    are alive."""
    key, number = group.name, 1
    while key in _GROUPS:
        key, number = f"{group.name} {number + 1}", number + 1
    _GROUPS[key] = group
    return key


def alone(name: str = "alone") -> Group:
    """A group of this process only."""
    return Group(name, (0,), 0, None)


def _tree_sum(parts: Tensor) -> Tensor:
    """The sum along the first dimension by pairs of neighbours, their pairs, and so on."""
    terms = list(parts.unbind(0))
    assert len(terms) & (len(terms) - 1) == 0, "a binary tree has a power of two of leaves"
    while len(terms) > 1:
        terms = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
    return terms[0]


def _is_on_gpu(result: Any) -> bool:
    """Of a tensor, or of some that travel together."""
    return any(each.is_cuda for each in ((result,) if isinstance(result, Tensor) else result))


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _share(x: Tensor, ranks: int) -> float:
    return _bytes(x) * (ranks - 1) / ranks
