"""Batches made ahead of the step by threads, within a bound in bytes.

Threads make blocks of several batches, so that what Python costs is shared: a batch of 16,384 tokens takes 8 us to
gather, and a task of a thread pool alone costs 20. Which blocks are made when changes nothing in the batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from .batch import Compact
from .config import AHEAD_BATCHES
from .stalls import Times

BLOCK_BYTES = 1 << 20
"""Size up to which batches are made together. A core makes such a block in about half a millisecond."""


@dataclass(frozen=True, slots=True)
class Block:
    """Batches of equal size, one after the other in memory."""

    batches: list[Compact]
    times: Times
    fetched_bytes: int


@dataclass(frozen=True, slots=True)
class Taken:
    """A batch as the ring hands it over."""

    batch: Compact
    times: Times
    """Of the block for its first batch; the others of a block were ready with it."""
    fetched_bytes: int


@dataclass(slots=True)
class _Ordered:
    """A block that is asked for: batches of `rows` rows from row `first` on, of which `taken` are gone."""

    first: int
    rows: int
    count: int
    block: Future[Block]
    taken: int = 0

    @property
    def next_row(self) -> int:
        return self.first + self.taken * self.rows


class Ring:
    """The next batches, made by `threads` threads while the step computes.

    `make(first, rows, count)` makes `count` batches of `rows` rows each from row `first` on; `row_bytes` is what a row
    takes here. What is made and not yet taken stays below `prefetch_bytes` and AHEAD_BATCHES, but for the two batches
    that are needed next. Buffers are torch's: page-locked memory comes from its caching allocator, which keeps a buffer
    for reuse and gives it out again only after the event of the last copy from it.
    """

    def __init__(
        self, make: Callable[[int, int, int], Block], *, row_bytes: float, prefetch_bytes: int, threads: int
    ) -> None:
        self._make, self._row_bytes = make, row_bytes
        self.prefetch_bytes, self.threads = prefetch_bytes, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="load")
        self._ordered: deque[_Ordered] = deque()

    def take(self, first: int, rows: int) -> Taken:
        """The batch of `rows` rows from row `first` on, as soon as it is made. What makes it fail is raised here."""
        self._drop_others(first, rows)
        if not self._ordered:
            self._order(first, rows, 1)
        ordered = self._ordered[0]
        if not ordered.taken:
            self._fill()
        try:
            block = ordered.block.result()
        except Exception:
            self.clear()
            if ordered.count == 1:
                raise
            # One of several failed, perhaps a later one that nobody will ask for: this one by itself.
            return self.take(first, rows)
        number, ordered.taken = ordered.taken, ordered.taken + 1
        if ordered.taken == ordered.count:
            self._ordered.popleft()
        if number:
            ready = block.times.prepared
            return Taken(block.batches[number], Times(ready, ready, ready), 0)
        return Taken(block.batches[0], block.times, block.fetched_bytes)

    def tune(self, *, prefetch_bytes: int | None = None, threads: int | None = None) -> None:
        """Changes how much is made ahead and by how many threads, from now on; the batches stay the same."""
        self.prefetch_bytes = self.prefetch_bytes if prefetch_bytes is None else prefetch_bytes
        if threads is not None and threads != self.threads:
            before, self._pool = self._pool, ThreadPoolExecutor(threads, thread_name_prefix="load")
            self.threads = threads
            # What it has been asked for is still made.
            before.shutdown(wait=False)

    def clear(self) -> None:
        """Lets go of everything made ahead."""
        for ordered in self._ordered:
            ordered.block.cancel()
        self._ordered.clear()

    def close(self) -> None:
        """Ends the threads."""
        self.clear()
        self._pool.shutdown(cancel_futures=True)

    def _drop_others(self, first: int, rows: int) -> None:
        """Lets go of batches before row `first`, and of all when those made are not the ones asked for."""
        while self._ordered and (ordered := self._ordered[0]).next_row < first:
            ordered.taken += 1
            if ordered.taken == ordered.count:
                self._ordered.popleft()
        if self._ordered and (self._ordered[0].next_row, self._ordered[0].rows) != (first, rows):
            self.clear()

    def _fill(self) -> None:
        """Orders blocks until the bound is reached. Sizes change seldom, in ramps: those that follow are most likely as
        large as the last."""
        size = self._ordered[-1].rows * self._row_bytes
        held = sum(ordered.count - ordered.taken for ordered in self._ordered) * size
        bound = min(self.prefetch_bytes, AHEAD_BATCHES * size)
        # A thread needs a block to work on, and the step one to take from.
        most = max(1, int(min(BLOCK_BYTES, bound / (self.threads + 1)) // size))
        while len(self._ordered) < 2 or held + most * size <= bound:
            last = self._ordered[-1]
            # Growing blocks: the first step does not wait for batches that others will read.
            count = min(2 * last.count, most)
            self._order(last.first + last.count * last.rows, last.rows, count)
            held += count * size

    def _order(self, first: int, rows: int, count: int) -> None:
        self._ordered.append(_Ordered(first, rows, count, self._pool.submit(self._make, first, rows, count)))
