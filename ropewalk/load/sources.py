"""Where the tokens of a source come from: one long line of them, whatever lies beneath. No torch.

What can be memory-mapped is handed out as parts and gathered by a kernel straight from the page cache. What cannot (a
store behind a URL, compressed blocks, columns of a table) is read range by range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError
from ropewalk.store.items import Fetch, Item
from ropewalk.store.manifest import ShardEntry
from ropewalk.store.origin import Origin, is_url
from ropewalk.store.shards import Counts, Shard, Tokens

Begins = npt.NDArray[np.int64]
"""First tokens of some ranges, on the line."""
Sizes = npt.NDArray[np.int32]
"""Tokens of each of these ranges."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the line that lies in memory or in a mapped file. Documents do not cross parts."""

    tokens: Tokens
    """Contiguous and little-endian."""
    offsets: npt.NDArray[np.int64]
    """Where its documents begin and the last one ends, in tokens of this part: from 0 to all of them."""
    bits: npt.NDArray[np.uint8] | None = None
    """Whether the loss counts each token as a target, bit i % 8 of byte i // 8 for token i; None: all of them."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Tokens `begin` to `end` (exclusive) of a line that are not what was written."""

    begin: int
    end: int
    what: str
    """The shard, its bytes and the documents in them."""


class TokenSource(Protocol):
    """The training tokens of one source as one line. Safe to read from several threads."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document, in the order of the line."""
        ...

    @property
    def damage(self) -> Sequence[Damage]:
        """What is known to be damaged, when it was opened to skip that."""
        ...

    def mapped(self) -> Sequence[Part] | None:
        """The whole line as parts, or None when it has to be read."""
        ...

    def needs(self, begin: Begins, count: Sizes) -> list[Item]:
        """What reading these ranges fetches, each item once; empty when the line is mapped."""
        ...

    def read(self, begin: Begins, count: Sizes) -> Tokens:
        """The tokens of these ranges, joined, fetched and checked. Not called when the line is mapped."""
        ...

    def counts(self, begin: Begins, count: Sizes) -> Counts | None:
        """Whether the loss counts each of these tokens as a target, joined; None: all of them. Not called when the
        line is mapped."""
        ...


def open_source(
    folder: Path,
    entries: Sequence[ShardEntry],
    *,
    verify: bool,
    skip: bool = False,
    fetch: Fetch | None = None,
    origin: Origin | None = None,
) -> TokenSource:
    """The tokens of one source and split, in the order of its shards. `verify` reads all of them once; what is damaged
    is an error, or with `skip` known as `damage`. `fetch` brings what is not mapped: what lies behind a URL or is
    compressed, checked piece by piece when it comes; `origin` knows the sizes of what references name."""
    if any(entry.kind == "references" for entry in entries):
        from .references import open_references  # it builds on this module, and few corpora need it

        return open_references(folder, entries, verify=verify, fetch=fetch, origin=origin)
    if any(is_url(entry.file) or entry.compression != "off" for entry in entries):
        from .remote import RemoteShards  # as above

        return RemoteShards(folder, entries, fetch=fetch or Origin())
    return LocalShards(folder, entries, verify=verify, skip=skip)


class LocalShards:
    """A source whose shards lie in a folder of this machine, memory-mapped one after the other.

    `verify` reads them once: the first damaged chunk is an error, or with `skip` all of them are known as `damage`.
    """

    def __init__(self, folder: Path, entries: Sequence[ShardEntry], *, verify: bool, skip: bool = False) -> None:
        self._shards = [Shard(folder / entry.file, checksum=entry.checksum) for entry in entries]
        self._damage: list[Damage] = []
        start = 0
        for shard in self._shards:
            if verify and skip:
                self._damage += _damage(shard, start)
            elif verify:
                shard.verify()
            start += shard.token_count

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *(np.diff(shard.offsets) for shard in self._shards)])

    @property
    def damage(self) -> Sequence[Damage]:
        return self._damage

    def mapped(self) -> Sequence[Part]:
        return [Part(shard.tokens, shard.offsets, shard.count_bits) for shard in self._shards]

    def needs(self, begin: Begins, count: Sizes) -> list[Item]:
        return []

    def read(self, begin: Begins, count: Sizes) -> Tokens:
        raise AssertionError("mapped tokens are gathered, not read")

    def counts(self, begin: Begins, count: Sizes) -> Counts | None:
        raise AssertionError("mapped tokens are gathered, not read")


def _damage(shard: Shard, start: int) -> Iterator[Damage]:
    """The damage of a shard whose first token is token `start` of the line."""
    for chunk in shard.damaged_chunks():
        tokens, what = shard.damaged_tokens(chunk), f"{shard.path}: {shard.damage(chunk)}"
        if (chunk + 1) * shard.layout.chunk_tokens > shard.token_count:
            # The index may lie: which tokens count, where documents end. Nothing of the shard is to be trusted, but its
            # documents have to fill it, or every token behind it would have another place on the line.
            if not _fills(shard.offsets, shard.token_count):
                raise DataError(f"{what}; restore the shard from a copy: its documents cannot be told apart")
            tokens = range(shard.token_count)
        yield Damage(start + tokens.start, start + tokens.stop, what)


def _fills(offsets: npt.NDArray[np.int64], tokens: int) -> bool:
    return int(offsets[0]) == 0 and int(offsets[-1]) == tokens and bool((np.diff(offsets) >= 0).all())
