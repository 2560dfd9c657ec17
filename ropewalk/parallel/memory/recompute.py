"""Less kept for the backward pass: blocks, or their attention, are computed again when it needs them.

What is computed again is what was computed first, bit for bit: dropout is a function of place (model/dropout.py), so
there is no generator to set back. Three ways, all through seams of the model:

    attention   `recomputed(attend)` keeps queries, keys and values (Korthikanti et al. 2022, section 5)
    full        a block keeps its input alone (Chen et al. 2016)
    auto        as few blocks as the memory asks for keep their input alone (Mimose, Liao et al. 2022)

What a block keeps may be dealt to the ranks that hold it alike (ZeRO-R), leave the device (activation_offload.py) or be
kept in fewer bits (activation_packing.py).
"""

from __future__ import annotations

import contextlib
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
    """How `plan` runs the blocks of a stage that has `layers`, and the head if it is the `last`.

    `live_microbatches` share what the plan allows for activations. `trained` names parameters of the whole model.
    `packing` is that of the executor.
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
        # What the last block saves would come back at once.
        offload = ActivationOffload(sorted(layers)[:-1], folder=Path(plan.offload_path) if plan.offload_path else None)
    return BlockRunner(choose=choose, partition=partition, offload=offload, packing=packing)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRunner:
    """Runs blocks as `ModelStage.run_block` asks: some twice, what they keep kept elsewhere."""

    choose: Choose = never
    partition: Group | None = None
    """Ranks that hold the input of a block alike: of one that is computed again, each keeps its share, and they gather
    it in the backward pass (ZeRO-R, Rajbhandari et al. 2020, section 6.1). Price: one all-gather of it."""
    offload: ActivationOffload | None = None
    packing: ActivationPacking | None = None
    """Of blocks that are not computed again: from an input in fewer bits they would compute something else."""

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
            # The hooks see what the block saves, or of one that is computed again what `checkpoint` does: its input.
            return _again(forward, block, x) if again else forward(block, x)

    def tighten(self, *, excess_bytes: int = 0) -> bool:
        """As `AutoRecompute.tighten`; False where there is no plan to change."""
        return isinstance(self.choose, AutoRecompute) and self.choose.tighten(excess_bytes=excess_bytes)


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
        if not x.numel():
            return x, None  # torch's checkpoint saves an empty tensor of the host, which NCCL cannot gather
        # A copy, so that the rest can go. Shares are even: the ranks divide the heads, and these the width.
        mine = x.detach().reshape(self._group.size, -1)[self._group.rank].clone()
        return self._keep.pack(mine) if self._keep else mine, x.shape

    def unpack(self, packed: Any) -> Tensor:
        kept, shape = packed
        if shape is None:
            return kept
        mine = self._keep.unpack(kept) if self._keep else kept
        return self._group.all_gather(mine).view(shape)


class AutoRecompute:
    """Chooses by a planner, which learns what blocks really keep.

    The first time a size of input comes, every block runs twice: once to count what it saves, with only that alive,
    and once to be computed again, which needs the least memory (Mimose's shuttling collector). From then on the plan
    of that size is followed. `groups` hold the ranks that run the same blocks together and so must choose alike: the
    largest count among them is everybody's.

    `places` is how many ranks split the places of a row: the length of a row is that many times that of the input,
    which is T B C with `positions_first`.
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
        """After the last microbatch ran out of memory, or needed `excess_bytes` more than it might: inputs of its size
        or larger will be planned to need less. False when nothing is left to recompute. All ranks of the groups must
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
