"""Which box of each tensor this rank holds, and which of them it writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropewalk.parallel.placement import LocalShard

from .regions import Region, whole

Tensors = Mapping[str, Tensor | LocalShard]
"""Plain tensors, which all ranks hold, parts of tensors, or DTensors."""


@dataclass(frozen=True, slots=True)
class Held:
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


def held(tensors: Tensors) -> Iterator[Held]:
    """What this rank holds of each tensor: all of a plain one, its part of a DTensor."""
    for name, tensor in tensors.items():
        if isinstance(tensor, LocalShard):
            placement = tensor.placement
            yield Held(name, placement.shape, Region(placement.offset, placement.local_shape), tensor.local.detach())
        elif hasattr(tensor, "placements"):
            yield _held_part(name, tensor)
        else:
            yield Held(name, tuple(tensor.shape), whole(tuple(tensor.shape)), tensor.detach())


def written(tensors: Tensors, *, rank: int = 0) -> Iterator[Held]:
    """What this rank writes: every number of every tensor is written by one rank.

    Of ranks that hold the same part, the one that is first on every mesh dimension that repeats it; a plain tensor,
    which all ranks hold, by rank 0.
    """
    for part in held(tensors):
        tensor = tensors[part.name]
        if part.region.size == 0 and part.shape and 0 not in part.shape:
            continue  # fewer rows than ranks: this one has none
        if _writes(tensor, rank):
            yield part


def _writes(tensor: Any, rank: int) -> bool:
    if isinstance(tensor, LocalShard):
        return tensor.placement.first
    return _is_first(tensor) if hasattr(tensor, "placements") else rank == 0


def _held_part(name: str, tensor: Any) -> Held:
    # A DTensor; its module takes a third of a second to import, which one process alone need not spend.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    assert tuple(local.shape) == tuple(shape), f"{name}: the part is {tuple(local.shape)}, its layout says {shape}"
    return Held(name, tuple(tensor.shape), Region(tuple(offset), tuple(shape)), local)


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
