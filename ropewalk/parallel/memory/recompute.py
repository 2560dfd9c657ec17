"""Activation checkpointing: full blocks, attention only, or as many blocks as the memory budget needs.

Recomputation is bit-identical: dropout is a function of position (model/dropout.py), so no generator state is restored.

    attention   `recomputed(attend)` keeps queries, keys and values (Korthikanti et al. 2022, section 5)
    full        a block keeps only its input (Chen et al. 2016)
    auto        as few blocks as the budget needs keep only their input (Mimose, Liao et al. 2022)

Kept tensors may also be partitioned over ranks that hold them alike (ZeRO-R), offloaded (activation_offload.py) or
compressed (activation_packing.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ropewalk.model.activations import Division
from ropewalk.model.attend import Attend
from ropewalk.model.modules import Block
from ropewalk.model.spec import Spec
from ropewalk.plan.plan import Plan
from ropewalk.plan.recompute_planner import Planner, planner_for

from ..comm import Group
from ..mesh import Mesh
from .activation_offload import ActivationOffload
from .activation_packing import ActivationPacking

RELEASE_TRIES = 100
"""Milliseconds to wait until a counted block is freed."""
Forward = Callable[[Block, Tensor], Tensor]
Choose = Callable[[Block, Tensor, Forward], bool]
"""Whether to recompute a block on its input; all ranks that share the block must choose alike."""


def never(block: Block, x: Tensor, forward: Forward) -> bool:
    """Recomputes no block."""
    return False


def always(block: Block, x: Tensor, forward: Forward) -> bool:
    """Recomputes every block from its input."""
    return True


def recomputed(attend: Attend) -> Attend:
    """Returns `attend` that keeps only queries, keys and values, and recomputes attention in the backward pass.

    Flash kernels leave little to save: the log-sum-exp of each query, and the output where the output projection reads
    a copy of it.
    """

    def attend_again(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        return _again(attend, q_BHTD, k_BGTD, v_BGTD)

    return attend_again


def make_run_block(
    plan: Plan,
    spec: Spec,
    mesh: Mesh,
    *,
    layers: Collection[int],
    last: bool = True,
    trained: Collection[str] | None = None,
    live_microbatches: int = 1,
    packing: ActivationPacking | None = None,
) -> BlockRunner:
    """Builds the runner that `plan` asks for, for a pipeline stage with `layers`, and the head if it is the `last`.

    `live_microbatches` share the plan's activation budget. `trained` names parameters of the whole model. `packing` is
    the executor's.
    """
    tensor, context = mesh.group("tensor"), mesh.group("context")
    partition = tensor if plan.partition_activations and not plan.sequence else None
    choose: Choose = always if plan.recompute == "full" else never
    if plan.recompute == "auto":
        division = Division(
            tensor=tensor.size, sequence=plan.sequence, context=context.size, partition=partition is not None
        )
        planner = planner_for(
            plan,
            spec,
            trained=trained,
            division=division,
            layers=layers,
            last=last,
            live_microbatches=live_microbatches,
        )
        choose = AutoRecompute(planner, groups=(tensor, context), places=division.places, positions_first=plan.sequence)
    offload = None
    if "activations" in plan.offload:
        # Activations of the last block are needed immediately.
        offload = ActivationOffload(sorted(layers)[:-1], folder=Path(plan.offload_path) if plan.offload_path else None)
    return BlockRunner(choose=choose, partition=partition, offload=offload, packing=packing)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRunner:
    """Runs blocks for `ModelStage.run_block`: recomputes, partitions, offloads or compresses their activations."""

    choose: Choose = never
    partition: Group | None = None
    """Ranks that hold the same block input: for a recomputed block each keeps its share, all-gathered in the backward
    pass (ZeRO-R, Rajbhandari et al. 2020, section 6.1). Price: that all-gather."""
    offload: ActivationOffload | None = None
    packing: ActivationPacking | None = None
    """For blocks that are not recomputed: recomputing from compressed inputs would give other results."""

    def __call__(self, block: Block, x: Tensor, forward: Forward) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(block, x)
        again = self.choose(block, x, forward)
        keep: Keep | None = self.offload.open(block) if self.offload else None
        if self.packing and not again:
            keep = self.packing.open(block, x)
        if again and self.partition and self.partition.size > 1:
            keep = _Shared(self.partition, keep)
        hooks = saved_tensors_hooks(keep.pack, keep.unpack) if keep else contextlib.nullcontext()
        with hooks:
            # The hooks see what the block saves, or for a recomputed block what `checkpoint` saves: its input.
            return _again(forward, block, x) if again else forward(block, x)

    def tighten(self, *, excess_bytes: int = 0) -> bool:
        """As `AutoRecompute.tighten`; False for a fixed choice."""
        return isinstance(self.choose, AutoRecompute) and self.choose.tighten(excess_bytes=excess_bytes)


class Keep(Protocol):
    """Stores a tensor until the backward pass."""

    def pack(self, x: Tensor) -> Any:
        """Returns the object that replaces `x` in the graph."""

    def unpack(self, packed: Any) -> Tensor:
        """Returns `x`."""


class _Shared:
    """Keeps this rank's share of a tensor that all ranks of a group hold alike."""

    def __init__(self, group: Group, keep: Keep | None) -> None:
        self._group, self._keep = group, keep

    def pack(self, x: Tensor) -> Any:
        if not x.numel():
            return x, None  # torch's checkpoint saves an empty CPU tensor, which NCCL cannot gather
        # Copied, so that the rest can be freed. Shares are even: the ranks divide the heads, and these the width.
        mine = x.detach().reshape(self._group.size, -1)[self._group.rank].clone()
        return self._keep.pack(mine) if self._keep else mine, x.shape

    def unpack(self, packed: Any) -> Tensor:
        kept, shape = packed
        if shape is None:
            return kept
        mine = self._keep.unpack(kept) if self._keep else kept
        return self._group.all_gather(mine).view(shape)


class AutoRecompute:
    """Chooses the blocks to recompute with a planner that measures what blocks save.

    For each new input size, every block runs twice: once to count what it saves, with only that alive, and once
    recomputed, which needs the least memory (Mimose's shuttling collector). Later passes of that size follow the plan.
    `groups` hold the ranks that run the same blocks and must choose alike: they take the maximum of their counts.

    `places` ranks split the positions: the sequence length is that many times the input's, which is T B C with
    `positions_first`.
    """

    def __init__(
        self, planner: Planner, *, groups: Sequence[Group] = (), places: int = 1, positions_first: bool = False
    ) -> None:
        self.planner = planner
        self._row_dimension = 1 if positions_first else 0
        self._groups = [group for group in groups if group.size > 1]
        self._places = places
        self._size = (0, 0)

    def __call__(self, block: Block, x: Tensor, forward: Forward) -> bool:
        rows, length = self._size = (
            x.shape[self._row_dimension],
            x.shape[1 - self._row_dimension] * self._places,
        )
        if self.planner.wants(block.layer, rows, length):
            counted = inner_bytes(block, x, forward)
            for group in self._groups:
                counted = max(group.gather_numbers(counted, device=x.device))
            self.planner.observe(block.layer, rows, length, counted)
            return True
        return block.layer in self.planner.plan_for(rows, length)

    def tighten(self, *, excess_bytes: int = 0) -> bool:
        """Lowers the budget for inputs of the last microbatch's size or larger, after an out-of-memory error or
        `excess_bytes` above the limit. False if all blocks are recomputed already. All ranks of the groups must
        call."""
        return self.planner.tighten(*self._size, excess_bytes=excess_bytes)


def inner_bytes(block: Block, x: Tensor, forward: Forward) -> int:
    """Bytes of storages that autograd keeps for a block and that recomputing frees, each counted once; the input,
    weights, rotations and masks stay."""
    kept: dict[int, tuple[StorageWeakRef, int]] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return tensor.detach()  # the producer's graph saves the tensor, and the tensor would hold the graph

    with saved_tensors_hooks(count, lambda tensor: tensor):
        result = forward(block, x)
    del result
    for _ in range(RELEASE_TRIES):
        freed = sum(size for storage, size in kept.values() if storage.expired())
        if freed or not kept:
            break
        time.sleep(0.001)  # gloo's thread holds the tensors of a collective for a moment after it is complete
    return freed


def _again(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
