"""Horovod's API for custom training loops: change the import to `import ropewalk.parallel.horovod as hvd`.

Named collectives run in a background thread, so ranks may request them in any order; small ones are fused
(negotiation.py). Not supported: process sets, alltoall, reducescatter, sparse gradients. Broadcast objects must be
JSON: nothing is unpickled.
"""

from __future__ import annotations

import atexit
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ropewalk.base.errors import UserError
from ropewalk.config.horovod import HorovodSettings, horovod_settings
from ropewalk.config.ranks import Ranks, ranks

from . import mesh
from .named.background import Background, Entry
from .named.distributed_optimizer import distribute
from .named.negotiation import Request


class Average:
    """Mean over the ranks."""


class Sum:
    """Sum over the ranks."""


class Adasum:
    """Adaptive sum: counts what ranks agree on once (Maleki et al. 2021); needs a power of two of ranks."""


class Compression:
    """Gradient compression before sending, and decompression."""

    class none:
        """No compression."""

        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
            return tensor, tensor.dtype

        @staticmethod
        def decompress(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            return tensor.to(dtype)

    class fp16(none):
        """Half the bytes of float32; values beyond 65504 become infinite."""

        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
            return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    class bf16(none):
        """Half the bytes of float32, with its range and 8 bits of precision."""

        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
            return (tensor.bfloat16() if tensor.is_floating_point() else tensor), tensor.dtype


class _World:
    """This process's rank and groups, between `init` and `shutdown`."""

    def __init__(self, place: Ranks, settings: HorovodSettings) -> None:
        self.place = place
        self.entered = place.world > 1 and not torch.distributed.is_initialized()
        self.background: Background | None = None
        self.numbers = {kind: itertools.count() for kind in ("allreduce", "allgather", "broadcast")}
        if place.world > 1:
            mesh.enter(place, device="cuda" if torch.cuda.is_available() else "cpu")
            self.background = Background(*mesh.world_groups(), settings)


_WORLD: list[_World] = []
"""At most one, created by `init`."""


def init(*, place: Ranks | None = None, settings: HorovodSettings | None = None) -> None:
    """Joins the processes started by `torchrun`, `mpirun` or `srun`; all must call. Also works for a single process.

    `place` and `settings` default to the environment's."""
    if _WORLD:
        return
    _WORLD.append(_World(place or ranks(), settings or horovod_settings()))
    atexit.register(shutdown)


def shutdown() -> None:
    """Stops the named collectives of all ranks; pending ones fail on other ranks."""
    if not _WORLD:
        return
    world = _WORLD.pop()
    atexit.unregister(shutdown)
    if world.background:
        world.background.close()
    if world.entered:
        mesh.leave()


def is_initialized() -> bool:
    """Whether `init` was called."""
    return bool(_WORLD)


def rank() -> int:
    """Returns this process's rank."""
    return _world().place.rank


def size() -> int:
    """Returns the number of processes."""
    return _world().place.world


def local_rank() -> int:
    """Returns this process's rank on its machine, which is the index of its GPU."""
    return _world().place.local_rank


def local_size() -> int:
    """Returns the number of processes on this machine."""
    return _world().place.local_world


def allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: type = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Entry:
    """Starts to reduce `tensor` over the ranks; all ranks request the same `name`."""
    if not (tensor.is_floating_point() or prescale_factor == postscale_factor == 1):
        raise UserError(f"horovod: a tensor of {_name_of(tensor.dtype)} cannot be scaled; leave the factors at 1")
    operation = f"{_operation(op)} {prescale_factor} {postscale_factor}"
    return _ask("allreduce", tensor, name, operation)


def allreduce(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compression.none] = Compression.none,
    op: type = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces `tensor` over the ranks; not differentiable."""
    narrow, dtype = compression.compress(tensor.detach())
    return compression.decompress(allreduce_async(narrow, name, op, prescale_factor, postscale_factor).wait(), dtype)


def allreduce_async_(tensor: Tensor, name: str | None = None, op: type = Average) -> Entry:
    """Starts to reduce `tensor`; `synchronize` writes the result into it."""
    return _in_place(allreduce_async(tensor, name, op), tensor)


def allreduce_(tensor: Tensor, name: str | None = None, op: type = Average) -> Tensor:
    """Reduces `tensor` over the ranks, in place."""
    return synchronize(allreduce_async_(tensor, name, op))


def allgather_async(tensor: Tensor, name: str | None = None) -> Entry:
    """Starts to gather the rows of all ranks; row counts may differ."""
    return _ask("allgather", tensor, name)


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Concatenates the rows of all ranks."""
    return synchronize(allgather_async(tensor, name))


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None) -> Entry:
    """Starts to broadcast `tensor` from `root_rank`."""
    if not 0 <= root_rank < size():
        raise UserError(f"horovod: `root_rank` is {root_rank}, ranks are 0 to {size() - 1}")
    return _ask("broadcast", tensor, name, str(root_rank))


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Returns `tensor` of `root_rank`."""
    return synchronize(broadcast_async(tensor, root_rank, name))


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None) -> Entry:
    """Starts to broadcast `tensor` from `root_rank`; `synchronize` writes it into the other ranks' tensors."""
    return _in_place(broadcast_async(tensor, root_rank, name), tensor)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Broadcasts `tensor` from `root_rank`, in place."""
    return synchronize(broadcast_async_(tensor, root_rank, name))


def poll(handle: Entry) -> bool:
    """Whether a collective has finished."""
    return handle.over.is_set()


def synchronize(handle: Entry) -> Tensor:
    """Waits for a collective and returns its result."""
    result = handle.wait()
    if handle.target is None:
        return result
    with torch.no_grad():
        return handle.target.copy_(result.view_as(handle.target))


def join() -> int:
    """Contributes zeros, when out of data, until all ranks have joined; returns the rank that joined last."""
    background = _world().background
    return background.join() if background else 0


def barrier() -> None:
    """Waits for all ranks."""
    allreduce(torch.zeros(1), name="barrier")


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Broadcasts the tensors of a `state_dict()` or `named_parameters()` from `root_rank`, in place."""
    named = params.items() if isinstance(params, Mapping) else params
    tensors = [(name, each) for name, each in named if isinstance(each, Tensor)]
    for handle in [broadcast_async_(each.data, root_rank, f"parameter.{name}") for name, each in tensors]:
        synchronize(handle)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Broadcasts settings and state of `optimizer` from `root_rank`, which may be the only rank that took steps."""
    mine = optimizer.state_dict()
    shapes = {
        str(place): {key: _outline(value) if isinstance(value, Tensor) else value for key, value in state.items()}
        for place, state in mine["state"].items()
    }
    groups, shapes = broadcast_object([mine["param_groups"], shapes], root_rank, "optimizer")
    tensors: dict[str, Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    for place, values in shapes.items():
        own = mine["state"].get(int(place), {})
        state[int(place)] = dict(values)
        for key, value in values.items():
            if isinstance(value, list):
                shape, dtype, device = value
                there = own.get(key)
                made = (
                    torch.zeros(shape, dtype=getattr(torch, dtype), device=device) if there is None else there.clone()
                )
                tensors[f"{place}.{key}"] = state[int(place)][key] = made
    for name, tensor in tensors.items():
        broadcast_(tensor, root_rank, f"optimizer.{name}")
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Broadcasts `obj` from `root_rank` as JSON: numbers, strings, lists and dictionaries."""
    name = name or f"object.{next(_world().numbers['broadcast'])}"
    text = b""
    if rank() == root_rank:
        try:
            text = json.dumps(obj).encode()
        except TypeError as error:
            remedy = "send tensors by `broadcast_parameters`"
            raise UserError(f"horovod: `{name}` is not what JSON can hold ({error}); {remedy}") from None
    length = int(broadcast(torch.tensor([len(text)]), root_rank, f"{name}.length"))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.zeros(length, dtype=torch.uint8)
    return json.loads(bytes(broadcast(data, root_rank, f"{name}.data").tolist()))


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compression.none] = Compression.none,
    backward_passes_per_step: int = 1,
    op: type = Average,
) -> Any:
    """Makes `optimizer` reduce gradients during the backward pass and wait for them in `step`; returns it. Gradients of
    `backward_passes_per_step` passes accumulate before they are reduced."""

    def start(name: str, gradient: Tensor) -> Any:
        narrow, dtype = compression.compress(gradient)
        handle = allreduce_async(narrow, f"gradient.{name}", op)
        return lambda: compression.decompress(handle.wait(), dtype)

    return distribute(optimizer, named_parameters, start, passes=backward_passes_per_step)


def _world() -> _World:
    if not _WORLD:
        raise UserError("horovod: call `init()` first")
    return _WORLD[0]


def _operation(op: type) -> str:
    if op not in (Average, Sum, Adasum):
        raise UserError(f"horovod: `op` is {op}; take Average, Sum or Adasum")
    if op is Adasum and size() & (size() - 1):
        raise UserError(f"horovod: Adasum needs a power of two of ranks; there are {size()}")
    return op.__name__.lower()


def _ask(kind: Any, tensor: Tensor, name: str | None, operation: str = "") -> Entry:
    world = _world()
    # Unnamed collectives are numbered, consistently on ranks that request them in the same order.
    name = f"{kind}.{name}" if name is not None else f"{kind}.unnamed.{next(world.numbers[kind])}"
    request = Request(name, kind, tuple(tensor.shape), _name_of(tensor.dtype), tensor.device.type, operation)
    if world.background:
        return world.background.ask(request, tensor)
    entry = Entry(request, tensor)
    result = tensor.detach().clone()
    if kind == "allreduce":
        before, after = (float(each) for each in operation.split()[1:])
        result = result * before * after if before * after != 1 else result
    entry.finish(result)
    return entry


def _in_place(handle: Entry, tensor: Tensor) -> Entry:
    handle.target = tensor
    return handle


def _outline(tensor: Tensor) -> list[Any]:
    """Returns shape, dtype and device, from which another rank allocates a matching tensor."""
    return [list(tensor.shape), _name_of(tensor.dtype), tensor.device.type]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
