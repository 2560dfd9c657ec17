"""The state of a run in memory: its tensors, the parts that this rank holds, and the fields of the manifest."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ropewalk import __version__
from ropewalk.model.hugging_face.strict import read_spec
from ropewalk.model.spec import Spec, spec_tree
from ropewalk.parallel.placement import LocalShard

from .format import CheckpointManifest
from .regions import Region, whole_region

Tensors = Mapping[str, Tensor | LocalShard]
"""Plain tensors, which all ranks hold, parts of tensors, or DTensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Everything that a run needs to go on."""

    step: int
    tokens: int
    seed: int
    spec: Spec
    data: dict[str, Any]
    model: Tensors
    optimizer: Tensors
    tokenizer: bytes
    """The tokenizer's file: a checkpoint generates text without anything beside it."""
    phase: int = 0
    phase_step: int = 0
    phase_ended: bool = False
    validation: dict[str, Any] = field(default_factory=dict)
    chat: str = ""
    parent: str = ""
    """These as in `CheckpointManifest`."""


def groups_of(state: State) -> dict[str, Tensors]:
    """The tensors of a state by the file they go to."""
    return {"model": state.model, "optimizer": state.optimizer}


def manifest_of(state: State) -> CheckpointManifest:
    """What the manifest says before anything is written."""
    return CheckpointManifest(
        step=state.step,
        tokens=state.tokens,
        seed=state.seed,
        spec=spec_tree(state.spec),
        data=state.data,
        files={},
        tensors={},
        versions={"ropewalk": __version__, "torch": torch.__version__, "python": platform.python_version()},
        parent=state.parent,
        phase=state.phase,
        phase_step=state.phase_step,
        phase_ended=state.phase_ended,
        validation=state.validation,
        chat=state.chat,
    )


def head_of(manifest: CheckpointManifest) -> State:
    """What a manifest says of the state: all but its tensors and the tokenizer."""
    return State(
        step=manifest.step,
        tokens=manifest.tokens,
        seed=manifest.seed,
        spec=read_spec(manifest.spec, name="a checkpoint"),
        data=manifest.data,
        model={},
        optimizer={},
        tokenizer=b"",
        phase=manifest.phase,
        phase_step=manifest.phase_step,
        phase_ended=manifest.phase_ended,
        validation=manifest.validation,
        chat=manifest.chat,
        parent=manifest.parent,
    )


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A rank's part of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    region: Region
    """The part."""
    local: Tensor
    """Its numbers."""

    @property
    def dtype(self) -> str:
        """torch's name: `bfloat16`."""
        return str(self.local.dtype).removeprefix("torch.")

    @property
    def bytes(self) -> int:
        """Of its numbers."""
        return self.local.numel() * self.local.element_size()


def local_shards(tensors: Tensors) -> Iterator[TensorShard]:
    """What this rank holds of each tensor: all of a plain one, its part of a DTensor."""
    for name, tensor in tensors.items():
        if isinstance(tensor, LocalShard):
            placement = tensor.placement
            yield TensorShard(
                name, placement.shape, Region(placement.offset, placement.local_shape), tensor.local.detach()
            )
        elif hasattr(tensor, "placements"):
            yield _held_part(name, tensor)
        else:
            yield TensorShard(name, tuple(tensor.shape), whole_region(tuple(tensor.shape)), tensor.detach())


def shards_to_write(tensors: Tensors, *, rank: int = 0) -> Iterator[TensorShard]:
    """What this rank writes: every number of every tensor is written by one rank.

    Of ranks that hold the same part, the one that is first on every mesh dimension that repeats it; a plain tensor,
    which all ranks hold, by rank 0.
    """
    for part in local_shards(tensors):
        tensor = tensors[part.name]
        if part.region.size == 0 and part.shape and 0 not in part.shape:
            continue  # fewer rows than ranks: this one has none
        if _writes(tensor, rank):
            yield part


def _writes(tensor: Any, rank: int) -> bool:
    if isinstance(tensor, LocalShard):
        return tensor.placement.first
    return _is_first(tensor) if hasattr(tensor, "placements") else rank == 0


def _held_part(name: str, tensor: Any) -> TensorShard:
    # A DTensor; its module takes a third of a second to import, which one process alone need not spend.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    assert tuple(local.shape) == tuple(shape), f"{name}: the part is {tuple(local.shape)}, its layout says {shape}"
    return TensorShard(name, tuple(tensor.shape), Region(tuple(offset), tuple(shape)), local)


def _is_first(tensor: Any) -> bool:
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this rank is not on the tensor's mesh"
    return all(coordinate == 0 or kind.is_shard() for coordinate, kind in zip(place, tensor.placements, strict=True))


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    flat = tensor.contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    numbers: Any = flat.view(torch.uint8).numpy()
    return memoryview(numbers)
