"""Stores as they serve us: how many requests each is given at once, how fast it answers, whether it is up.

Requests in flight are a policy, fixed or climbing: the number rises by a quarter as long as the store then delivers at
least half of what a quarter more promises, falls by a quarter as long as that costs nothing (what is under way cannot
be overtaken by what is needed sooner), and is halved by a failure. Everything here is a function of the times it is
told, so that tests and simulations run without waiting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ropewalk.store.items import Fetch

RequestPolicy = Literal["hill-climb", "fixed"]

_FLOOR_BYTES = 1 << 18
"""A request costs at least what this many bytes cost: 20 ms of latency at 12 MB/s a connection."""
_WORTH_FEWER = 0.97
"""Part of what was delivered that a lower limit has to deliver."""
_REST_ROUNDS = 8
"""Rounds that a limit stays after a higher one delivered no more."""
_SMOOTHING = 0.2
"""Weight of the newest request in a mean: the last ten decide."""


class Rate:
    """Bytes a second of the time in which something was under way; the last `memory_s` such seconds decide."""

    def __init__(self, *, memory_s: float = 10.0) -> None:
        self._memory_s = memory_s
        self._in_flight = 0
        self._since = 0.0
        self._bytes = self._seconds = 0.0
        self.busy_s = 0.0
        """All the time in which something was under way."""

    @property
    def bytes_per_s(self) -> float:
        """0 when nothing has arrived yet."""
        return self._bytes / self._seconds if self._seconds else 0.0

    def began(self, now: float) -> None:
        """A request starts."""
        self._pass(now)
        self._in_flight += 1

    def ended(self, now: float, size: int) -> None:
        """A request ends with `size` bytes, 0 when it failed."""
        self._pass(now)
        self._in_flight -= 1
        self._bytes += size

    def _pass(self, now: float) -> None:
        if self._in_flight and now > self._since:
            spent = now - self._since
            self.busy_s += spent
            kept = math.exp(-spent / self._memory_s)
            self._bytes, self._seconds = self._bytes * kept, self._seconds * kept + spent
        self._since = now


class InFlight:
    """How many requests a store is given at once."""

    def __init__(self, policy: RequestPolicy = "hill-climb", *, requests: int = 8, most: int = 64) -> None:
        self.policy = policy
        self.limit = requests
        self._most = max(most, requests)
        self._round_bytes = self._round_requests = 0
        self._round_began = math.nan
        self._before: tuple[int, float] | None = None
        self._rises = True
        self._rest = 0

    def ended(self, now: float, size: int, *, busy: bool) -> None:
        """A request ended with `size` bytes; `busy`: as many were in flight as allowed, so that it tells something."""
        if self.policy == "fixed" or not busy:
            self._round_began = math.nan
            return
        if math.isnan(self._round_began):
            self._round_began, self._round_bytes, self._round_requests = now, 0, 0
            return
        self._round_bytes += size
        self._round_requests += 1
        # The first answers were asked for under the old limit; and one straggler should not decide.
        if self._round_requests >= 4 * self.limit and now > self._round_began:
            self._judge(self._round_bytes / (now - self._round_began))
            self._round_began = math.nan

    def failed(self) -> None:
        """A request failed: half as many may be in flight."""
        if self.policy == "hill-climb":
            self.limit = max(1, self.limit // 2)
            self._before, self._round_began = None, math.nan

    def _judge(self, bytes_per_s: float) -> None:
        """Keeps a change of the limit or takes it back, by what the last round delivered; then tries the next."""
        if self._before is not None:
            limit, delivered = self._before
            # More requests have to deliver half of what they promise; fewer must not cost anything to speak of.
            least = 1 + (self.limit / limit - 1) / 2 if self._rises else _WORTH_FEWER
            if bytes_per_s < delivered * least:
                self.limit, self._before, self._rest = limit, None, _REST_ROUNDS
                self._rises = not self._rises
                return
        if self._rest:
            self._rest -= 1
            return
        quarter = max(1, self.limit // 4)
        tried = min(self._most, self.limit + quarter) if self._rises else max(1, self.limit - quarter)
        if tried == self.limit:
            self._rises = not self._rises
        self._before = (self.limit, bytes_per_s) if tried != self.limit else None
        self.limit = tried


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """How an endpoint has served, for people and for `doctor data`."""

    base: str
    up: bool
    in_flight: int
    limit: int
    policy: RequestPolicy
    requests: int
    failures: int
    bytes: int
    bytes_per_s: float
    request_s: float
    """Time of a request, smoothed."""


class Endpoint:
    """A store and what is known of its service; the caller holds the lock.

    The names of its files begin with `base`. A mirror holds what others know under another base, `known_as`.
    """

    def __init__(
        self,
        base: str,
        fetch: Fetch,
        *,
        known_as: str | None = None,
        in_flight: InFlight | None = None,
        probe_s: float = 5.0,
    ) -> None:
        self.base, self.fetch = base, fetch
        self.known_as = base if known_as is None else known_as
        self.in_flight = in_flight or InFlight()
        self._probe_s = probe_s
        self._under_way = 0
        self._requests = self._failures = self._bytes = 0
        self._rate = Rate()
        self._seconds_per_byte = self._request_s = self._neighbours = 0.0
        self._last_ended = -math.inf
        self._down_until = -math.inf
        self._in_a_row = 0

    def admits(self, now: float) -> bool:
        """Whether a request may start: it is up, or due for a probe, and not at its limit."""
        if self._in_a_row:
            return now >= self.down_until and not self._under_way
        return self._under_way < self.in_flight.limit

    @property
    def down_until(self) -> float:
        """When a store that failed may be asked again; -inf for one that is up."""
        return self._down_until if self._in_a_row else -math.inf

    def expected_s(self, size: int, now: float) -> float:
        """When `size` bytes may be expected from it, from what it took lately and what is under way.

        0 for one of which nothing is known or nothing lately: one request finds out.
        """
        unknown = not self._requests or now - self._last_ended > self._probe_s
        if unknown and not self._under_way:
            return 0.0
        # A store that is limited by its bandwidth shares it among what is under way; one limited by its latency is
        # not slower for one request more than it had lately.
        crowd = max(1.0, (self._under_way + 1) / max(1.0, self._neighbours))
        return self._seconds_per_byte * max(size, _FLOOR_BYTES) * crowd

    def began(self, now: float) -> None:
        """A request starts."""
        self._under_way += 1
        self._rate.began(now)

    def ended(self, now: float, size: int, *, seconds: float) -> None:
        """A request of `size` bytes was answered after `seconds`."""
        self.in_flight.ended(now, size, busy=self._under_way >= self.in_flight.limit)
        first = not self._requests
        self._seconds_per_byte = _smoothed(self._seconds_per_byte, seconds / max(size, _FLOOR_BYTES), first)
        self._request_s = _smoothed(self._request_s, seconds, first)
        self._neighbours = _smoothed(self._neighbours, self._under_way, first)
        self._requests += 1
        self._bytes += size
        self._in_a_row = 0
        self._end(now, size)

    def failed(self, now: float) -> None:
        """A request was given up: the store is left alone for a while that doubles each time, then probed."""
        self.in_flight.failed()
        self._failures += 1
        self._in_a_row += 1
        self._down_until = now + self._probe_s * min(64, 2 ** (self._in_a_row - 1))
        self._end(now, 0)

    def refused(self, now: float) -> None:
        """It answered, but has not what was asked for: no mark against the store."""
        self._end(now, 0)

    def service(self) -> Service:
        """How it has served so far."""
        return Service(
            base=self.base,
            up=not self._in_a_row,
            in_flight=self._under_way,
            limit=self.in_flight.limit,
            policy=self.in_flight.policy,
            requests=self._requests,
            failures=self._failures,
            bytes=self._bytes,
            bytes_per_s=self._rate.bytes_per_s,
            request_s=self._request_s,
        )

    def _end(self, now: float, size: int) -> None:
        self._under_way -= 1
        self._last_ended = now
        self._rate.ended(now, size)


def soonest(endpoints: Sequence[Endpoint], size: int, now: float) -> Endpoint | None:
    """The endpoint that is expected to answer first; None when all that are up have as many requests as they may.

    Where all are down, the one that is to be probed first: an error is told after all have been asked, not before.
    """
    admitting = [endpoint for endpoint in endpoints if endpoint.admits(now)]
    if not admitting and all(endpoint.down_until > now for endpoint in endpoints):
        return min(endpoints, key=lambda endpoint: endpoint.down_until)
    return min(admitting, key=lambda endpoint: endpoint.expected_s(size, now), default=None)


def _smoothed(mean: float, value: float, first: bool) -> float:
    return value if first else mean + _SMOOTHING * (value - mean)
