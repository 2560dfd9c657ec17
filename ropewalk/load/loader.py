"""Manifest -> batches. The state is one integer; everything else is a function of it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ropewalk.base.errors import DataError
from ropewalk.store.manifest import Manifest, ShardEntry, Split, read_manifest
from ropewalk.store.shards import Shard

from .batch import Batch
from .order import Order


class Stream:
    """The tokens of one source and split as one long line over its shards."""

    def __init__(self, folder: Path, entries: list[ShardEntry], *, verify: bool) -> None:
        self._shards = [Shard(folder / entry.file, checksum=entry.checksum) for entry in entries]
        if verify:
            for shard in self._shards:
                shard.verify()
        self._starts = np.cumsum([0] + [len(shard.tokens) for shard in self._shards])
        # Document boundaries on the line, to number the documents of a row.
        bounds = [shard.offsets[1:] + start for shard, start in zip(self._shards, self._starts, strict=False)]
        self._ends = np.concatenate(bounds) if bounds else np.zeros(0, np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`count` tokens from `start` on as int64, and the number of each one's document counted from the first."""
        tokens = np.empty(count, np.int64)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < count:
            offset = start + filled - int(self._starts[shard])
            part = self._shards[shard].tokens[offset : offset + count - filled]
            tokens[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        first, last = np.searchsorted(self._ends, (start, start + count - 1), side="right")
        ends_here = np.bincount(self._ends[first:last] - start, minlength=count)
        return tokens, np.cumsum(ends_here, dtype=np.int32)


class Loader:
    """The batches of a run from any step on; the next one is read by a thread while the step computes.

    `rank` of `world` readers gets its own rows of every global batch: rows r, r + world, ... so that the global batch
    is the same for any `world` that divides it. `pin` puts batches into page-locked memory, for a GPU.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sequence_length: int,
        batch_rows: int,
        seed: int,
        verify: bool = True,
        rank: int = 0,
        world: int = 1,
        pin: bool = False,
    ) -> None:
        assert batch_rows % world == 0, f"{world} readers do not share {batch_rows} rows evenly"
        manifest = read_manifest(folder)
        sources = [source for source in manifest.sources if manifest.shards_of("train", source.name)]
        self._streams = [Stream(folder, manifest.shards_of("train", s.name), verify=verify) for s in sources]
        self._length = sequence_length
        self._rows = batch_rows
        self._rank, self._world, self._pin = rank, world, pin
        # A window needs one token more than a row: the target of its last input.
        windows = [(len(stream) - 1) // sequence_length for stream in self._streams]
        sizes = {source.name: len(stream) for source, stream in zip(sources, self._streams, strict=True)}
        _check_sizes(folder, sizes, sequence_length)
        self.order = Order(windows, [source.weight for source in sources], seed=seed)
        self._step = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def state(self) -> dict[str, Any]:
        """What to remember to continue: JSON, the same on every rank."""
        return {"step": self._step}

    def seek(self, state: dict[str, Any]) -> None:
        """Continues from what `state` returned, at this or another world size."""
        self._step = int(state["step"])

    def next(self) -> Batch:
        """The batch of the current step; advances by one."""
        step = self._step
        if self._ahead is not None and self._ahead[0] == step:
            batch = self._ahead[1].result()
        else:
            batch = self.batch(step)
        self._step = step + 1
        self._ahead = (self._step, self._pool.submit(self.batch, self._step))
        return batch

    def batch(self, step: int) -> Batch:
        """The batch of any step, a pure function."""
        first = step * self._rows + self._rank
        rows = self.order.rows(first, self._rows // self._world, stride=self._world)
        read = [self._streams[r.source].read(r.window * self._length, self._length + 1) for r in rows]
        batch = _collate(read)
        return batch.pinned() if self._pin else batch

    def close(self) -> None:
        """Stops the reading thread."""
        self._pool.shutdown(cancel_futures=True)


def held_out_rows(folder: Path, *, sequence_length: int, rows: int, verify: bool = True) -> Batch:
    """The same `rows` rows of validation tokens every time, taken evenly over all validation sources."""
    manifest = read_manifest(folder)
    names = [s.name for s in manifest.sources if manifest.shards_of("validation", s.name)]
    streams = [Stream(folder, manifest.shards_of("validation", name), verify=verify) for name in names]
    places = [
        (stream, window * sequence_length)
        for stream in streams
        for window in range((len(stream) - 1) // sequence_length)
    ]
    if not places:
        total = sum(len(stream) for stream in streams)
        raise DataError(
            f"{folder}: the {total} validation tokens do not fill one row of {sequence_length}; raise "
            "`prepare.validation_share`, add documents or shorten `load.sequence_length`"
        )
    chosen = [places[index * len(places) // min(rows, len(places))] for index in range(min(rows, len(places)))]
    return _collate([stream.read(start, sequence_length + 1) for stream, start in chosen])


def bytes_per_token(manifest: Manifest, split: Split) -> float:
    """UTF-8 bytes of text behind a token of `split`."""
    shards = manifest.shards_of(split)
    return sum(s.text_bytes for s in shards) / max(1, sum(s.tokens for s in shards))


def _collate(rows: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
    tokens = torch.from_numpy(np.stack([tokens for tokens, _ in rows]))
    documents = torch.from_numpy(np.stack([documents for _, documents in rows]))
    count, length = tokens.shape[0], tokens.shape[1] - 1
    return Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        weight=torch.ones(count, length),
        positions=torch.arange(length).expand(count, -1),
        documents=documents[:, :-1],
    )


def _check_sizes(folder: Path, tokens: dict[str, int], length: int) -> None:
    """Raises DataError unless every source fills a row; `tokens` by source."""
    if not tokens:
        raise DataError(f"{folder}: no source has training tokens; add documents and run `ropewalk prepare` again")
    short = [f"{name} ({count} tokens)" for name, count in tokens.items() if count <= length]
    if short:
        raise DataError(
            f"{folder}: too few training tokens for one row of {length}: {', '.join(short)}; shorten "
            "`load.sequence_length`, add documents or drop the source"
        )
