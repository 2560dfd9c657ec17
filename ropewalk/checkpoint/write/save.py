"""Writes a state as a checkpoint: each rank writes its shards; a replicated tensor is written once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from ropewalk.base.errors import StorageError

from ..commit import Attempt, RankRecord, commit
from ..disk import Disk, LocalDisk
from ..format import TOKENIZER as TOKENIZER
from ..format import Piece, TensorEntry
from ..run_state import State, TensorShard, as_bytes, groups_of, manifest_of, shards_to_write
from ..shard_compression import CompressionPolicy
from ..shard_file import digest, item_bytes, layout
from .shard_writer import BUFFER_BYTES, FileBlock, RateLimiter, ShardWriter
from .task_graph import TaskGraph, run_graph

PACKED = ".planes"
"""Suffix of a safetensors file that is packed, which other readers do not understand."""


def save(folder: Path, state: State, *, disk: Disk | None = None, attempt: Attempt | None = None) -> Path:
    """Commits the checkpoint of `state.step` below `folder` and returns its path; blocks until it is durable.

    All ranks of the attempt must call, each with its own parts of the tensors.
    """
    disk, attempt = disk or LocalDisk(), attempt or Attempt()
    parts = {
        group: [_on_host(part) for part in shards_to_write(tensors, rank=attempt.rank)]
        for group, tensors in groups_of(state).items()
    }
    return commit(
        folder,
        manifest_of(state),
        write=lambda place: write_tensor_files(place, parts, tokenizer=state.tokenizer, disk=disk, attempt=attempt),
        disk=disk,
        attempt=attempt,
    )


def write_tensor_files(
    place: Path,
    parts: Mapping[str, Iterable[TensorShard]],
    *,
    tokenizer: bytes,
    disk: Disk,
    attempt: Attempt,
    threads: int = 1,
    pace: RateLimiter | None = None,
    there: Mapping[str, Mapping[str, Future[None]]] | None = None,
    digests: Mapping[str, Mapping[str, str]] | None = None,
    packer: CompressionPolicy | None = None,
    tell: Callable[[Mapping[str, float]], None] = lambda _: None,
) -> RankRecord:
    """Writes one file a group, and on rank 0 the tokenizer; returns when they are durable. The bytes are the same for
    any number of `threads`.

    By group and name: when the parts are `there`, if not now, and what they hashed to then (`digests`); StorageError
    when one has changed since. `packer` decides whether a file is packed. `tell` gets the seconds by kind of task.
    """
    graph, files = TaskGraph(), {}
    tensors: dict[str, dict[str, TensorEntry]] = {}
    there, digests = there or {}, digests or {}
    with contextlib.ExitStack() as opened:
        for group, group_parts in parts.items():
            name = f"{group}.safetensors" if attempt.world == 1 else f"{group}-{attempt.rank:05d}.safetensors"
            ordered = sorted(group_parts, key=lambda part: part.name)
            header, begins = layout([(p.name, p.dtype, p.region.shape, p.bytes) for p in ordered])
            arrivals, expected = there.get(group, {}), digests.get(group, {})
            item = _packed_item(ordered, arrivals, packer) if packer else 0
            name += PACKED if item else ""
            blocks = [FileBlock(data=memoryview(header)), *(_block(group, p, arrivals, expected) for p in ordered)]
            files[name] = ShardWriter(disk, place / name, blocks, packed=item, pace=pace)
            tensors[group] = {
                part.name: TensorEntry(
                    dtype=part.dtype,
                    shape=part.shape,
                    pieces=(Piece(file=name, begin=begin, offset=part.region.offset, shape=part.region.shape),),
                )
                for part, begin in zip(ordered, begins, strict=True)
            }
        if attempt.rank == 0:
            files[TOKENIZER] = ShardWriter(disk, place / TOKENIZER, [FileBlock(data=memoryview(tokenizer))])
        for file in files.values():
            file.add_to(graph, opened)
        tell(run_graph(graph, threads=threads, memory_bytes=BUFFER_BYTES))
    entries = {name: file.close() for name, file in files.items()}
    plain = [name for name, entry in entries.items() if name != TOKENIZER and not entry.frames]
    if packer and plain:
        seconds = max(files[name].ended for name in plain) - min(files[name].began for name in plain)
        packer.wrote(sum(entries[name].bytes for name in plain), seconds=seconds)
    return RankRecord(files=entries, tensors=tensors)


def _block(group: str, part: TensorShard, there: Mapping[str, Future[None]], expected: Mapping[str, str]) -> FileBlock:
    """The bytes of a part; after it has been written, it must still hash to what is expected of it."""
    data = as_bytes(part.local)

    def check() -> None:
        if part.name in expected and digest(data) != expected[part.name]:
            raise StorageError(
                f"{group}/{part.name}: the copy in memory changed before it was written, so this checkpoint is given "
                "up; older ones are intact. Test this machine's memory"
            )

    return FileBlock(data=data, there=there.get(part.name), check=check)


def _packed_item(parts: Sequence[TensorShard], there: Mapping[str, Future[None]], packer: CompressionPolicy) -> int:
    """Bytes of the numbers as which to pack a file of these parts, those of the largest; 0: not to pack it."""
    largest = max(parts, key=lambda part: part.bytes, default=None)
    if largest is None:
        return 0
    if largest.name in there:
        there[largest.name].result()
    item = item_bytes(largest.dtype)
    return item if packer.chooses(as_bytes(largest.local), item=item) else 0


def _on_host(part: TensorShard) -> TensorShard:
    return dataclasses.replace(part, local=part.local.cpu())
