"""Clairvoyant reading: what coming batches need is known, so it is read before they ask, the earliest needed first.

The order is a function, so the items of any future batch are (NoPFS, Dryden et al. 2021). Threads read them in the
order of their deadlines, neighbours in one request, within a bound in bytes. If the store delivers on average what the
steps read, they wait only for the first batches: the bytes at hand carry them through slow moments.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropewalk.store.items import Fetch, Item

from .endpoints import Rate
from .expected import Expected, Pace, budget, is_past
from .horizon import MOST_BATCHES, Horizon

Data = bytes | memoryview

REQUEST_BYTES = 2 << 20
"""Neighbours are joined up to this size. Eight such requests in flight carry 800 MB/s at 20 ms each; larger ones hold
up what is needed first behind what is needed late."""
GAP_BYTES = 1 << 16
"""What may lie between neighbours and is read in vain."""

CLOSING_S = 5.0
"""How long closing waits for requests under way; their threads do not keep the process alive."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A batch whose items are at hand."""

    began: float
    """When the first of its items was asked for, by the clock."""
    ended: float
    """When the last of them was there."""
    bytes: int


@dataclass(slots=True)
class PrefetchStats:
    """What a prefetcher has done since it was made."""

    batches: int = 0
    waited: int = 0
    """Batches that were not at hand when asked for."""
    wait_s: float = 0.0
    """Time in which some reader waited for these."""
    requests: int = 0
    items: int = 0
    bytes: int = 0
    failures: int = 0
    """Items given up by the store; each is told by the batch that needs it."""
    direct: int = 0
    """Items that nobody foresaw, read when asked for."""


class Prefetcher:
    """A `Fetch` that has read ahead: `needs` gives the items of any future batch.

    A reader calls `wait(t)`, then `fetch` for what it needs of batch t, which is at hand, then `release(t)`; `take(t)`
    is all three. Readers may be several threads that ask for batches near to each other. All that is wanted, under way
    and held stays below `budget_bytes`, unless the batches that are being read take more by themselves; before what is
    `expect`ed the bound may rise to `most_bytes` (default twice the budget). `requests` says how many requests are in
    flight at once, where it is a function now and always anew. Reading begins with the first `wait`, `take` or `seek`.
    """

    def __init__(
        self,
        fetch: Fetch,
        needs: Callable[[int], Sequence[Item]],
        *,
        budget_bytes: int,
        requests: int | Callable[[], int] = 8,
        most_bytes: int | None = None,
        request_bytes: int = REQUEST_BYTES,
        gap_bytes: int = GAP_BYTES,
        first: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        announce: Callable[[Item, int], None] | None = None,
    ) -> None:
        """`announce` is told of each item, before it is requested, which batch needs it first."""
        self._behind, self._announce = fetch, announce
        self._usual_bytes, self._most_bytes = budget_bytes, most_bytes
        self._requests = requests
        self._request_bytes, self._gap_bytes = request_bytes, gap_bytes
        self._clock = clock
        self._horizon: Horizon[_Got] = Horizon(needs, first=first)
        self._next = first
        self._waiting: list[int] = []
        self._expected: list[Expected] = []
        self._pace = Pace()
        self._rate = Rate()
        self._last_wait: float | None = None
        self._waited_until = -math.inf
        self._stats = PrefetchStats()
        self._lock = threading.Lock()
        self._work, self._arrived = threading.Condition(self._lock), threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._idle = self._in_flight = 0
        self._closed = False

    def wait(self, batch: int) -> Arrival | None:
        """Returns when the items of `batch` are at hand; raises why one of them could not be had.

        None when the batch lies behind or far beyond what is being read: its items then come when they are fetched.
        """
        with self._lock:
            began = self._clock()
            self._waiting.append(batch)
            try:
                at_hand = self._at_hand(batch)
                while not self._at_hand(batch):
                    self._arrived.wait()
            finally:
                self._waiting.remove(batch)
            if self._is_elsewhere(batch):
                return None
            ended = self._clock()
            self._stats.batches += 1
            if not at_hand:
                self._stats.waited += 1
                # Time in which several readers wait counts once.
                self._stats.wait_s += ended - max(began, self._waited_until)
                self._waited_until = ended
            return self._arrival(self._horizon.check(batch), now=ended, at_hand=at_hand)

    def fetch(self, items: Sequence[Item]) -> list[Data]:
        """The bytes of each item: from hand, or from the store when nobody foresaw it."""
        with self._lock:
            held = {item: got.data for item in items if (got := self._horizon.held(item)) is not None}
            unforeseen = [item for item in items if item not in held]
            self._stats.direct += len(unforeseen)
        if unforeseen:
            held.update(zip(unforeseen, self._behind.fetch(unforeseen), strict=True))
        return [held[item] for item in items]

    def release(self, batch: int) -> None:
        """Ends the use of a batch: what no coming batch shares makes room for others."""
        with self._lock:
            if self._horizon.is_planned(batch):
                self._horizon.release(batch)
                self._make_room()

    def take(self, batch: int) -> dict[Item, Data]:
        """The items of `batch`, as soon as they are at hand, and no longer held here."""
        arrival = self.wait(batch)
        assert arrival is not None, f"batch {batch} was released or left behind; seek it first"
        with self._lock:
            data = {item: got.data for item, got in self._horizon.check(batch).items()}
            self._horizon.release(batch)
            self._pass(batch + 1)
            return data

    def advance(self, batch: int) -> None:
        """The steps have come to `batch`: lets go of all before it, read or left out."""
        with self._lock:
            if batch > self._horizon.next:
                self._horizon.seek(batch, most_bytes=self._budget())
            self._horizon.release_before(batch)
            self._pass(batch)

    def seek(self, batch: int) -> None:
        """Goes on at `batch`: what is at hand or under way and needed there stays, the rest is let go."""
        with self._lock:
            self._next, self._last_wait = batch, None
            self._horizon.seek(batch, most_bytes=self._budget())
            self._employ()
            self._arrived.notify_all()

    def expect(self, coming: Expected) -> None:
        """Makes known what the run is about to do, so that reads move ahead of it."""
        with self._lock:
            self._expected.append(coming)
            self._work.notify()

    def tune(self, *, budget_bytes: int | None = None, requests: int | None = None) -> None:
        """Changes how far ahead and with how many requests at once it reads, from now on."""
        with self._lock:
            self._usual_bytes = self._usual_bytes if budget_bytes is None else budget_bytes
            self._requests = self._requests if requests is None else requests
            if self._threads:
                self._horizon.plan(self._budget())
                self._employ()

    def stats(self) -> PrefetchStats:
        """A copy of the counts."""
        with self._lock:
            return dataclasses.replace(self._stats)

    def describe(self) -> dict[str, float]:
        """What is in force and at hand: bytes, batches, requests, rates; seconds of reading, and of waiting for it."""
        with self._lock:
            return {
                "budget_bytes": self._usual_bytes,
                "budget_bytes_now": self._budget(),
                "planned_bytes": self._horizon.bytes,
                "held_bytes": self._horizon.held_bytes,
                "batches_ahead": self._horizon.batches,
                "requests": self._limit(),
                "requests_in_flight": self._in_flight,
                "delivered_bytes_per_s": self._rate.bytes_per_s,
                "read_bytes_per_s": self._pace.eaten_per_s,
                "read_s": self._rate.busy_s,
                "wait_s": self._stats.wait_s,
            }

    def close(self) -> None:
        """Ends the threads, after the requests under way unless these take long; the store stays open."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._arrived.notify_all()
        until = time.monotonic() + CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _employ(self) -> None:
        """Wakes a thread, or makes one, when there is something to request; that one employs the next."""
        if not self._horizon.waiting or self._closed:
            return
        if self._idle:
            self._work.notify()
        elif len(self._threads) < self._limit():
            thread = threading.Thread(target=self._read, name=f"prefetch-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _read(self) -> None:
        """The life of a thread: the most urgent request, again and again."""
        while True:
            with self._lock:
                while not (items := self._next_request()) and not self._closed:
                    self._idle += 1
                    self._work.wait()
                    self._idle -= 1
                if self._closed:
                    return
                if self._announce:
                    for item in items:
                        self._announce(item, self._horizon.wanted_for(item))
                self._in_flight += 1
                self._employ()
                began = self._clock()
                self._rate.began(began)
            answers = self._ask(items)
            with self._lock:
                self._in_flight -= 1
                self._arrive(answers, began=began, ended=self._clock())
                self._arrived.notify_all()

    def _next_request(self) -> list[Item]:
        if self._in_flight >= self._limit():
            return []
        self._horizon.plan(self._budget())
        return self._horizon.request(most_bytes=self._request_bytes, gap_bytes=self._gap_bytes)

    def _ask(self, items: list[Item]) -> dict[Item, Data | Exception]:
        """The bytes of each item, or why they cannot be had: one bad item does not spoil its neighbours."""
        try:
            return dict(zip(items, self._behind.fetch(items), strict=True))
        except Exception as error:
            if len(items) == 1:
                return {items[0]: error}
        return {item: answer for item in items for answer in self._ask([item]).values()}

    def _arrive(self, answers: dict[Item, Data | Exception], *, began: float, ended: float) -> None:
        size = 0
        for item, answer in answers.items():
            if isinstance(answer, Exception):
                self._stats.failures += 1
                self._horizon.arrived(item, answer)
            else:
                size += len(item)
                self._stats.items += 1
                self._horizon.arrived(item, _Got(answer, began, ended))
        self._rate.ended(ended, size)
        self._stats.requests += 1
        self._stats.bytes += size

    def _at_hand(self, batch: int) -> bool:
        """Whether there is nothing to wait for. What the first of all readers needs is planned beyond any bound, else
        readers could wait for each other."""
        if self._closed:
            raise RuntimeError("the prefetcher is closed")
        if self._is_elsewhere(batch):
            return True
        self._horizon.plan(self._budget(), through=min(self._waiting))
        self._employ()
        return self._horizon.ready(batch)

    def _is_elsewhere(self, batch: int) -> bool:
        return self._horizon.passed(batch) or batch > self._horizon.next + MOST_BATCHES

    def _arrival(self, items: dict[Item, _Got], *, now: float, at_hand: bool) -> Arrival:
        """When the items of a batch came; measures what a batch reads and, unless one waited, what a step takes."""
        size = sum(map(len, items))
        step_s = self._pace.compute_s
        if at_hand and self._last_wait is not None:
            step_s = _smoothed(step_s, now - self._last_wait)
        self._last_wait = now
        self._pace = Pace(
            batch_bytes=_smoothed(self._pace.batch_bytes, size),
            compute_s=step_s,
            bytes_per_s=self._rate.bytes_per_s,
        )
        return Arrival(
            began=min((got.began for got in items.values()), default=now),
            ended=max((got.ended for got in items.values()), default=now),
            bytes=size,
        )

    def _pass(self, batch: int) -> None:
        """The steps have come to `batch`."""
        self._next = max(self._next, batch)
        self._expected = [c for c in self._expected if not is_past(c, batch=self._next, pace=self._pace)]
        self._make_room()

    def _make_room(self) -> None:
        self._work.notify()
        # A batch that another reader waits for may be the one that now has room.
        self._arrived.notify_all()

    def _limit(self) -> int:
        return self._requests if isinstance(self._requests, int) else self._requests()

    def _budget(self) -> int:
        most = 2 * self._usual_bytes if self._most_bytes is None else self._most_bytes
        return budget(self._usual_bytes, most_bytes=most, expected=self._expected, batch=self._next, pace=self._pace)


@dataclass(frozen=True, slots=True)
class _Got:
    """An item at hand, and when it was asked for and came."""

    data: Data
    began: float
    ended: float


def _smoothed(mean: float, value: float) -> float:
    """The mean of about the last ten values; the first one as it is."""
    return mean + 0.2 * (value - mean) if mean else value
