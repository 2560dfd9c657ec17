"""A torch.distributed backend over MPI, for processes started by `mpirun`.

torch's own needs torch compiled against an MPI. This one needs only mpi4py: a Python process group over MPI's
non-blocking collectives. GPU tensors are staged through host memory.

MPI has no 16-bit floats. They are sent as bytes; sums are in float32 and rounded once, which is more exact than
rounding at every hop and sends twice the bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ReduceOp

from ropewalk.base.errors import MissingPackage, Preempted, UserError
from ropewalk.config.ranks import Ranks

NAME = "mpi4py"
"""Name of the backend in torch, which reserves "mpi" for its built-in one."""


def register(ranks: Ranks) -> str:
    """Registers the backend with torch.distributed and returns its name. Raises if MPI's ranks are not `ranks`."""
    comm = _mpi().COMM_WORLD
    if (comm.rank, comm.size) != (ranks.rank, ranks.world):
        raise UserError(
            f"`parallel.backend` is mpi, but to MPI this is process {comm.rank} of {comm.size}, not {ranks.rank} of "
            f"{ranks.world}; start it with `mpirun -n {ranks.world} ropewalk train ...`, or choose another backend"
        )
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu", "cuda"])
    return NAME


def meet() -> TCPStore:
    """Rendezvous: rank 0 opens a store and broadcasts its address over MPI. All ranks must call."""
    mpi = _mpi()
    world = mpi.COMM_WORLD
    machine = world.Split_type(mpi.COMM_TYPE_SHARED)
    # A laptop's host name may not resolve, and only several machines need it.
    host = "127.0.0.1" if machine.size == world.size else mpi.Get_processor_name()
    machine.Free()
    opened = TCPStore(host, 0, world.size, True, wait_for_workers=False) if world.rank == 0 else None
    host, port = world.bcast((host, opened.port) if opened else None)
    return opened or TCPStore(host, port, world.size, False, wait_for_workers=False)


def part() -> None:
    """Finalizes MPI in this process if this module initialized it; waits for all ranks.

    A failing process must not wait for the others: it exits without, and `mpirun` then ends them. Ranks agree on
    interruptions and preemptions, so that all of them call this.
    """
    begun, error = sys.modules.get("mpi4py"), sys.exception()
    if begun and not begun.rc.finalize and (error is None or isinstance(error, KeyboardInterrupt | Preempted)):
        _mpi().Finalize()


class _Work(dist.Work):
    """A collective in flight; keeps MPI's buffers alive."""

    def __init__(self, request: Any, *kept: Any, finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._request, self._kept, self._finish = request, kept, finish

    def wait(self, timeout: Any = None) -> bool:
        self._request.Wait()
        if self._finish:
            self._finish()
        self._kept, self._finish = (), None
        return True

    def is_completed(self) -> bool:
        return bool(self._request.Test())


class _All(dist.Work):
    """Several collectives as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        return all([work.wait() for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


# torch.distributed uses one of the several overloads in the type's stubs.
_ProcessGroup: Any = dist.ProcessGroup


class _Group(_ProcessGroup):
    """The process group that torch.distributed calls; method and argument names are torch's."""

    def __init__(self, comm: Any, name: str) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm, self._name = comm, name

    # torch looks these up in its C++ object, which does not know Python process groups.
    def getBackendName(self) -> str:
        return NAME

    def getRank(self) -> int:
        return int(self._comm.rank)

    def getSize(self) -> int:
        return int(self._comm.size)

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return NAME

    def setGroupDesc(self, text: str) -> None: ...

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _together([self._all_reduce(x, _operation(opts)) for x in tensors])

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        out = _Landing(tensors[0])
        return _Work(self._comm.Ibcast(out.bits, root=opts.rootRank), out, finish=out.land)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        out, sent = _Landing(output), _bits(input)
        return _Work(self._comm.Iallgather(sent, out.bits), out, sent, finish=out.land)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return _together([self._gather_list(*pair) for pair in zip(outputs, inputs, strict=True)])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return _together([self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        out, sent = _Landing(output, summed=True), _numbers(input)
        request = self._comm.Ireduce_scatter_block(sent, out.numbers, op=_operation(opts))
        return _Work(request, out, sent, finish=out.land)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _together([self.reduce_scatter_single(out, torch.stack(parts), opts) for out, parts in pairs])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return _together([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_rows: list[int], input_rows: list[int], opts: Any = None
    ) -> dist.Work:
        out, sent = _Landing(output), _bits(input)
        received, given = _counts(output, output_rows, self.getSize()), _counts(input, input_rows, self.getSize())
        request = self._comm.Ialltoallv([sent, given], [out.bits, received])
        return _Work(request, out, sent, finish=out.land)

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        sent = _bits(tensors[0])
        return _Work(self._comm.Isend(sent, dest=rank, tag=tag), sent)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        out = _Landing(tensors[0])
        return _Work(self._comm.Irecv(out.bits, source=rank, tag=tag), out, finish=out.land)

    def barrier(self, opts: Any = None) -> dist.Work:
        return _Work(self._comm.Ibarrier())

    def shutdown(self) -> None:
        """No-op: `Finalize` frees all of MPI's resources."""

    # torch 2.11's names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _all_reduce(self, x: Tensor, operation: Any) -> dist.Work:
        out = _Landing(x, summed=True)
        return _Work(self._comm.Iallreduce(_mpi().IN_PLACE, out.numbers, op=operation), out, finish=out.land)

    def _gather_list(self, outputs: list[Tensor], x: Tensor) -> dist.Work:
        sent, landed = _bits(x), torch.empty((self.getSize(), *x.shape), dtype=x.dtype)

        def land() -> None:
            for out, part in zip(outputs, landed, strict=True):
                out.copy_(part)

        return _Work(self._comm.Iallgather(sent, _bits(landed)), sent, landed, finish=land)


class _Landing:
    """Receive buffer for `x`: its own memory, or a staging buffer that `land` copies to it."""

    def __init__(self, x: Tensor, *, summed: bool = False) -> None:
        self._x = x.detach()
        here = _for_sums(self._x) if summed else self._x
        self._landed = here.cpu().contiguous()

    @property
    def bits(self) -> Any:
        return _bits(self._landed)

    @property
    def numbers(self) -> Any:
        return _numbers(self._landed)

    def land(self) -> None:
        if self._landed.data_ptr() != self._x.data_ptr():
            self._x.copy_(self._landed)


def _make_group(options: Any, _: Any) -> _Group:
    """Called by torch.distributed on the members of a group only."""
    world = _mpi().COMM_WORLD
    members = list(options.global_ranks_in_group) or list(range(world.size))
    chosen = world.group.Incl(members)
    comm = world.Create_group(chosen)
    chosen.Free()
    return _Group(comm, options.group_id)


def _together(works: list[dist.Work]) -> dist.Work:
    return works[0] if len(works) == 1 else _All(works)


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor) -> Any:
    """Returns the bits of `x` as integers that MPI supports; shares contiguous host memory."""
    return x.detach().cpu().contiguous().view(-1).view(_SAME_SIZE[x.element_size()]).numpy()


def _numbers(x: Tensor) -> Any:
    """Returns `x` in a dtype that MPI can sum; shares memory if possible."""
    return _for_sums(x.detach()).cpu().contiguous().view(-1).numpy()


def _for_sums(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _counts(x: Tensor, rows: list[int], ranks: int) -> list[int]:
    """Returns the number of elements to or from each rank; equal counts without `rows`."""
    if not rows:
        return [x.numel() // ranks] * ranks
    side = x.numel() // max(1, x.shape[0])
    return [side * count for count in rows]


def _operation(options: Any) -> Any:
    mpi = _mpi()
    asked = ReduceOp.SUM if options is None else options.reduceOp
    for operation, ours in ((ReduceOp.SUM, mpi.SUM), (ReduceOp.MAX, mpi.MAX), (ReduceOp.MIN, mpi.MIN)):
        if asked == operation:
            return ours
    raise ValueError(f"{asked}: only sums, maxima and minima are made over MPI")


def _mpi() -> Any:
    try:
        import mpi4py

        # MPI's exit handler would wait for all processes, but a failing one must not wait for its peers.
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ImportError as error:
        raise MissingPackage("mpi4py", "training over MPI", "mpi") from error
    return MPI
