"""Rows of the order -> reads ahead of them: what joins the loader and the prefetcher. No torch.

The prefetcher reads for numbered batches, the loader makes blocks of rows whose sizes change with ramps, with the bytes
ahead and with the threads. Between them stand strips: the rows of the order in groups of a fixed size. A block waits
for the strips that it touches; a strip is let go when all its rows have been read, or when the steps have passed it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ropewalk.base.errors import DataError
from ropewalk.store.items import Fetch, Item

from .expected import Expected
from .prefetch import Prefetcher

Data = bytes | memoryview


@dataclass(slots=True)
class Fetched:
    """What a block of rows waited for; filled in when its rows are at hand."""

    began: float = float("inf")
    """When the first of its bytes was asked for, by the clock."""
    ended: float = float("-inf")
    """When the last was there."""
    bytes: int = 0


class Foresight:
    """A `Fetch` around `behind` that reads ahead of the rows once it knows what they need.

    Each of `world` readers has its own rows of every strip, whose size they share evenly.
    """

    def __init__(
        self,
        behind: Fetch,
        *,
        strip_rows: int,
        prefetch_bytes: int,
        requests: int | Callable[[], int],
        world: int = 1,
    ) -> None:
        assert strip_rows % world == 0, f"{world} readers do not share {strip_rows} rows evenly"
        self._behind = behind
        self._strip_rows, self._world = strip_rows, world
        self._ahead_bytes, self._requests = prefetch_bytes, requests
        self._offset = 0
        self._prefetcher: Prefetcher | None = None
        self._lock = threading.Lock()
        self._unread: dict[int, int] = {}

    def begin(
        self,
        needs: Callable[[int, int], Sequence[Item]],
        *,
        row: int,
        announce: Callable[[Item, int], None] | None = None,
    ) -> None:
        """Reads ahead from `row` on, and no longer where it did before; `needs(first, rows)` gives what a reader's part
        of rows of the order needs. `announce` is told of each item, before it is requested, at which row it is needed
        first."""
        self._end()
        # A run that continues with another number of readers may begin in the middle of what they share.
        self._offset = offset = row % self._world
        size = self._strip_rows
        self._prefetcher = Prefetcher(
            self._behind,
            lambda strip: needs(strip * size + offset, size),
            budget_bytes=self._ahead_bytes,
            requests=self._requests,
            first=self._strip(row),
            announce=None if announce is None else lambda item, strip: announce(item, strip * size + offset),
        )
        with self._lock:
            self._unread = {}

    def fetch(self, items: Sequence[Item]) -> list[Data]:
        """The bytes of each item, from hand where they have been read ahead."""
        return self._prefetcher.fetch(items) if self._prefetcher else self._behind.fetch(items)

    @contextlib.contextmanager
    def reading(self, first: int, rows: int) -> Iterator[Fetched]:
        """Begins when what `rows` rows from row `first` on need is at hand; its end says that they have been read."""
        fetched = Fetched()
        prefetcher = self._prefetcher
        if prefetcher is None:
            yield fetched
            return
        strips = range(self._strip(first), self._strip(first + rows - 1) + 1)
        for strip in strips:
            try:
                arrival = prefetcher.wait(strip)
            except DataError:
                # Whoever reads these rows meets it again, and knows whether to stop or to skip.
                continue
            if arrival is not None:
                fetched.began, fetched.ended = min(fetched.began, arrival.began), max(fetched.ended, arrival.ended)
                fetched.bytes += arrival.bytes
        yield fetched
        for strip in strips:
            if self._is_read(strip, first, rows):
                prefetcher.release(strip)

    def advance(self, row: int) -> None:
        """The steps have passed the rows before `row`, read or left out."""
        if self._prefetcher:
            strip = self._strip(row)
            with self._lock:
                self._unread = {number: left for number, left in self._unread.items() if number >= strip}
            self._prefetcher.advance(strip)

    def expect(self, coming: Expected) -> None:
        """Makes known what the run is about to do; its `at` is a row."""
        if self._prefetcher:
            self._prefetcher.expect(dataclasses.replace(coming, at=self._strip(coming.at)))

    def tune(self, prefetch_bytes: int) -> None:
        """Changes how far ahead it reads."""
        self._ahead_bytes = prefetch_bytes
        if self._prefetcher:
            self._prefetcher.tune(budget_bytes=prefetch_bytes)

    def describe(self) -> dict[str, float]:
        """What is in force and at hand; empty before reading begins."""
        return self._prefetcher.describe() if self._prefetcher else {}

    def lines(self) -> list[str]:
        """How far ahead it reads and what overlaps with the steps, for people."""
        if not (now := self.describe()):
            return []
        return [
            f"{now['held_bytes'] / 1e6:.1f} MB at hand and {(now['planned_bytes'] - now['held_bytes']) / 1e6:.1f} MB "
            f"asked for, of {now['budget_bytes_now'] / 1e6:.0f} MB that may be ahead of the steps",
            f"stores were read for {now['read_s']:.1f} s while steps compute, evaluate and save; batches waited for "
            f"them {now['wait_s']:.1f} s",
        ]

    def close(self) -> None:
        """Ends the reading and closes what is behind."""
        self._end()
        self._behind.close()

    def _end(self) -> None:
        if self._prefetcher:
            self._prefetcher.close()

    def _strip(self, row: int) -> int:
        return (row - self._offset) // self._strip_rows

    def _is_read(self, strip: int, first: int, rows: int) -> bool:
        """Counts rows of a strip as read; whether none is left."""
        begin = strip * self._strip_rows + self._offset
        here = min(begin + self._strip_rows, first + rows) - max(begin, first)
        with self._lock:
            left = self._unread.get(strip, self._strip_rows) - here
            self._unread[strip] = left
            if left <= 0:
                del self._unread[strip]
        return left <= 0
