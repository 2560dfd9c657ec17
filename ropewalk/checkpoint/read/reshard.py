"""Rewrites a checkpoint as another number of ranks would write it, tensor by tensor, in bounded memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ropewalk.base.errors import StorageError

from ..commit import Attempt, RankRecord, commit
from ..disk import Disk, LocalDisk
from ..format import TOKENIZER, Piece, TensorEntry, piece_bytes
from ..regions import Region, whole_region
from ..run_state import as_bytes
from ..shard_file import item_bytes, layout, write_shard_file
from .load import CheckpointReader

BLOCK_BYTES = 64 << 20
"""Bytes of a tensor in memory at a time."""


def reshard(path: Path, folder: Path, *, mesh: Sequence[int], disk: Disk | None = None) -> Path:
    """Commits the checkpoint `path` in `folder` as the ranks of `mesh` would write it; returns its path.

    Mesh axis i splits dimension i of every tensor like torch: in equal shards, rounded up, so that the last ranks may
    have less or nothing. A tensor with fewer dimensions is written by the first rank along the other axes. The result
    is read back and compared.
    """
    disk, source = disk or LocalDisk(), CheckpointReader(path)
    manifest = dataclasses.replace(source.manifest, files={}, tensors={})
    world = math.prod(mesh)
    made = folder
    # Rank 0 last: it waits for the records of the others.
    for rank in (*range(1, world), 0):
        attempt = Attempt(rank=rank, world=world, name="reshard")
        write = functools.partial(_write_rank, source=source, mesh=tuple(mesh), attempt=attempt, disk=disk)
        made = commit(folder, manifest, write=write, disk=disk, attempt=attempt)
    _compare(source, CheckpointReader(made))
    return made


def region_of(shape: tuple[int, ...], *, mesh: tuple[int, ...], rank: int) -> Region | None:
    """The region of a tensor that a rank of the mesh writes; None if there is none."""
    sides = list(whole_region(shape).shape)
    offset = [0] * len(shape)
    for axis, (position, ranks) in enumerate(zip(_coordinates(mesh, rank), mesh, strict=True)):
        if axis >= len(shape):
            if position:
                return None
            continue
        part = -(-shape[axis] // ranks)
        offset[axis] = min(position * part, shape[axis])
        sides[axis] = min(part, shape[axis] - offset[axis])
        if position and not sides[axis]:
            return None
    return Region(tuple(offset), tuple(sides))


def _coordinates(mesh: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The coordinates of a rank in the mesh; the last axis runs fastest."""
    return next(itertools.islice(itertools.product(*map(range, mesh)), rank, None))


def _write_rank(
    target: Path, *, source: CheckpointReader, mesh: tuple[int, ...], attempt: Attempt, disk: Disk
) -> RankRecord:
    files, tensors = {}, {}
    for group, entries in source.manifest.tensors.items():
        name = f"{group}.safetensors" if attempt.world == 1 else f"{group}-{attempt.rank:05d}.safetensors"
        found = {tensor: region_of(entry.shape, mesh=mesh, rank=attempt.rank) for tensor, entry in entries.items()}
        regions = {tensor: region for tensor, region in sorted(found.items()) if region is not None}
        parts = [
            (t, entries[t].dtype, region.shape, piece_bytes(entries[t].dtype, region.shape))
            for t, region in regions.items()
        ]
        header, begins = layout(parts)
        blocks = (block for tensor, region in regions.items() for block in _blocks(source, group, tensor, region))
        files[name] = write_shard_file(disk, target / name, itertools.chain([header], blocks))
        tensors[group] = {
            tensor: TensorEntry(
                dtype=entries[tensor].dtype,
                shape=entries[tensor].shape,
                pieces=(Piece(file=name, begin=begin, offset=region.offset, shape=region.shape),),
            )
            for (tensor, region), begin in zip(regions.items(), begins, strict=True)
        }
    if attempt.rank == 0:
        files[TOKENIZER] = write_shard_file(disk, target / TOKENIZER, [source.file(TOKENIZER)])
    return RankRecord(files=files, tensors=tensors)


def _blocks(source: CheckpointReader, group: str, tensor: str, region: Region) -> Iterator[memoryview]:
    """The bytes of a region in row-major order, a few rows at a time."""
    for part in _rows(region, item_bytes(source.manifest.tensors[group][tensor].dtype)):
        yield as_bytes(source.tensor(group, tensor, part))


def _rows(region: Region, item: int) -> Iterator[Region]:
    if not region.shape or not region.size:
        yield region
        return
    row_bytes = region.size // region.shape[0] * item
    rows = max(1, BLOCK_BYTES // row_bytes)
    for first in range(0, region.shape[0], rows):
        count = min(rows, region.shape[0] - first)
        yield Region((region.offset[0] + first, *region.offset[1:]), (count, *region.shape[1:]))


def _compare(source: CheckpointReader, made: CheckpointReader) -> None:
    for group, entries in source.manifest.tensors.items():
        for name, entry in entries.items():
            for region in _rows(whole_region(entry.shape), item_bytes(entry.dtype)):
                left, right = (reader.tensor(group, name, region) for reader in (source, made))
                if not torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)):
                    raise StorageError(
                        f"{made.path}: {group}/{name} differs from the source; test the memory and retry"
                    )
