"""Reads a checkpoint folder: any region of any tensor, every byte verified."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk.base.errors import DamagedCheckpoint, DataError, StorageError
from ropewalk.parallel.placement import Choose, LocalShard, Placement

from ..disk import LocalDisk
from ..format import TOKENIZER, CheckpointManifest, TensorEntry, read_checkpoint_manifest
from ..read.model_check import check_weights
from ..regions import Region, copy_region, element_range, whole_region
from ..run_state import State, Tensors, head_of, local_shards
from ..shard_file import ShardFile, chunks_of, item_bytes

Wants = Callable[[State], Choose | None]
"""By what a manifest says, as a state without tensors: which parts of them are needed; None: all, whole."""


Fill = Callable[[State], None]
"""Takes a state over whose tensors are read as they are asked for (`Stream`)."""


def want_all(_: State) -> None:
    """Wants all."""


def load(path: Path, *, optimizer: bool = True, choose: Choose | None = None, linked: bool = False) -> State:
    """The state in the checkpoint folder `path`, every byte that is read checked; without `optimizer` its tensors stay
    unread. With `choose` tensors are parts, and the ranges that hold them are read and no others. `linked` as in
    `Reader`."""
    reader = CheckpointReader(path, linked=linked)

    def tensors(group: str) -> Tensors:
        return reader.tensors(group) if choose is None else reader.parts(group, choose)

    return dataclasses.replace(
        head_of(reader.manifest),
        model=tensors("model"),
        optimizer=tensors("optimizer") if optimizer else {},
        tokenizer=reader.file(TOKENIZER),
    )


def load_weights(path: Path) -> State:
    """The model of the checkpoint folder `path`, without its optimizer, when its weights are those of its spec: ready
    to be built. Whether its tokenizer can be used is for whoever encodes to find out (prepare/foreign.py)."""
    check_weights(read_checkpoint_manifest(path), path)
    return load(path, optimizer=False)


def take(path: Path, choose: Choose | None, fill: Fill | None, *, linked: bool = False) -> State:
    """`load`, or with `fill` gives the state to it, tensor by tensor, and returns it without any. DamagedCheckpoint
    when some of what was read is not what was written: what `fill` made of it is then of no use."""
    if fill is None:
        return load(path, choose=choose, linked=linked)
    reader = CheckpointReader(path, linked=linked)
    model, optimizer = (LazyTensors(reader, group, choose) for group in ("model", "optimizer"))
    head = dataclasses.replace(head_of(reader.manifest), tokenizer=reader.file(TOKENIZER))
    fill(dataclasses.replace(head, model=model, optimizer=optimizer))
    model.check()
    optimizer.check()
    return head


class CheckpointReader:
    """A checkpoint open for reading: gives any box of any tensor, every byte checked on the way."""

    def __init__(self, path: Path, *, linked: bool = False) -> None:
        """`linked`: its files may be links to anywhere, since we made them ourselves."""
        self.path, self._linked = path, linked
        self.manifest = read_checkpoint_manifest(path)
        self._open: dict[str, ShardFile] = {}

    def tensor(self, group: str, name: str, region: Region | None = None) -> Tensor:
        """A box of a tensor (None: all of it), on the CPU; reads the ranges that hold it and no others."""
        entry = self.manifest.tensors.get(group, {}).get(name)
        if entry is None:
            raise DataError(f"{self.path}: no tensor `{name}` in its {group}; it is of another model")
        region = region or whole_region(entry.shape)
        item = item_bytes(entry.dtype)
        target = self._memory(region.size * item, f"{group}/{name}")
        left = region.size
        for piece in entry.pieces:
            stored = Region(piece.offset, piece.shape)
            part = stored.meet(region)
            if part is not None:
                first, last = element_range(part, stored)
                data = self._payload(piece.file).raw(piece.begin + first * item, piece.begin + last * item)
                copy_region(target, region, part, stored, data, item)
                self._payload(piece.file).release()
                left -= part.size
        # The manifest was checked when it was read; memory that nobody filled must not become a weight in any case.
        if left:
            raise DamagedCheckpoint(f"{self.path}: damaged checkpoint: {left} numbers of {group}/{name} are nowhere")
        kind: torch.dtype = getattr(torch, entry.dtype)
        # torch does not reinterpret what holds nothing.
        return (
            torch.from_numpy(target).view(kind).reshape(region.shape)
            if region.size
            else torch.empty(region.shape, dtype=kind)
        )

    def parts(self, group: str, choose: Choose) -> dict[str, LocalShard]:
        """The part of every tensor of a group that is chosen."""
        found = {}
        for name, entry in self.manifest.tensors.get(group, {}).items():
            placement = choose(group, name, entry.shape)
            if placement is not None:
                found[name] = LocalShard(
                    self.tensor(group, name, Region(placement.offset, placement.local_shape)), placement
                )
        return found

    def tensors(self, group: str) -> dict[str, Tensor]:
        """Every tensor of a group, whole."""
        return {name: self.tensor(group, name) for name in self.manifest.tensors.get(group, {})}

    def into(self, group: str, target: Mapping[str, Tensor]) -> None:
        """Fills `target`, plain tensors or parts of DTensors of any layout, in place. Type and shape must match."""
        for part in local_shards(target):
            entry = self.manifest.tensors[group].get(part.name)
            stored = (entry.dtype, entry.shape) if entry else "nothing"
            if entry is None or stored != (part.dtype, part.shape):
                raise DataError(f"{self.path}: {group}/{part.name} holds {stored}, {part.dtype} {part.shape} is asked")
            part.local.copy_(self.tensor(group, part.name, part.region))

    def file(self, name: str) -> bytes:
        """A file that holds no tensors."""
        if name not in self.manifest.files:
            raise DamagedCheckpoint(f"{self.path / name}: damaged checkpoint: this file is missing")
        return bytes(self._payload(name).read(0, self.manifest.files[name].bytes))

    def _memory(self, size: int, what: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        try:
            return np.empty(size, np.uint8)
        except MemoryError:
            raise StorageError(f"{self.path}: {what} has {size} bytes, more than this machine has left") from None

    def _payload(self, name: str) -> ShardFile:
        if name not in self._open:
            entry = self.manifest.files[name]
            owners = self.manifest.places(name)
            self._open[name] = ShardFile(self.path / name, entry, owners=owners, linked=self._linked)
        return self._open[name]


class LazyTensors(Mapping[str, Tensor | LocalShard]):
    """The tensors of a group, each read when it is asked for and not kept: the part that `choose` names, or with None
    all of it. What nobody needs is left out.

    A tensor that cannot be read comes as zeros, and `problem` says what is wrong with it: ranks that load a state
    together also publish it together, so each of them must come to the end before they decide that it is of no use.
    """

    def __init__(self, reader: CheckpointReader, group: str, choose: Choose | None) -> None:
        self._reader, self._group = reader, group
        self._entries = reader.manifest.tensors.get(group, {})
        self._placements: dict[str, Placement | None] = dict.fromkeys(self._entries)
        if choose is not None:
            chosen = {name: choose(group, name, entry.shape) for name, entry in self._entries.items()}
            self._placements = {name: placement for name, placement in chosen.items() if placement is not None}
        self.problem: DamagedCheckpoint | None = None

    def __getitem__(self, name: str) -> Tensor | LocalShard:
        placement = self._placements[name]
        region = (
            Region(placement.offset, placement.local_shape) if placement else whole_region(self._entries[name].shape)
        )
        local = self._read(name, region)
        return LocalShard(local, placement) if placement else local

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)

    def __contains__(self, name: object) -> bool:
        return name in self._placements  # without reading it

    def check(self) -> None:
        """Raises what is wrong with the tensors that were read, if anything is."""
        if self.problem:
            raise self.problem

    def _read(self, name: str, region: Region) -> Tensor:
        if self.problem is None:
            try:
                return self._reader.tensor(self._group, name, region)
            except DamagedCheckpoint as error:
                self.problem = error
        return torch.zeros(region.shape, dtype=getattr(torch, self._entries[name].dtype))


def needed_chunks(
    manifest: CheckpointManifest, choose: Choose | None, *, wholly: Sequence[str]
) -> dict[str, list[int]]:
    """By file, the chunks that hold what is needed; files of which nothing is are left out. Without `choose` all are,
    and those of the files `wholly` always. A chunk is the least that can be read: it is checked as a whole."""
    files = manifest.files
    chunks = {name: set(range(len(entry.chunks))) for name, entry in files.items()}
    if choose is not None:
        chunks |= {name: set() for name in files if name not in wholly}
        for group, entries in manifest.tensors.items():
            for name, entry in entries.items():
                placement = choose(group, name, entry.shape)
                for file, begin, end in (
                    ranges(entry, Region(placement.offset, placement.local_shape)) if placement else ()
                ):
                    chunks[file].update(chunks_of(files[file], begin, end))
    return {name: sorted(numbers) for name, numbers in chunks.items() if numbers or name in wholly}


def ranges(entry: TensorEntry, region: Region) -> Iterator[tuple[str, int, int]]:
    """Files and bytes there, before packing, that are read to have `box` of a tensor."""
    item = item_bytes(entry.dtype)
    for piece in entry.pieces:
        stored = Region(piece.offset, piece.shape)
        part = stored.meet(region)
        if part is not None:
            first, last = element_range(part, stored)
            yield piece.file, piece.begin + first * item, piece.begin + last * item


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint to `step-00000100.damaged`: it no longer counts among those to keep."""
    aside = path.with_name(path.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    LocalDisk().rename(path, aside)
    return aside
