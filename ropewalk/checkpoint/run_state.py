"""The state of a run in memory, and the shards of its tensors that a rank holds and writes."""

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
"""Plain tensors, which are replicated on all ranks, and shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Everything that a run needs to continue."""

    step: int
    tokens: int
    seed: int
    spec: Spec
    data: dict[str, Any]
    model: Tensors
    optimizer: Tensors
    tokenizer: bytes
    """Content of the tokenizer file: a checkpoint generates text by itself."""
    phase: int = 0
    phase_step: int = 0
    phase_ended: bool = False
    validation: dict[str, Any] = field(default_factory=dict)
    chat: str = ""
    parent: str = ""
    """These fields as in `CheckpointManifest`."""


def groups_of(state: State) -> dict[str, Tensors]:
    """The tensors of a state by group: each group is a file."""
    return {"model": state.model, "optimizer": state.optimizer}


def manifest_of(state: State) -> CheckpointManifest:
    """The manifest of a state, without files and tensors."""
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
    """The state of a manifest, without tensors and tokenizer."""
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
    """The shard of a tensor that a rank holds."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    region: Region
    local: Tensor
    """The elements of the region."""

    @property
    def dtype(self) -> str:
        """torch's name, e.g. `bfloat16`."""
        return str(self.local.dtype).removeprefix("torch.")

    @property
    def bytes(self) -> int:
        return self.local.numel() * self.local.element_size()


def local_shards(tensors: Tensors) -> Iterator[TensorShard]:
    """The shard of each tensor on this rank; all of a plain tensor."""
    for name, tensor in tensors.items():
        if isinstance(tensor, LocalShard):
            placement = tensor.placement
            yield TensorShard(
                name, placement.shape, Region(placement.offset, placement.local_shape), tensor.local.detach()
            )
        else:
            yield TensorShard(name, tuple(tensor.shape), whole_region(tuple(tensor.shape)), tensor.detach())


def shards_to_write(tensors: Tensors, *, rank: int = 0) -> Iterator[TensorShard]:
    """The shards that this rank writes, so that every element is written by exactly one rank.

    The first of the ranks with the same shard writes it; rank 0 writes plain tensors.
    """
    for part in local_shards(tensors):
        tensor = tensors[part.name]
        if part.region.size == 0 and part.shape and 0 not in part.shape:
            continue  # fewer rows than ranks: this rank has none
        if tensor.placement.first if isinstance(tensor, LocalShard) else rank == 0:
            yield part


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    flat = tensor.contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    numbers: Any = flat.view(torch.uint8).numpy()
    return memoryview(numbers)
