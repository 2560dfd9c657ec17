"""Less kept for the backward pass: blocks, or their attention, are computed again when it needs them.

What is computed again is what was computed first, bit for bit: dropout is a function of place (model/dropout.py), so
there is no generator to set back. Three ways, all through seams of the model:

    attention   `recomputed(attend)` keeps queries, keys and values (Korthikanti et al. 2022, section 5)
    full        a block keeps its input alone (Chen et al. 2016)
    auto        as few blocks as the memory asks for keep their input alone (Mimose, Liao et al. 2022)

What a block keeps may be dealt to the ranks that hold it alike (ZeRO-R) or leave the device (activation_offload.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ropewalk.model.attend import Attend
from ropewalk.model.modules import Block
from ropewalk.plan.memory import Planner

from .activation_offload import ActivationOffload
from .comm import Group, alone

Forward = Callable[[Block, Tensor], Tensor]
Choose = Callable[[Block, Tensor, Forward], bool]
"""Whether a block on its input is to be computed again; every rank that shares the block must choose alike."""


def never(block: Block, x: Tensor, forward: Forward) -> bool:
    """Every block keeps what its backward pass needs."""
    return False


def always(block: Block, x: Tensor, forward: Forward) -> bool:
    """Every block keeps its input alone."""
    return True


def recomputed(attend: Attend) -> Attend:
    """`attend` that keeps queries, keys and values, and meets them again in the backward pass.

    Kernels that never hold all scores leave little to save: the logarithm of every query's sum, and the result where
    the output projection reads a copy of it.
    """

    def attend_again(layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        return _again(attend, layer, q_BHTD, k_BGTD, v_BGTD)

    return attend_again


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRunner:
    """Runs blocks as `Decoder.run_block` asks: some twice, what they keep kept elsewhere."""

    choose: Choose = never
    partition: Group | None = None
    """Ranks that hold the input of a block alike: of one that is computed again, each keeps its share, and they gather
    it in the backward pass (ZeRO-R, Rajbhandari et al. 2020, section 6.1). Price: one all-gather of it."""
    offload: ActivationOffload | None = None

    def __call__(self, block: Block, x: Tensor, forward: Forward) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(block, x)
        again = self.choose(block, x, forward)
        keep: Keep | None = self.offload.open(block) if self.offload else None
        if again and self.partition and self.partition.size > 1:
            keep = _Shared(self.partition, keep)
        hooks = saved_tensors_hooks(keep.pack, keep.unpack) if keep else contextlib.nullcontext()
        with hooks:
            # The hooks see what the block saves, or of one that is computed again what `checkpoint` does: its input.
            return _again(forward, block, x) if again else forward(block, x)


class Keep(Protocol):
    """Where a tensor stays until the backward pass."""

    def pack(self, x: Tensor) -> Any:
        """What stands for `x` in the graph."""

    def unpack(self, packed: Any) -> Tensor:
        """`x` again."""


class _Shared:
    """Keeps this rank's share of a tensor that all ranks of a group hold alike."""

    def __init__(self, group: Group, keep: Keep | None) -> None:
        self._group, self._keep = group, keep

    def pack(self, x: Tensor) -> Any:
        group, flat = self._group, x.detach().reshape(-1)
        side = -(-flat.numel() // group.size)
        # A copy, so that the rest can go; the last shares may be shorter, and travel padded.
        mine = flat.new_zeros(side)
        part = flat[group.rank * side : (group.rank + 1) * side]
        mine[: part.numel()] = part
        return self._keep.pack(mine) if self._keep else mine, x.shape

    def unpack(self, packed: Any) -> Tensor:
        kept, shape = packed
        mine = self._keep.unpack(kept) if self._keep else kept
        return self._group.all_gather(mine)[: shape.numel()].view(shape)


class AutoRecompute:
    """Chooses by a planner, which learns what blocks really keep.

    The first time a size of input comes, every block runs twice: once to count what it saves, with only that alive,
    and once to be computed again, which needs the least memory (Mimose's shuttling collector). From then on the plan
    of that size is followed. `group` are the ranks that run the same blocks together and so must choose alike: the
    largest count among them is everybody's.

    `places` is how many ranks split the places of a row: the length of a row is that many times that of the input.
    """

    def __init__(self, planner: Planner, *, group: Group | None = None, places: int = 1) -> None:
        self.planner = planner
        self._group = group or alone()
        self._places = places
        self._size = (0, 0)

    def __call__(self, block: Block, x: Tensor, forward: Forward) -> bool:
        rows, length = self._size = x.shape[0], x.shape[1] * self._places
        if self.planner.wants(block.layer, rows, length):
            counted = torch.tensor(inner_bytes(block, x, forward), device=x.device)
            most = self._group.all_reduce(counted, operation="max")
            self.planner.observe(block.layer, rows, length, int(most))
            return True
        return block.layer in self.planner.plan_for(rows, length)

    def tighten(self, *, excess_bytes: int = 0) -> bool:
        """After the last microbatch ran out of memory, or needed `excess_bytes` more than it might: inputs of its size
        or larger will be planned to need less. False when nothing is left to recompute. All ranks of the group must
        call."""
        return self.planner.tighten(*self._size, excess_bytes=excess_bytes)


def inner_bytes(block: Block, x: Tensor, forward: Forward) -> int:
    """Bytes of all storages, each counted once, that autograd keeps of a block and that go when it does not: the input,
    weights, rotations and masks stay."""
    kept: dict[int, tuple[StorageWeakRef, int]] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return tensor.detach()  # the tensor itself, saved by who made it, would hold the graph that holds it

    with saved_tensors_hooks(count, lambda tensor: tensor):
        result = forward(block, x)
    del result
    return sum(size for storage, size in kept.values() if storage.expired())


def _again(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
