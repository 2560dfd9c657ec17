"""Encoded chunks -> the final shards: documents of one source and one split, in canonical order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ropewalk.base.errors import DataError
from ropewalk.store.compression import Compression
from ropewalk.store.manifest import ShardEntry, Split
from ropewalk.store.shards import Run, Shard, TokenType, write_runs

from .columns import Rows
from .encode import open_chunk

SPLITS: tuple[Split, ...] = ("train", "validation")


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard to write: which documents, and where their tokens lie."""

    file: str
    source: str
    split: Split
    chunks: Rows
    rows: Rows
    """Place of each document in the tokens of its chunk."""
    text_bytes: int
    tokens: int


def plan_shards(
    kept: pa.Table, *, sources: Sequence[str], tokens: Sequence[Path], shard_tokens: int
) -> list[ShardPlan]:
    """Which documents go to which shard; a document of more than `shard_tokens` has a shard to itself.

    `kept` has a row (`chunk`, `source`, `split`) for each document, or part of one, in `tokens`, the encoded chunks.
    """
    chunks = kept["chunk"].to_numpy()
    rows = _places(chunks)
    lengths, sizes = lengths_and_bytes(tokens)
    if len(lengths) != len(kept):
        raise DataError(f"{len(kept)} documents were kept and {len(lengths)} encoded; please report this")
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


def write_planned(
    plan: ShardPlan, *, folder: Path, tokens: Sequence[Path], dtype: TokenType, compression: Compression = "off"
) -> ShardEntry:
    """Commits one shard, unless an earlier attempt has: one that is there stays when it holds the planned documents,
    byte for byte."""
    path = folder / plan.file
    encoder = ",".join(sorted({open_chunk(tokens[chunk]).encoder for chunk in np.unique(plan.chunks).tolist()}))
    if not _holds(path, plan, tokens, encoder=encoder, dtype=dtype, compression=compression):
        write_runs(path, _runs(plan, tokens), dtype=dtype, encoder=encoder, compression=compression)
    shard = Shard(path)
    return ShardEntry(
        file=plan.file,
        source=plan.source,
        split=plan.split,
        documents=len(shard),
        tokens=shard.token_count,
        text_bytes=plan.text_bytes,
        file_bytes=path.stat().st_size,
        checksum=shard.checksum,
        compression=compression,
    )


def lengths_and_bytes(tokens: Sequence[Path]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(tokens, text bytes) of each document of the encoded chunks."""
    shards = [open_chunk(path) for path in tokens]
    lengths = np.concatenate([np.diff(shard.offsets) for shard in shards])
    # As encoded: a dialogue has the bytes of its template too.
    sizes = [shard.text_bytes for shard in shards if shard.text_bytes is not None]
    return lengths, np.concatenate(sizes)


def is_intact(entry: ShardEntry, folder: Path) -> bool:
    """Whether the shard is there with the size and footer it was written with; its tokens are not read."""
    path = folder / entry.file
    try:
        Shard(path, checksum=entry.checksum)
        return path.stat().st_size == entry.file_bytes
    except (DataError, OSError):
        return False


def _holds(
    path: Path, plan: ShardPlan, tokens: Sequence[Path], *, encoder: str, dtype: TokenType, compression: Compression
) -> bool:
    """Whether the shard is there, whole, with the documents of the plan and nothing else."""
    try:
        shard = Shard(path)
        shard.verify()
    except DataError:
        return False
    told = (shard.encoder, shard.layout.dtype.name, shard.compressed, len(shard), shard.token_count)
    if told != (encoder, dtype, compression == "zstd", len(plan.rows), plan.tokens):
        return False
    first = 0
    for run in _runs(plan, tokens):
        last = first + len(run.keys)
        begin, end = shard.offsets[[first, last]].tolist()
        pairs: list[tuple[Any, Any]] = [
            (shard.ids[first:last], run.keys),
            (np.diff(shard.offsets[first : last + 1]), run.lengths),
            (shard.tokens[begin:end], run.tokens),
            (shard.counts(begin, end), np.ones(len(run.tokens), bool) if run.counts is None else run.counts),
            (None if shard.text_bytes is None else shard.text_bytes[first:last], run.text_bytes),
        ]
        if not all(np.array_equal(found, wanted) for found, wanted in pairs):
            return False
        first = last
    return True


def _runs(plan: ShardPlan, tokens: Sequence[Path]) -> Iterator[Run]:
    borders = np.flatnonzero(np.diff(plan.chunks)) + 1
    for rows, chunk in zip(np.split(plan.rows, borders), plan.chunks[np.r_[0, borders]].tolist(), strict=True):
        yield open_chunk(tokens[chunk]).run(rows)


def _places(chunks: Rows) -> Rows:
    """0, 1, 2, ... within each run of equal chunk numbers."""
    starts = np.flatnonzero(np.r_[True, chunks[1:] != chunks[:-1]])
    return np.arange(len(chunks)) - np.repeat(starts, np.diff(np.r_[starts, len(chunks)]))


def _cut(members: Rows, lengths: npt.NDArray[np.int64], limit: int) -> Iterator[Rows]:
    """`members` in runs of at most `limit` tokens."""
    ends = np.cumsum(lengths[members])
    start = 0
    while start < len(members):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield members[start:stop]
        start = stop
