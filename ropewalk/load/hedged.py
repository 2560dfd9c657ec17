"""Asks a second time when an answer is overdue; the first answer wins.

One request in a hundred takes many times the median, and a batch that needs a hundred answers waits for it. A second
request after a few times the median costs a few per cent of the traffic and cuts that tail (Dean and Barroso, The Tail
at Scale, 2013).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from ropewalk.store.items import Fetch, Item

Data = bytes | memoryview

_FEWEST = 8
"""Answers that a median needs."""


class Patience:
    """How long to wait before asking again: `times` the median of the last requests, for at most a share of them."""

    def __init__(self, *, times: float = 4.0, most_share: float = 0.1) -> None:
        self._times, self._most_share = times, most_share
        self._last: deque[tuple[int, float]] = deque(maxlen=64)
        self._requests = self._second = 0

    def answered(self, size: int, seconds: float) -> None:
        """A request of `size` bytes took `seconds`."""
        self._last.append((size, seconds))
        self._requests += 1

    def limit_s(self, size: int) -> float | None:
        """How long an answer of `size` bytes may take; None when too little is known or too much was asked twice.

        A longer request may take longer in proportion; a shorter one gets no less: latency does not shrink.
        """
        if len(self._last) < _FEWEST or self._second > self._most_share * self._requests:
            return None
        return self._times * statistics.median(s * max(1.0, size / max(1, other)) for other, s in self._last)

    def asked_again(self) -> None:
        """A second request went out."""
        self._second += 1


@dataclass(slots=True)
class HedgeStats:
    """What asking twice has done."""

    requests: int = 0
    hedges: int = 0
    """Requests asked a second time."""
    won: int = 0
    """Of these, answered first by the second request."""


class Hedged:
    """A `Fetch` around `behind` that hedges. `most_requests` bounds what is under way, second requests with it."""

    def __init__(
        self,
        behind: Fetch,
        *,
        patience: Patience | None = None,
        most_requests: int = 128,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._behind = behind
        self._patience = patience or Patience()
        self._clock = clock
        self._lock = threading.Lock()
        self._stats = HedgeStats()
        self._pool = ThreadPoolExecutor(most_requests, thread_name_prefix="hedged")

    def fetch(self, items: Sequence[Item]) -> list[Data]:
        """The bytes of each item, by whichever request answers first; an error when all that were made fail."""
        size = sum(map(len, items))
        with self._lock:
            self._stats.requests += 1
            limit_s = self._patience.limit_s(size)
        first = self._pool.submit(self._ask, items, size)
        if wait([first], timeout=limit_s).done:
            return first.result()
        with self._lock:
            self._patience.asked_again()
            self._stats.hedges += 1
        second = self._pool.submit(self._ask, items, size)
        winner = _first_good(first, second)
        if winner is second:
            with self._lock:
                self._stats.won += 1
        return winner.result()

    def stats(self) -> HedgeStats:
        """A copy of the counts."""
        with self._lock:
            return HedgeStats(self._stats.requests, self._stats.hedges, self._stats.won)

    def close(self) -> None:
        """Closes what is behind; a request that lost is not waited for."""
        # Requests that have not begun are still made: who waits for one that is cancelled is not woken by Python.
        self._pool.shutdown(wait=False)
        self._behind.close()

    def _ask(self, items: Sequence[Item], size: int) -> list[Data]:
        began = self._clock()
        data = self._behind.fetch(items)
        with self._lock:
            self._patience.answered(size, self._clock() - began)
        return data


def _first_good(first: Future[list[Data]], second: Future[list[Data]]) -> Future[list[Data]]:
    """The one that has an answer first, or the first one when both failed."""
    done, left = wait([first, second], return_when=FIRST_COMPLETED)
    good = [future for future in (first, second) if future in done and future.exception() is None]
    if good:
        return good[0]
    other = left.pop() if left else first
    return other if other.exception() is None else first
