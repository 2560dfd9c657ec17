"""Manifest -> batches. The state is one integer; everything else is a function of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ropewalk.base.errors import DataError
from ropewalk.store.manifest import Manifest, ShardEntry, Split, read_manifest
from ropewalk.store.shards import Shard

from .batch import Batch
from .order import Order


class Window(NamedTuple):
    """Some tokens of a source, one after the other."""

    tokens: np.ndarray
    """int64."""
    documents: np.ndarray
    """int32, the number of each token's document counted from the first."""
    counts: np.ndarray
    """Whether the loss counts each token as a target."""


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

    def read(self, start: int, count: int) -> Window:
        """`count` tokens from `start` on."""
        tokens, counts = np.empty(count, np.int64), np.empty(count, np.bool_)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < count:
            offset = start + filled - int(self._starts[shard])
            part = self._shards[shard].tokens[offset : offset + count - filled]
            tokens[filled : filled + len(part)] = part
            counts[filled : filled + len(part)] = self._shards[shard].counts(offset, offset + len(part))
            filled += len(part)
            shard += 1
        first, last = np.searchsorted(self._ends, (start, start + count - 1), side="right")
        ends_here = np.bincount(self._ends[first:last] - start, minlength=count)
        return Window(tokens, np.cumsum(ends_here, dtype=np.int32), counts)


class Loader:
    """The batches of a phase from any row on; the next one is read by a thread while the step computes.

    `rank` of `world` readers gets its own rows of every global batch: rows r, r + world, ... so that the global batch
    is the same for any `world` that divides it. `mixture` gives the weights of the sources to read by name, None those
    of the manifest. `pin` puts batches into page-locked memory, for a GPU.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sequence_length: int,
        batch_rows: int,
        seed: int,
        mixture: Mapping[str, float] | None = None,
        verify: bool = True,
        rank: int = 0,
        world: int = 1,
        pin: bool = False,
    ) -> None:
        assert batch_rows % world == 0, f"{world} readers do not share {batch_rows} rows evenly"
        manifest = read_manifest(folder)
        weights = mixture or {source.name: source.weight for source in manifest.sources}
        sources = [s for s in manifest.sources if s.name in weights and manifest.shards_of("train", s.name)]
        self._streams = [Stream(folder, manifest.shards_of("train", s.name), verify=verify) for s in sources]
        self._length = sequence_length
        self._rows = batch_rows
        self._rank, self._world, self._pin = rank, world, pin
        # A window needs one token more than a row: the target of its last input.
        windows = [(len(stream) - 1) // sequence_length for stream in self._streams]
        sizes = {source.name: len(stream) for source, stream in zip(sources, self._streams, strict=True)}
        _check_sizes(folder, sizes, sequence_length)
        self.order = Order(windows, [weights[source.name] for source in sources], seed=seed)
        self.tokens = sum(sizes.values())
        """Training tokens there are in the sources it reads."""
        self._row = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._ahead: tuple[tuple[int, int], Future[Batch]] | None = None

    def state(self) -> dict[str, Any]:
        """What to remember to continue: JSON, the same on every rank."""
        return {"row": self._row}

    def seek(self, state: dict[str, Any]) -> None:
        """Continues from what `state` returned, at this or another world size."""
        self._row = int(state["row"])

    def next(self, rows: int | None = None) -> Batch:
        """The next batch of `rows` rows over all readers, else of `batch_rows`; advances by as many."""
        rows = rows or self._rows
        wanted = (self._row, rows)
        batch = self._ahead[1].result() if self._ahead and self._ahead[0] == wanted else self.batch(*wanted)
        self.skip(rows)
        # Sizes change seldom, in ramps: the next batch is most likely as large as this one.
        wanted = (self._row, rows)
        self._ahead = (wanted, self._pool.submit(self.batch, *wanted))
        return batch

    def skip(self, rows: int) -> None:
        """Goes on as if the next `rows` rows had been read."""
        self._row += rows

    def batch(self, first: int, rows: int) -> Batch:
        """The batch of `rows` rows of the global order from row `first` on, a pure function."""
        places = self.order.rows(first + self._rank, rows // self._world, stride=self._world)
        read = [self._streams[p.source].read(p.window * self._length, self._length + 1) for p in places]
        batch = _collate(read)
        return batch.pinned() if self._pin else batch

    def close(self) -> None:
        """Stops the reading thread."""
        self._pool.shutdown(cancel_futures=True)


def held_out_rows(
    folder: Path, *, sequence_length: int, rows: int, sources: Collection[str] | None = None, verify: bool = True
) -> Batch:
    """The same `rows` rows of validation tokens every time, taken evenly over the `sources` that have some (None: all
    of the corpus)."""
    manifest = read_manifest(folder)
    wanted = [s.name for s in manifest.sources if sources is None or s.name in sources]
    names = [name for name in wanted if manifest.shards_of("validation", name)]
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


def bytes_per_token(manifest: Manifest, split: Split, *, sources: Collection[str] | None = None) -> float:
    """UTF-8 bytes of text behind a token of `split`, of some sources or of all."""
    shards = [shard for shard in manifest.shards_of(split) if sources is None or shard.source in sources]
    return sum(s.text_bytes for s in shards) / max(1, sum(s.tokens for s in shards))


def _collate(windows: list[Window]) -> Batch:
    tokens, documents, counts = (torch.from_numpy(np.stack(column)) for column in zip(*windows, strict=True))
    count, length = tokens.shape[0], tokens.shape[1] - 1
    return Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        weight=counts[:, 1:].float(),
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
