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
from .shard_writer import IN_FLIGHT_BYTES, FileBlock, RateLimiter, ShardWriter
from .task_graph import TaskGraph, run_graph

PACKED = ".planes"
"""Suffix of a compressed file, which other safetensors readers cannot read."""


def save(folder: Path, state: State, *, disk: Disk | None = None, attempt: Attempt | None = None) -> Path:
    """Commits the checkpoint of `state.step` in `folder` and returns its path; blocks until it is durable.

    All ranks of the attempt must call, each with its own shards.
    """
    disk, attempt = disk or LocalDisk(), attempt or Attempt()
    parts = {
        group: [_on_host(part) for part in shards_to_write(tensors, rank=attempt.rank)]
        for group, tensors in groups_of(state).items()
    }
    return commit(
        folder,
        manifest_of(state),
        write=lambda target: write_tensor_files(target, parts, tokenizer=state.tokenizer, disk=disk, attempt=attempt),
        disk=disk,
        attempt=attempt,
    )


def write_tensor_files(
    folder: Path,
    parts: Mapping[str, Iterable[TensorShard]],
    *,
    tokenizer: bytes,
    disk: Disk,
    attempt: Attempt,
    threads: int = 1,
    pace: RateLimiter | None = None,
    arrivals: Mapping[str, Mapping[str, Future[None]]] | None = None,
    digests: Mapping[str, Mapping[str, str]] | None = None,
    policy: CompressionPolicy | None = None,
    report: Callable[[Mapping[str, float]], None] = lambda _: None,
) -> RankRecord:
    """Writes a file per group, and on rank 0 the tokenizer; returns when they are durable. The bytes do not depend on
    `threads`.

    By group and name: futures of shards still being copied (`arrivals`), and their hashes (`digests`); StorageError if
    a shard has changed since. `policy` decides about compression. `report` receives the seconds per kind of task.
    """
    graph, files = TaskGraph(), {}
    tensors: dict[str, dict[str, TensorEntry]] = {}
    arrivals, digests = arrivals or {}, digests or {}
    with contextlib.ExitStack() as opened:
        for group, group_parts in parts.items():
            name = f"{group}.safetensors" if attempt.world == 1 else f"{group}-{attempt.rank:05d}.safetensors"
            ordered = sorted(group_parts, key=lambda part: part.name)
            header, begins = layout([(p.name, p.dtype, p.region.shape, p.bytes) for p in ordered])
            own, expected = arrivals.get(group, {}), digests.get(group, {})
            item = _compressed_item(ordered, own, policy) if policy else 0
            name += PACKED if item else ""
            blocks = [FileBlock(data=memoryview(header)), *(_block(group, p, own, expected) for p in ordered)]
            files[name] = ShardWriter(disk, folder / name, blocks, item=item, pace=pace)
            tensors[group] = {
                part.name: TensorEntry(
                    dtype=part.dtype,
                    shape=part.shape,
                    pieces=(Piece(file=name, begin=begin, offset=part.region.offset, shape=part.region.shape),),
                )
                for part, begin in zip(ordered, begins, strict=True)
            }
        if attempt.rank == 0:
            files[TOKENIZER] = ShardWriter(disk, folder / TOKENIZER, [FileBlock(data=memoryview(tokenizer))])
        for file in files.values():
            file.add_to(graph, opened)
        report(run_graph(graph, threads=threads, memory_bytes=IN_FLIGHT_BYTES))
    entries = {name: file.close() for name, file in files.items()}
    plain = [name for name, entry in entries.items() if name != TOKENIZER and not entry.frames]
    if policy and plain:
        seconds = max(files[name].ended for name in plain) - min(files[name].began for name in plain)
        policy.wrote(sum(entries[name].bytes for name in plain), seconds=seconds)
    return RankRecord(files=entries, tensors=tensors)


def _block(
    group: str, part: TensorShard, arrivals: Mapping[str, Future[None]], expected: Mapping[str, str]
) -> FileBlock:
    """The bytes of a shard, with a check of its hash after they were written."""
    data = as_bytes(part.local)

    def check() -> None:
        if part.name in expected and digest(data) != expected[part.name]:
            raise StorageError(
                f"{group}/{part.name}: the copy in memory changed before it was written; this checkpoint is abandoned, "
                "older ones are intact. Test the memory of this machine"
            )

    return FileBlock(data=data, arrival=arrivals.get(part.name), check=check)


def _compressed_item(
    parts: Sequence[TensorShard], arrivals: Mapping[str, Future[None]], policy: CompressionPolicy
) -> int:
    """Bytes per element for compressing a file of these shards, by the largest one; 0: no compression."""
    largest = max(parts, key=lambda part: part.bytes, default=None)
    if largest is None:
        return 0
    if largest.name in arrivals:
        arrivals[largest.name].result()
    item = item_bytes(largest.dtype)
    return item if policy.chooses(as_bytes(largest.local), item=item) else 0


def _on_host(part: TensorShard) -> TensorShard:
    return dataclasses.replace(part, local=part.local.cpu())
