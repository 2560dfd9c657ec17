"""Pieces of token shards fetched and unpacked once for all jobs of a machine (coordinated prep of CoorDL, VLDB 2021).

Jobs that train on one corpus in one order, as those of a search over hyper-parameters do, need the same pieces at about
the same time. The first that comes to a piece fetches and unpacks it and stages the tokens (see `shared`); the others
take them from there. A piece is named by its place in the corpus and by the epoch of the rows that need it, which jobs
with one order agree on, whenever they were started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ropewalk.store.items import Fetch, Item

from .flights import Data
from .shared import Shared, SharedCounts

Decode = Callable[[Data], Data]
"""The stored bytes of a piece to those of its tokens."""


class Coordinated:
    """A Fetch of prepared pieces around `behind`. What nobody foresaw is prepared here and not staged."""

    def __init__(
        self, behind: Fetch, make_shared: Callable[[Fetch, Callable[[Item, Data, int], Data]], Shared]
    ) -> None:
        self.behind = behind
        """For what is not to be prepared: the index of a shard may lie in one range with tokens."""
        self._shared = make_shared(behind, lambda item, data, _epoch: self._prepared(item, data))
        self._lock = threading.Lock()
        self._decoders: dict[int, Decode] = {}
        self._epochs: dict[int, int] = {}

    def decode_with(self, item: Item, decode: Decode) -> None:
        """From now on the item comes as `decode` makes it."""
        with self._lock:
            self._decoders[item.key] = decode

    def expect(self, item: Item, *, epoch: int) -> None:
        """The item will be asked for next for rows of `epoch`."""
        with self._lock:
            self._epochs[item.key] = epoch

    def fetch(self, items: Sequence[Item]) -> list[Data]:
        """The prepared bytes of each item: staged by another job, or made here for all."""
        with self._lock:
            epochs = [self._epochs.get(item.key) for item in items]
        found: dict[Item, Data] = {}
        for epoch in dict.fromkeys(epochs):
            asked = list(dict.fromkeys(item for item, of in zip(items, epochs, strict=True) if of == epoch))
            if epoch is None:
                raw = self.behind.fetch(asked)
                made = [self._prepared(item, data) for item, data in zip(asked, raw, strict=True)]
            else:
                made = self._shared.get(asked, epoch=epoch)
            found.update(zip(asked, made, strict=True))
        return [found[item] for item in items]

    def counts(self) -> SharedCounts:
        """What this job prepared for all, took from others, and prepared for itself alone."""
        return self._shared.counts()

    def line(self) -> str:
        """The figures, for people."""
        counts = self.counts()
        return (
            f"staging: {counts.prepared:,} pieces prepared here for all jobs, {counts.taken:,} taken from others, "
            f"{counts.alone:,} prepared for this job alone, {counts.waited_s:.1f} s waited for others"
        )

    def close(self) -> None:
        """Leaves the area, so that others need not wait for this job; closes what is behind."""
        self._shared.close()

    def _prepared(self, item: Item, data: Data) -> Data:
        with self._lock:
            decode = self._decoders.get(item.key)
        return decode(data) if decode else data
