"""What a rank's host issues, recorded while it trains on gloo, in the terms of tests/plan/nccl_order.py.

The mesh is made as it is on NCCL: with a relay, and with a number sent through every channel. Which operations are
NCCL's and which are those of hosts, is what the mesh asks torch for: a group of gloo is one of hosts.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.plan.nccl_order import Collective, HostOperation, Issue, Kernel, Meet, Relay, Wait

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_to_all_single",
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
"""torch 2.13 gave some of them other names."""


class Recorder(TorchDispatchMode):
    """In the block all collectives, messages and kernels of this rank get into `issued`."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[HostOperation] = []
        self._of_hosts: set[str] = set()
        self._counts: Counter[Hashable] = Counter()
        self._kernels: set[str] = set()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Operations of torch.distributed, and what torch computes."""
        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(dist, "get_backend", lambda group=None: "nccl")
            patch.setattr(torch.cuda, "synchronize", self._synchronize)
            patch.setattr(dist, "new_group", self._noting_hosts(dist.new_group))
            patch.setattr(dist, "batch_isend_irecv", self._watching_messages(dist.batch_isend_irecv))
            for kind in COLLECTIVES:
                if hasattr(dist, kind):
                    patch.setattr(dist, kind, self._watching(kind, getattr(dist, kind)))
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        computes = all(each.alias_info is None or each.alias_info.is_write for each in func._schema.returns)
        name = str(func)
        if computes and func.namespace == "aten" and name not in self._kernels:
            self._kernels.add(name)
            self.issued.append(Kernel(name))
        return func(*args, **(kwargs or {}))

    def _synchronize(self) -> None:
        self.issued.append(Relay("put", ("all that was computed", self._number("synchronize"))))

    def _noting_hosts(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(members: list[int], backend: str | None = None, **options: Any) -> Any:
            group = original(members, backend=backend, **options)
            if backend == "gloo":
                self._of_hosts.add(group.group_name)
            return group

        return call

    def _watching(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, group: Any, **options: Any) -> Any:
            work = original(*arguments, group=group, **options)
            return self._together(kind, group, work)

        return call

    def _watching_messages(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(orders: list[Any]) -> list[Any]:
            works = original(orders)
            if len(orders) > 1:  # a shift around the ring of all members
                return [self._together("shift", orders[0].group, _All(works))]
            (order,) = orders
            kind = "send" if order.op is dist.isend else "receive"
            if order.group.group_name in self._of_hosts:
                return [self._relayed(kind, order, works[0])]
            name = self._number("operations")
            self.issued.append(Issue(kind, order.group.group_name, order.peer, name))  # type: ignore[arg-type]
            return [_Watched(works[0], lambda: self.issued.append(Wait(name)))]

        return call

    def _together(self, kind: str, group: Any, work: Any) -> Any:
        members = tuple(dist.get_process_group_ranks(group))
        communicator = group.group_name
        if communicator in self._of_hosts:
            self.issued.append(Meet((communicator, self._number(communicator)), members))
            return work
        name = self._number("operations")
        self.issued.append(Collective(communicator, members, kind, name))
        return _Watched(work, lambda: self.issued.append(Wait(name)))

    def _relayed(self, kind: str, order: Any, work: Any) -> Any:
        here = dist.get_rank()
        ends = (here, order.peer) if kind == "send" else (order.peer, here)
        channel = (order.group.group_name, *ends, order.tag)
        name = (*channel, self._number(channel))
        if kind == "send":
            self.issued.append(Relay("put", name))
            return work
        return _Watched(work, lambda: self.issued.append(Relay("take", name)))

    def _number(self, what: Hashable) -> int:
        self._counts[what] += 1
        return self._counts[what]


class _Watched:
    """A pending operation that tells when it is waited for."""

    def __init__(self, work: Any, told: Callable[[], None]) -> None:
        self._work, self._told = work, told

    def wait(self) -> None:
        self._told()
        self._work.wait()


class _All:
    """Several pending operations as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
