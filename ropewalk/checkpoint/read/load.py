"""Reads a checkpoint folder: any region of any tensor, with every byte verified."""

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
from ..format import TOKENIZER, CheckpointManifest, Piece, TensorEntry, read_checkpoint_manifest
from ..read.model_check import check_weights
from ..regions import Region, copy_region, element_range, whole_region
from ..run_state import State, Tensors, head_of
from ..shard_file import ShardFile, chunks_of, item_bytes

Check = Callable[[CheckpointManifest, Path], object]
"""Raises DamagedCheckpoint for a manifest whose checkpoint cannot be used."""

Fill = Callable[[State], None]
"""Receives a state whose tensors are read on access (`LazyTensors`)."""


def load(path: Path, *, optimizer: bool = True, choose: Choose | None = None, linked: bool = False) -> State:
    """The state in the checkpoint folder `path`; all bytes read are verified. Without `optimizer`, its tensors are not
    read. With `choose`, tensors are shards, and only their byte ranges are read. `linked` as in `CheckpointReader`."""
    reader = CheckpointReader(path, linked=linked)

    def tensors(group: str) -> Tensors:
        return reader.tensors(group) if choose is None else reader.shards(group, choose)

    return dataclasses.replace(
        head_of(reader.manifest),
        model=tensors("model"),
        optimizer=tensors("optimizer") if optimizer else {},
        tokenizer=reader.file(TOKENIZER),
    )


def load_weights(path: Path) -> State:
    """The state without optimizer, for building the model; DamagedCheckpoint if the weights do not match the spec. The
    tokenizer is checked when it is loaded (prepare/foreign.py)."""
    check_weights(read_checkpoint_manifest(path), path)
    return load(path, optimizer=False)


def load_or_fill(path: Path, choose: Choose | None, fill: Fill | None, *, linked: bool = False) -> State:
    """`load`; with `fill`, passes it the state tensor by tensor and returns the state without tensors. After
    DamagedCheckpoint, the result of `fill` is invalid."""
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
    """A checkpoint open for reading: returns any region of any tensor and verifies every byte it reads."""

    def __init__(self, path: Path, *, linked: bool = False) -> None:
        """`linked`: files may be links to any path, because we created them."""
        self.path, self._linked = path, linked
        self.manifest = read_checkpoint_manifest(path)
        self._open: dict[str, ShardFile] = {}

    def tensor(self, group: str, name: str, region: Region | None = None) -> Tensor:
        """A region of a tensor (None: all of it), on the CPU. Reads only its byte ranges."""
        entry = self.manifest.tensors.get(group, {}).get(name)
        if entry is None:
            raise DataError(f"{self.path}: no tensor `{name}` in its {group}; it is of another model")
        region = region or whole_region(entry.shape)
        item = item_bytes(entry.dtype)
        target = self._memory(region.size * item, f"{group}/{name}")
        left = region.size
        for piece, part, begin, end in _ranges(entry, region):
            file = self._file(piece.file)
            copy_region(target, region, part, Region(piece.offset, piece.shape), file.read_raw(begin, end), item)
            file.release()
            left -= part.size
        # The manifest was checked, but uninitialised memory must never become a weight.
        if left:
            raise DamagedCheckpoint(f"{self.path}: damaged checkpoint: {left} numbers of {group}/{name} are missing")
        kind: torch.dtype = getattr(torch, entry.dtype)
        # torch cannot reinterpret an empty tensor.
        return (
            torch.from_numpy(target).view(kind).reshape(region.shape)
            if region.size
            else torch.empty(region.shape, dtype=kind)
        )

    def shards(self, group: str, choose: Choose) -> dict[str, LocalShard]:
        """The chosen shard of each tensor of a group."""
        found = {}
        for name, entry in self.manifest.tensors.get(group, {}).items():
            placement = choose(group, name, entry.shape)
            if placement is not None:
                found[name] = LocalShard(
                    self.tensor(group, name, Region(placement.offset, placement.local_shape)), placement
                )
        return found

    def tensors(self, group: str) -> dict[str, Tensor]:
        """Every tensor of a group in full."""
        return {name: self.tensor(group, name) for name in self.manifest.tensors.get(group, {})}

    def file(self, name: str) -> bytes:
        """A file without tensors."""
        if name not in self.manifest.files:
            raise DamagedCheckpoint(f"{self.path / name}: damaged checkpoint: this file is missing")
        return bytes(self._file(name).read(0, self.manifest.files[name].bytes))

    def _memory(self, size: int, what: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        try:
            return np.empty(size, np.uint8)
        except MemoryError:
            raise StorageError(f"{self.path}: {what} has {size} bytes, more than this machine has left") from None

    def _file(self, name: str) -> ShardFile:
        if name not in self._open:
            entry = self.manifest.files[name]
            owners = self.manifest.byte_ranges(name)
            self._open[name] = ShardFile(self.path / name, entry, owners=owners, linked=self._linked)
        return self._open[name]


class LazyTensors(Mapping[str, Tensor | LocalShard]):
    """The tensors of a group, read on access and not cached: the shard chosen by `choose`, or all of it (None). Tensors
    that this rank does not need are absent.

    A damaged tensor is read as zeros, and `problem` describes the damage: filling a model has collectives, so every
    rank must complete it before all ranks decide together to discard the state.
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
        """Raises DamagedCheckpoint if a tensor that was read is damaged."""
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
    manifest: CheckpointManifest, choose: Choose | None, *, whole_files: Sequence[str]
) -> dict[str, list[int]]:
    """By file, the chunks with data that `choose` needs (None: all), and all chunks of `whole_files`. Files that are
    not
    needed are left out. A chunk is the smallest unit of reading, because it is verified as a whole."""
    files = manifest.files
    chunks = {
        name: set(range(len(entry.chunks))) if choose is None or name in whole_files else set()
        for name, entry in files.items()
    }
    for group, entries in manifest.tensors.items() if choose else ():
        for name, entry in entries.items():
            placement = choose(group, name, entry.shape) if choose else None
            if placement:
                for piece, _, begin, end in _ranges(entry, Region(placement.offset, placement.local_shape)):
                    chunks[piece.file].update(chunks_of(files[piece.file], begin, end))
    return {name: sorted(numbers) for name, numbers in chunks.items() if numbers or name in whole_files}


def _ranges(entry: TensorEntry, region: Region) -> Iterator[tuple[Piece, Region, int, int]]:
    """The pieces that intersect `region`: piece, intersection, and the byte range to read, before compression."""
    item = item_bytes(entry.dtype)
    for piece in entry.pieces:
        stored = Region(piece.offset, piece.shape)
        part = stored.intersect(region)
        if part is not None:
            first, last = element_range(part, stored)
            yield piece, part, piece.begin + first * item, piece.begin + last * item


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint to `step-00000100.damaged`, which retention ignores."""
    aside = path.with_name(path.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    LocalDisk().rename(path, aside)
    return aside
