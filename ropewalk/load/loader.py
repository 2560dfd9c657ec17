"""Manifest -> batches. The order is a function: the state says how far it was read, everything else is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ropewalk.base.errors import DataError
from ropewalk.store.items import Item
from ropewalk.store.manifest import Manifest, Split, read_manifest

from .adapt import Knob
from .batch import Batch, Compact, Courier
from .cache.config import Cache
from .cache.tiers import caching
from .config import OnDamage, Packing, Remote, Shuffle
from .expected import Expected
from .foresight import Fetched
from .gather import RowForm
from .history import History
from .mixture import Mixture
from .order import Order, Rows, SourceData
from .reader import Reader
from .remote import file_of, open_remote, small_files
from .ring import Block, Ring, Taken
from .sources import TokenSource, open_source
from .stalls import Stalls, Times

AHEAD_BYTES = 16 << 20
"""What is made ahead unless told otherwise: seconds of reading for the fastest model, and little memory."""


class _Opened(NamedTuple):
    """What belongs together: a thread that still works on what was open before keeps all of it."""

    sources: dict[str, TokenSource]
    order: Order
    reader: Reader


class Loader:
    """The batches of a phase from any row on; the next ones are made by threads while the step computes.

    `rank` of `world` readers gets its own rows of every global batch: rows r, r + world, ... so that the global batch
    is the same for any `world` that divides it. `mixture` gives the weights of the sources to read by name, None those
    of the manifest. Batches are made on `device`, from page-locked memory for a GPU.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        mixture: Mixture | Mapping[str, float] | None = None,
        packing: Packing = "windows",
        shuffle: Shuffle = "all",
        verify: bool = True,
        on_damage: OnDamage = "stop",
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        threads: int = 1,
        prefetch_bytes: int = AHEAD_BYTES,
        remote: Remote | None = None,
        cache: Cache | None = None,
        stalls: Stalls | None = None,
    ) -> None:
        assert batch_size % world == 0, f"{world} readers do not share {batch_size} rows evenly"
        self._folder, self._manifest = folder, read_manifest(folder)
        self._length, self._rows, self._seed = sequence_length, batch_size, seed
        self._packing, self._shuffle = packing, shuffle
        self._verify, self._skips = verify, on_damage == "skip"
        self._rank, self._world, self._device = rank, world, torch.device(device)
        self._courier, self._stalls = Courier(self._device), stalls or Stalls()
        self._form = RowForm(sequence_length, self._manifest.dtype)
        self._history = History()
        self._wanted = self._mixture(mixture)
        self.mixture_changed_at: int | None = None
        """The row from which on the weights are others than those before, when the last `seek` found that."""
        self.filled = 0
        """Tokens of the last batch that are not padding."""
        self._settings = remote or Remote()
        files = [file_of(folder, entry) for entry in self._manifest.shards]
        cached = caching(cache, files=files, rank=rank, world=world)
        self._remote = open_remote(self._settings, row_bytes=self._form.row_bytes, world=world, cached=cached)
        self._opened = self._open(self._wanted)
        self._foresee(0)
        self._ring = Ring(
            self._block, row_bytes=self._form.row_bytes / world, prefetch_bytes=prefetch_bytes, threads=threads
        )

    @property
    def order(self) -> Order:
        """Which row comes when."""
        return self._opened.order

    @property
    def tokens(self) -> int:
        """Training tokens there are in the sources of the mixture."""
        identity = self.order.identity()["sources"]
        return sum(identity[name]["tokens"] for name in self._wanted.names())

    @property
    def epochs(self) -> dict[str, float]:
        """How often each source has been read."""
        return dict(zip(self.order.names, self.order.epochs(self._history.row), strict=True))

    def state(self) -> dict[str, Any]:
        """What to remember to continue: JSON, the same on every rank. The next step and row; which rows steps have read
        and left out; the mixture; what the order is made of."""
        return {**self._history.to_json(), "mixtures": self.order.mixture.to_json(), "order": self.order.identity()}

    def seek(self, state: Mapping[str, Any]) -> None:
        """Continues from what `state` returned, at this or another world size and batch. Another mixture holds from
        there on, with no row repeated or lost; anything else that would make other rows of the order is an error.
        `{"row": n}` alone will do, for a state of the first format."""
        history = History.from_json(state)
        mixture, before = self._wanted, None
        if "mixtures" in state:
            before = Mixture.from_json(state["mixtures"])
            mixture = before.continued(history.row, self._wanted)
        known = tuple(state["order"]["sources"]) if "order" in state else ()
        self._ring.clear()
        if mixture != self.order.mixture or not set(self.order.names) >= set(known):
            self._opened = self._open(mixture, known, before=self._opened)
        if "order" in state:
            self.order.check_identity(state["order"])
        self.mixture_changed_at = None if before in (None, mixture) else history.row
        self._history = history
        self._foresee(history.row)

    def next(self, rows: int | None = None) -> Batch:
        """The next batch of `rows` rows over all readers, else of `batch_size`, on the device; advances by as many."""
        began = self._stalls.clock()
        taken = self._take(rows or self._rows)
        batch = self._courier.bring(taken.batch)
        self._count(taken, began)
        return batch

    def take(self, rows: int | None = None) -> Compact:
        """As `next`, in host memory and as it travels."""
        began = self._stalls.clock()
        taken = self._take(rows or self._rows)
        self._count(taken, began)
        return taken.batch

    def skip(self, rows: int) -> None:
        """Leaves the next `rows` rows out."""
        self._history.skip(rows)

    def batch(self, first: int, rows: int) -> Batch:
        """The batch of `rows` rows of the global order from row `first` on, a pure function."""
        return self._block(first, rows, 1).batches[0].to(self._device)

    def needs(self, first: int, rows: int) -> list[Item]:
        """What reading `rows` rows of the global order from row `first` on fetches, each item once, a pure function.
        Empty when everything is memory-mapped."""
        opened = self._opened
        wanted = self._rows_of(opened.order, first, rows)
        found: dict[Item, None] = {}
        for number, source in enumerate(opened.sources.values()):
            mine = wanted.source == number
            found.update(dict.fromkeys(source.needs(wanted.begin[mine], wanted.targets[mine] + 1)))
        return list(found)

    def take_warnings(self) -> list[str]:
        """What was found damaged and is left out, since the last call."""
        return self._opened.reader.take_warnings()

    def expect(self, coming: Expected) -> None:
        """Makes known what the run is about to do, so that reads move ahead of it; `coming.at` counts rows from the
        next one on."""
        self._remote.foresight.expect(dataclasses.replace(coming, at=self._history.row + coming.at))

    def knobs(self) -> list[Knob]:
        """What may be retuned during the run; of those that help against the same cause, the cheapest first."""
        ring, settings, remote = self._ring, self._settings, self._remote
        ahead = max(1 << 20, ring.prefetch_bytes)
        found = [Knob("load.prefetch_bytes", ahead, 1 << 30, ("queue",), lambda n: ring.tune(prefetch_bytes=n))]
        if self._opened.reader.fetches:
            found += [
                Knob("load.remote.max_requests", settings.max_requests, 128, ("queue", "fetch"), remote.stores.allow),
                Knob("load.remote.prefetch_bytes", settings.prefetch_bytes, 4 << 30, ("fetch",), remote.foresight.tune),
            ]
        threads = Knob("load.threads", ring.threads, 64, ("prepare", "fetch"), lambda n: ring.tune(threads=n))
        return [*found, threads]

    def describe(self) -> list[str]:
        """How what is not mapped is read, for people: the policy of each store, how far ahead, what overlaps."""
        return self._remote.lines() if self._opened.reader.fetches else []

    def close(self) -> None:
        """Ends the reading threads."""
        self._remote.foresight.close()
        self._ring.close()

    def _open(self, mixture: Mixture, known: Sequence[str] = (), *, before: _Opened | None = None) -> _Opened:
        """The order of `mixture` with the sources that it names or that were `known` before; those that are open stay
        so."""
        names, sources = {*mixture.names(), *known}, {}
        for name in (entry.name for entry in self._manifest.sources if entry.name in names):
            if before and name in before.sources:
                sources[name] = before.sources[name]
            elif shards := self._manifest.shards_of("train", name):
                sources[name] = open_source(
                    self._folder,
                    shards,
                    verify=self._verify,
                    skip=self._skips,
                    fetch=self._remote.foresight,
                    origin=small_files(self._settings),
                )
        data = [SourceData(name, source.lengths) for name, source in sources.items()]
        _check_sizes(self._folder, data, self._length, packing=self._packing)
        order = Order(
            data,
            sequence_length=self._length,
            seed=self._seed,
            packing=self._packing,
            shuffle=self._shuffle,
            mixture=mixture,
            layouts=self._folder / "layouts",
        )
        # What compiles at the first row compiles now: a step that waits for it would look like slow reading.
        order.rows(0, 1)
        whole = self._packing != "windows"
        reader = Reader(list(sources.values()), self._form, whole=whole, skip=self._skips, clock=self._stalls.clock)
        return _Opened(sources, order, reader)

    def _foresee(self, row: int) -> None:
        """Reads ahead from `row` on, where there is anything that is not mapped."""
        if self._opened.reader.fetches:
            self._remote.foresight.begin(self.needs, row=row)

    def _take(self, rows: int) -> Taken:
        taken = self._ring.take(self._history.row, rows)
        self._history.read(rows)
        self._remote.foresight.advance(self._history.row)
        self.filled = taken.batch.filled
        return taken

    def _count(self, taken: Taken, began: float) -> None:
        ended = self._stalls.clock()
        self._stalls.waited(began, ended, taken.times, bytes=taken.fetched_bytes, tokens=taken.batch.filled)

    def _mixture(self, given: Mixture | Mapping[str, float] | None) -> Mixture:
        if isinstance(given, Mixture):
            return given
        if given is not None:
            return Mixture.constant(given)
        manifest = self._manifest
        weights = {s.name: s.weight for s in manifest.sources if manifest.shards_of("train", s.name)}
        if not weights:
            raise _no_tokens(self._folder)
        return Mixture.constant(weights)

    def _rows_of(self, order: Order, first: int, rows: int) -> Rows:
        """This reader's part of `rows` rows of the global order."""
        assert rows % self._world == 0, f"{self._world} readers do not share {rows} rows evenly"
        return order.rows(first + self._rank, rows // self._world, stride=self._world)

    def _block(self, first: int, rows: int, count: int) -> Block:
        """`count` batches of `rows` rows each."""
        began, opened = self._stalls.clock(), self._opened
        wanted = self._rows_of(opened.order, first, rows * count)
        pinned = self._device.type == "cuda"
        memory = torch.empty((len(wanted), self._form.row_bytes), dtype=torch.uint8, pin_memory=pinned)
        fetched = Fetched()
        try:
            with self._remote.foresight.reading(first, rows * count) as fetched:
                read = opened.reader.read(wanted, memory.numpy())
        except DataError:
            if not self._skips:
                raise
            # Something was damaged on the way: without it.
            read = opened.reader.read(wanted, memory.numpy())
        size = rows // self._world
        filled = np.add.reduceat(read.filled, np.arange(0, len(wanted), size)).tolist()
        batches = [
            Compact(rows=part, form=self._form, restarts=self._packing != "windows", filled=real)
            for part, real in zip(memory.split(size), filled, strict=True)
        ]
        # What was read ahead was fetched when it came, and not when the reader took it up.
        ended = fetched.ended if fetched.bytes else max(began, read.fetched)
        times = Times(min(began, fetched.began), ended, self._stalls.clock())
        return Block(batches, times, fetched_bytes=fetched.bytes or memory.nbytes)


def held_out_rows(
    folder: Path,
    *,
    sequence_length: int,
    rows: int,
    sources: Collection[str] | None = None,
    verify: bool = True,
    on_damage: OnDamage = "stop",
) -> Batch:
    """The same `rows` rows of validation tokens every time, taken evenly over the `sources` that have some (None: all
    of the corpus)."""
    manifest = read_manifest(folder)
    wanted = [s.name for s in manifest.sources if sources is None or s.name in sources]
    names = [name for name in wanted if manifest.shards_of("validation", name)]
    skip = on_damage == "skip"
    opened = [open_source(folder, manifest.shards_of("validation", name), verify=verify, skip=skip) for name in names]
    tokens = [int(source.lengths.sum()) for source in opened]
    places = [
        (number, window * sequence_length)
        for number, count in enumerate(tokens)
        for window in range((count - 1) // sequence_length)
    ]
    if not places:
        raise DataError(
            f"{folder}: the {sum(tokens)} validation tokens do not fill one row of {sequence_length}; raise "
            "`prepare.validation_share`, add documents or shorten `load.sequence_length`"
        )
    count = min(rows, len(places))
    chosen = np.array([places[index * len(places) // count] for index in range(count)])
    whole = np.full(count, sequence_length, np.int32)
    windows = Rows(np.arange(count + 1), chosen[:, 0].astype(np.int32), chosen[:, 1].copy(), whole, whole)
    form = RowForm(sequence_length, manifest.dtype)
    memory = torch.empty((count, form.row_bytes), dtype=torch.uint8)
    Reader(opened, form, whole=False, skip=skip).read(windows, memory.numpy())
    return Compact(memory, form, restarts=False, filled=count * sequence_length).to(torch.device("cpu"))


def bytes_per_token(manifest: Manifest, split: Split, *, sources: Collection[str] | None = None) -> float:
    """UTF-8 bytes of text behind a token of `split`, of some sources or of all."""
    shards = [shard for shard in manifest.shards_of(split) if sources is None or shard.source in sources]
    return sum(s.text_bytes for s in shards) / max(1, sum(s.tokens for s in shards))


def _check_sizes(folder: Path, sources: list[SourceData], length: int, *, packing: Packing) -> None:
    """Raises DataError unless every source fills a row."""
    if not sources:
        raise _no_tokens(folder)
    tokens = {source.name: int(source.lengths.sum()) for source in sources}
    # A window needs one token more than a row: the target of its last input. A layout pads.
    short = [f"{name} ({count} tokens)" for name, count in tokens.items() if count <= length]
    if short and packing == "windows":
        raise DataError(
            f"{folder}: too few training tokens for one row of {length}: {', '.join(short)}; shorten "
            "`load.sequence_length`, add documents or drop the source"
        )


def _no_tokens(folder: Path) -> DataError:
    return DataError(f"{folder}: no source has training tokens; add documents and run `ropewalk prepare` again")
