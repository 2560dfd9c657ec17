"""One `Fetch` over several stores: files spread over them (stripes), the same files on several (mirrors), or both.

A request goes to the store that is expected to answer first. So stores share the work by the speed they show, a slow
one is left with the occasional probe, one that fails is left alone for a while, and what is asked for a second time
while it is under way (a hedge) goes to another store where there is one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ropewalk.base.errors import DataError, StorageError
from ropewalk.store.items import Item

from .endpoints import Endpoint, Service, soonest

Data = bytes | memoryview

_PARTS = 16
"""Stores that one call reads from at the same time, besides the caller's own thread."""


class Stripes:
    """A `Fetch` over `endpoints`. An item is read from any that is known by the longest base which begins its file.

    `open_store` makes the endpoint of a file that none of them holds.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint] = (),
        *,
        open_store: Callable[[str], Endpoint] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._endpoints = list(endpoints)
        self._open_store = open_store
        self._clock = clock
        self._freed = threading.Condition()
        self._holding: dict[str, tuple[Endpoint, ...]] = {}
        self._serving: dict[Item, list[Endpoint]] = {}
        self._pool = ThreadPoolExecutor(_PARTS, thread_name_prefix="stripes")

    def fetch(self, items: Sequence[Item]) -> list[Data]:
        """The bytes of each item, from the stores that hold them, at the same time."""
        parts: dict[tuple[Endpoint, ...], list[int]] = {}
        for number, item in enumerate(items):
            parts.setdefault(self._holders(item.file), []).append(number)
        asked = [([items[number] for number in numbers], holders) for holders, numbers in parts.items()]
        # The caller's thread reads the first part itself: with one store there is no other thread.
        others = [self._pool.submit(self._fetch_from, *part) for part in asked[1:]]
        answers = [self._fetch_from(*part) for part in asked[:1]] + [other.result() for other in others]
        found: dict[int, Data] = {}
        for numbers, answer in zip(parts.values(), answers, strict=True):
            found.update(zip(numbers, answer, strict=True))
        return [found[number] for number in range(len(items))]

    def limit(self) -> int:
        """Requests that all stores together may have in flight now."""
        with self._freed:
            return max(1, sum(endpoint.in_flight.limit for endpoint in self._endpoints))

    def allow(self, requests: int) -> None:
        """Sets how many requests each store may have in flight."""
        with self._freed:
            for endpoint in self._endpoints:
                endpoint.in_flight.limit = requests
            self._freed.notify_all()

    def services(self) -> list[Service]:
        """How each store has served."""
        with self._freed:
            return [endpoint.service() for endpoint in self._endpoints]

    def close(self) -> None:
        """Closes the stores."""
        self._pool.shutdown()
        for endpoint in self._endpoints:
            endpoint.fetch.close()

    def _holders(self, file: str) -> tuple[Endpoint, ...]:
        """The endpoints that hold `file`."""
        with self._freed:
            if file not in self._holding:
                known = [endpoint for endpoint in self._endpoints if file.startswith(endpoint.known_as)]
                if not known:
                    known = [self._opened(file)]
                longest = max(len(endpoint.known_as) for endpoint in known)
                self._holding[file] = tuple(e for e in known if len(e.known_as) == longest)
            return self._holding[file]

    def _opened(self, file: str) -> Endpoint:
        if self._open_store is None:
            known = ", ".join(dict.fromkeys(endpoint.known_as for endpoint in self._endpoints))
            raise DataError(f"{file}: none of the stores holds it; they hold what is below {known}")
        endpoint = self._open_store(file)
        self._endpoints.append(endpoint)
        return endpoint

    def _fetch_from(self, items: list[Item], holders: Sequence[Endpoint]) -> list[Data]:
        """The items from the first of `holders` that gives them."""
        failures: dict[str, Exception] = {}
        left = list(holders)
        while left:
            endpoint, began = self._admitted(items, left)
            left.remove(endpoint)
            try:
                answer = endpoint.fetch.fetch([_as_held(item, endpoint) for item in items])
            except (StorageError, OSError) as error:
                with self._ending(items, endpoint) as now:
                    endpoint.failed(now)
                failures[endpoint.base] = error
            except DataError as error:
                with self._ending(items, endpoint) as now:
                    endpoint.refused(now)
                failures[endpoint.base] = error
            except BaseException:
                with self._ending(items, endpoint) as now:
                    endpoint.refused(now)
                raise
            else:
                with self._ending(items, endpoint) as now:
                    endpoint.ended(now, sum(map(len, items)), seconds=now - began)
                return answer
        raise _no_store(items[0], failures)

    def _admitted(self, items: list[Item], holders: Sequence[Endpoint]) -> tuple[Endpoint, float]:
        """The endpoint to ask, and since when it is being asked; waits until one may be."""
        size = sum(map(len, items))
        with self._freed:
            while True:
                now = self._clock()
                serving = self._serving.get(items[0], [])
                others = [endpoint for endpoint in holders if endpoint not in serving]
                endpoint = soonest(others or holders, size, now)
                if endpoint is not None:
                    endpoint.began(now)
                    self._serving.setdefault(items[0], []).append(endpoint)
                    return endpoint, now
                self._freed.wait()

    @contextlib.contextmanager
    def _ending(self, items: list[Item], endpoint: Endpoint) -> Iterator[float]:
        """Under the lock: gives the time at which the request ended, then lets others in."""
        with self._freed:
            yield self._clock()
            serving = self._serving[items[0]]
            serving.remove(endpoint)
            if not serving:
                del self._serving[items[0]]
            self._freed.notify_all()


def _as_held(item: Item, endpoint: Endpoint) -> Item:
    """The item under the name that it has on `endpoint`."""
    if endpoint.base == endpoint.known_as:
        return item
    return dataclasses.replace(item, file=endpoint.base + item.file.removeprefix(endpoint.known_as))


def _no_store(item: Item, failures: dict[str, Exception]) -> Exception:
    if len(failures) == 1:
        return next(iter(failures.values()))
    told = "; ".join(f"{base}: {error}" for base, error in failures.items())
    damaged = all(isinstance(error, DataError) for error in failures.values())
    return (DataError if damaged else StorageError)(f"none of {len(failures)} stores gave {item.file}: {told}")
