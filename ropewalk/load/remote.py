"""Token shards that are read piece by piece: behind a URL, or compressed on a disk. No torch.

A piece is 1 MiB of tokens, checked when it comes. With rows in any order every row needs a piece of its own: read such
a corpus with `load.shuffle = "blocks"`, or keep it in a cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from ropewalk.store.items import Fetch, Item
from ropewalk.store.manifest import ShardEntry
from ropewalk.store.mirrored import MirroredOrigin
from ropewalk.store.origin import Origin, Reading, is_url, open_origin
from ropewalk.store.remote import RemoteShard
from ropewalk.store.shards import Counts, Tokens

from .cache.coordinated import Coordinated
from .cache.stats import Counts as TierCounts
from .cache.tiers import Tiers
from .config import Remote
from .endpoints import Endpoint, InFlight, Service
from .foresight import Foresight
from .hedged import Hedged, Patience
from .sources import Begins, Damage, Part, Sizes
from .stripes import Stripes

_OPENING = 16
"""Shards opened at the same time: each costs two requests one after the other."""

_STRIP_ROWS, _STRIP_BYTES = 16, 1 << 16
"""Rows a reader is told of at a time: enough that asking the order costs little, few enough that the pieces of rows in
any order, 1 MiB each, are a small part of what is read ahead."""


class RemoteShards:
    """A source whose shards are read through `fetch`, one after the other on the line.

    What is damaged shows when it is read: every piece has a checksum, and the error names the documents in it.
    """

    def __init__(
        self, folder: Path, entries: Sequence[ShardEntry], *, fetch: Fetch, coordinated: Coordinated | None = None
    ) -> None:
        """With `coordinated`, which is behind `fetch`, pieces come unpacked."""
        self._fetch, self._coordinated = fetch, coordinated

        def opened(entry: ShardEntry) -> RemoteShard:
            file = file_of(folder, entry)
            return RemoteShard(
                file, fetch=coordinated.behind if coordinated else fetch, size=entry.file_bytes, checksum=entry.checksum
            )

        with ThreadPoolExecutor(min(_OPENING, len(entries)), thread_name_prefix="open") as pool:
            self._shards = list(pool.map(opened, entries))
        self._starts = np.cumsum([0, *(shard.token_count for shard in self._shards)])
        # Pieces are numbered over all shards, so that those of many ranges are found by one search.
        pieces = [len(shard.pieces_of(0, shard.token_count)) for shard in self._shards]
        self._first_piece = list(itertools.accumulate(pieces, initial=0))
        self._piece_starts = np.concatenate(
            [
                start + shard.layout.chunk_tokens * np.arange(count, dtype=np.int64)
                for start, shard, count in zip(self._starts, self._shards, pieces, strict=False)
            ]
        )
        # What a piece is called never changes; making its item takes some 10 us, as long as reading it from memory.
        self._item = functools.lru_cache(maxsize=1 << 16)(self._make_item)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *(shard.lengths for shard in self._shards)])

    @property
    def damage(self) -> Sequence[Damage]:
        return ()

    def mapped(self) -> Sequence[Part] | None:
        return None

    def needs(self, begin: Begins, count: Sizes) -> list[Item]:
        low, high = self._pieces_of(begin, count)
        found = np.zeros(0, np.int64)
        while (inside := low < high).any():
            found, low = np.union1d(found, low[inside]), low + 1
        return [self._item(piece) for piece in found.tolist()]

    def read(self, begin: Begins, count: Sizes) -> Tokens:
        low, high = self._pieces_of(begin, count)
        pieces = sorted({piece for first, last in zip(low, high, strict=True) for piece in range(first, last)})
        fetched = self._fetch.fetch([self._item(piece) for piece in pieces])
        tokens = {piece: self._decoded(piece, data) for piece, data in zip(pieces, fetched, strict=True)}
        joined = np.zeros(int(count.sum()), self._shards[0].layout.dtype)
        filled = 0
        for first, size, left, right in zip(begin.tolist(), count.tolist(), low, high, strict=True):
            for piece in range(left, right):
                start = int(self._piece_starts[piece])
                part = tokens[piece][max(0, first - start) : first + size - start]
                joined[filled : filled + len(part)] = part
                filled += len(part)
        return joined

    def counts(self, begin: Begins, count: Sizes) -> Counts | None:
        if all(shard.count_bits is None for shard in self._shards):
            return None
        parts = []
        for first, size in zip(begin.tolist(), count.tolist(), strict=True):
            for shard, low, high in self._ranges(first, size):
                counted = self._shards[shard].counts(low, high)
                parts.append(np.ones(high - low, np.bool_) if counted is None else counted)
        return np.concatenate(parts) if parts else np.zeros(0, np.bool_)

    def _ranges(self, first: int, size: int) -> list[tuple[int, int, int]]:
        """(shard, its first token, its last token + 1) of a range of the line."""
        ranges = []
        shard = int(np.searchsorted(self._starts, first, side="right")) - 1
        stop = first + size
        while first < stop:
            start, end = int(self._starts[shard]), min(stop, int(self._starts[shard + 1]))
            if first < end:
                ranges.append((shard, first - start, end - start))
            first, shard = max(first, end), shard + 1
        return ranges

    def _pieces_of(self, begin: Begins, count: Sizes) -> tuple[Begins, Begins]:
        """First piece and last piece + 1 of each range."""
        low = np.searchsorted(self._piece_starts, begin, side="right") - 1
        high = np.searchsorted(self._piece_starts, begin + count, side="left")
        return np.where(count > 0, low, 0), np.where(count > 0, high, 0)

    def _place(self, piece: int) -> tuple[RemoteShard, int]:
        """The shard of a piece, and its number there."""
        shard = bisect_right(self._first_piece, piece) - 1
        return self._shards[shard], piece - self._first_piece[shard]

    def _decoded(self, piece: int, data: bytes | memoryview) -> Tokens:
        shard, number = self._place(piece)
        if self._coordinated:
            return np.frombuffer(data, shard.layout.dtype, count=len(shard.tokens_of(number)))
        return shard.decode(number, data)

    def _make_item(self, piece: int) -> Item:
        shard, number = self._place(piece)
        documents = shard.damaged_documents(number)
        item = dataclasses.replace(shard.item(number), name=f"{documents.start} to {documents.stop - 1}")
        if self._coordinated:
            self._coordinated.decode_with(item, lambda data: shard.decode(number, data).data.cast("B"))
        return item


@dataclass(frozen=True, slots=True)
class Faults:
    """Answers that were late, short, damaged or none."""

    retried: int
    """Asked for again."""
    reported: int
    """Given up after the last attempt: an error of whoever needs them, unless a mirror had them."""


class Stores:
    """The `Fetch` of what is not mapped: stores and their mirrors, asked twice where an answer is overdue.

    A store is a scheme and a host, opened when its first file is asked for. `cached` puts cache tiers around them all.
    """

    def __init__(self, settings: Remote, *, cached: Callable[[Fetch], Fetch] = lambda fetch: fetch) -> None:
        self._settings = settings
        self._origins: list[Origin] = []
        mirrored = dict.fromkeys(mirror.of for mirror in settings.mirrors)
        places = [(of, of) for of in mirrored] + [(mirror.at, mirror.of) for mirror in settings.mirrors]
        self._stripes = Stripes(
            [self._endpoint(_folder(base), _folder(known_as)) for base, known_as in places],
            open_store=lambda file: self._endpoint(_store_of(file), _store_of(file)),
        )
        self._hedged = Hedged(self._stripes, patience=Patience(times=settings.hedge)) if settings.hedge else None
        self._fetch = cached(self._hedged or self._stripes)

    def fetch(self, items: Sequence[Item]) -> list[bytes | memoryview]:
        """The bytes of each item, from the nearest tier that has them."""
        return self._fetch.fetch(items)

    @property
    def coordinated(self) -> Coordinated | None:
        """The staging area that jobs share, if there is one."""
        return self._fetch.coordinated if isinstance(self._fetch, Tiers) else None

    def tiers(self) -> dict[str, TierCounts]:
        """Figures by cache tier, the nearest first."""
        return self._fetch.counts() if isinstance(self._fetch, Tiers) else {}

    def limit(self) -> int:
        """Requests that all stores together may have in flight now."""
        return self._stripes.limit()

    def allow(self, requests: int) -> None:
        """Sets how many requests each store may have in flight."""
        self._stripes.allow(requests)

    def services(self) -> list[Service]:
        """How each store has served."""
        return self._stripes.services()

    def faults(self) -> Faults:
        """What stores did wrong, and what was done about it."""
        stats = [origin.stats() for origin in self._origins]
        return Faults(sum(sum(each.retries.values()) for each in stats), sum(each.failures for each in stats))

    def lines(self) -> list[str]:
        """The policy and what came of it, for people."""
        found = [_line(service) for service in self.services()]
        if self._hedged:
            stats = self._hedged.stats()
            found.append(
                f"answers overdue by {self._settings.hedge:g} times the median are asked for again: "
                f"{stats.hedges} of {stats.requests} requests, of which {stats.won} were answered sooner for it"
            )
        return found + (self._fetch.lines() if isinstance(self._fetch, Tiers) else [])

    def close(self) -> None:
        """Closes all tiers and stores."""
        self._fetch.close()

    def _endpoint(self, base: str, known_as: str) -> Endpoint:
        settings = self._settings
        origin = open_origin(base, reading=Reading(timeout_s=settings.timeout_s))
        self._origins.append(origin)
        policy = InFlight(settings.policy, requests=settings.max_requests)
        return Endpoint(base, origin, known_as=known_as, in_flight=policy)


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Stores, and what reads ahead from them."""

    stores: Stores
    foresight: Foresight

    def lines(self) -> list[str]:
        """Policy and state, for people."""
        return [*self.stores.lines(), *self.foresight.lines()]


def open_remote(
    settings: Remote, *, row_bytes: int, world: int = 1, cached: Callable[[Fetch], Fetch] = lambda fetch: fetch
) -> ReadAhead:
    """What reads ahead of rows of `row_bytes`, shared by `world` readers; opens nothing before it is asked."""
    stores = Stores(settings, cached=cached)
    strip_rows = world * max(_STRIP_ROWS, _STRIP_BYTES // row_bytes)
    foresight = Foresight(
        stores, strip_rows=strip_rows, prefetch_bytes=settings.prefetch_bytes, requests=stores.limit, world=world
    )
    return ReadAhead(stores, foresight)


def small_files(settings: Remote) -> Origin:
    """Where manifests, indices and other small files are read from: their stores, or the mirrors of these."""
    mirrors, reading = [(mirror.of, mirror.at) for mirror in settings.mirrors], Reading(timeout_s=settings.timeout_s)
    return MirroredOrigin(mirrors, reading=reading) if mirrors else Origin(reading)


def file_of(folder: Path, entry: ShardEntry) -> str:
    """The URL or path of a shard."""
    return entry.file if is_url(entry.file) else str(folder / entry.file)


def _store_of(file: str) -> str:
    """Scheme and host of a URL; nothing, with which every name begins, for local files."""
    if not is_url(file):
        return ""
    parts = urlsplit(file)
    return f"{parts.scheme}://{parts.netloc}"


def _folder(place: str) -> str:
    return place.rstrip("/") + "/"


def _line(service: Service) -> str:
    state = "up" if service.up else "left alone after failures"
    return (
        f"{service.base or 'local disk'}: {state}, {service.in_flight} of {service.limit} requests in flight "
        f"({service.policy}), {service.bytes_per_s / 1e6:.1f} MB/s, {service.request_s * 1e3:.0f} ms a request, "
        f"{service.requests} requests, {service.failures} failures"
    )
