"""Encoded chunks -> the final shards: documents of one source and one split, in canonical order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ropewalk.base.errors import DataError
from ropewalk.base.files import read_json, write_json
from ropewalk.store.manifest import ShardEntry, Split
from ropewalk.store.shards import Shard, Tokens, TokenType, write_shard

from .encode import tokens_path

SPLITS: tuple[Split, ...] = ("train", "validation")


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard to write: which documents, and where their tokens lie."""

    file: str
    source: str
    split: Split
    chunks: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    """Place of each document in the tokens of its chunk."""
    text_bytes: int
    tokens: int


def plan_shards(kept: pa.Table, *, sources: list[str], work: Path, shard_tokens: int) -> list[ShardPlan]:
    """Which documents go to which shard; a document of more than `shard_tokens` has a shard to itself."""
    chunks = kept["chunk"].to_numpy()
    rows = _places(chunks)
    lengths = _lengths(chunks, work)
    sizes = kept["bytes"].to_numpy()
    plans = []
    for source in sources:
        for split in SPLITS:
            mask = pc.and_(pc.equal(kept["source"], source), pc.equal(kept["split"], split))
            members = np.flatnonzero(mask.to_numpy())
            for number, part in enumerate(_cut(members, lengths, shard_tokens)):
                plans.append(
                    ShardPlan(
                        file=f"{source}-{split}-{number:05d}.tokens",
                        source=source,
                        split=split,
                        chunks=chunks[part],
                        rows=rows[part],
                        text_bytes=int(sizes[part].sum()),
                        tokens=int(lengths[part].sum()),
                    )
                )
    return plans


def write_planned(plan: ShardPlan, *, folder: Path, work: Path, dtype: TokenType) -> ShardEntry:
    """Commits one shard and its entry, unless an earlier attempt has committed both."""
    record = work / f"{plan.file}.json"
    known = _committed(record, folder)
    if known is not None:
        return known
    written = write_shard(folder / plan.file, _documents(plan, work), dtype=dtype)
    entry = ShardEntry(
        file=plan.file,
        source=plan.source,
        split=plan.split,
        documents=written.documents,
        tokens=written.tokens,
        text_bytes=plan.text_bytes,
        file_bytes=written.bytes,
        checksum=written.checksum,
    )
    write_json(record, dataclasses.asdict(entry))
    return entry


def is_intact(entry: ShardEntry, folder: Path) -> bool:
    """Whether the shard is there with the size and footer it was written with; its tokens are not read."""
    path = folder / entry.file
    try:
        Shard(path, checksum=entry.checksum)
        return path.stat().st_size == entry.file_bytes
    except (DataError, OSError):
        return False


def _committed(record: Path, folder: Path) -> ShardEntry | None:
    if not record.exists():
        return None
    entry = ShardEntry(**read_json(record, what="shard entry"))
    return entry if is_intact(entry, folder) else None


def _documents(plan: ShardPlan, work: Path) -> Iterator[tuple[int, Tokens]]:
    shard, opened = None, -1
    for chunk, row in zip(plan.chunks.tolist(), plan.rows.tolist(), strict=True):
        if shard is None or chunk != opened:
            shard, opened = Shard(tokens_path(work, chunk)), chunk
        yield int(shard.ids[row]), shard.document(row)


def _places(chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, 2, ... within each run of equal chunk numbers."""
    starts = np.flatnonzero(np.r_[True, chunks[1:] != chunks[:-1]])
    return np.arange(len(chunks)) - np.repeat(starts, np.diff(np.r_[starts, len(chunks)]))


def _lengths(chunks: npt.NDArray[np.int64], work: Path) -> npt.NDArray[np.int64]:
    return np.concatenate([np.diff(Shard(tokens_path(work, chunk)).offsets) for chunk in np.unique(chunks).tolist()])


def _cut(members: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], limit: int) -> Iterator[npt.NDArray[np.int64]]:
    """`members` in runs of at most `limit` tokens."""
    start, total = 0, 0
    for place, length in enumerate(lengths[members].tolist()):
        if place > start and total + length > limit:
            yield members[start:place]
            start, total = place, 0
        total += length
    if start < len(members):
        yield members[start:]
