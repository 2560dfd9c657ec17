"""One fetch of an item at a time, however many threads ask for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ropewalk.store.items import Item

from .stats import Stats

Data = bytes | memoryview


class Flight:
    """An item on its way: who asks for it meanwhile waits for `landed`."""

    __slots__ = ("data", "landed")

    def __init__(self) -> None:
        self.landed = threading.Event()
        self.data: Data | None = None
        """What came; None when the fetch failed, and then each who waits asks again on its own."""


class Flights:
    """The items that some thread is fetching now.

    A thread first fetches what it took upon itself and then waits for others, so that two that need each other's
    items both end.
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._lock = threading.Lock()
        self._flying: dict[int, Flight] = {}

    def fetch(
        self,
        items: Sequence[Item],
        *,
        held: Callable[[int, Item], Data | None],
        behind: Callable[[list[tuple[int, Item]]], list[Data]],
    ) -> list[Data]:
        """The data of `items`, in order: from `held`, from another thread's flight, or from one call of `behind`.

        `behind` gets pairs of key and item, each item once, and keeps what is to be kept before it returns.
        """
        start = time.perf_counter()
        keys = [item.key for item in items]
        data: dict[int, Data] = {}
        mine: dict[int, tuple[Item, Flight]] = {}
        others: dict[int, tuple[Item, Flight]] = {}
        for key, item in zip(keys, items, strict=True):
            if key in data or key in mine or key in others:
                continue
            found = held(key, item)
            if found is not None:
                data[key] = found
                continue
            with self._lock:
                flight = self._flying.get(key)
                if flight is None:
                    mine[key] = (item, self._flying.setdefault(key, Flight()))
                else:
                    others[key] = (item, flight)
        looked = time.perf_counter() - start
        fetched: dict[int, Data] = {}
        if mine:
            data.update(self._lead(mine, held=held, behind=behind, fetched=fetched))
        failed: list[tuple[int, Item]] = []
        for key, (item, flight) in others.items():
            flight.landed.wait()
            if flight.data is None:
                failed.append((key, item))
            else:
                data[key] = flight.data
        if failed:
            fetched.update(self._timed(failed, behind))
            data.update(fetched)
        asked = [data[key] for key in keys]
        with self._stats as counts:
            counts.hit_seconds += looked
            counts.hits += len(asked) - len(fetched)
            counts.hit_bytes += sum(map(len, asked)) - sum(map(len, fetched.values()))
        return asked

    def _lead(
        self,
        mine: dict[int, tuple[Item, Flight]],
        *,
        held: Callable[[int, Item], Data | None],
        behind: Callable[[list[tuple[int, Item]]], list[Data]],
        fetched: dict[int, Data],
    ) -> dict[int, Data]:
        """Fetches what this thread took upon itself and lands every flight, also when it fails; what came from behind
        is put into `fetched` too."""
        data: dict[int, Data] = {}
        try:
            # Another thread may have landed the item between our look and our entry in the list.
            for key, (item, _) in mine.items():
                found = held(key, item)
                if found is not None:
                    data[key] = found
            missing = [(key, item) for key, (item, _) in mine.items() if key not in data]
            if missing:
                fetched.update(self._timed(missing, behind))
                data.update(fetched)
        finally:
            with self._lock:
                for key in mine:
                    del self._flying[key]
            for key, (_, flight) in mine.items():
                flight.data = data.get(key)
                flight.landed.set()
        return data

    def _timed(
        self, missing: list[tuple[int, Item]], behind: Callable[[list[tuple[int, Item]]], list[Data]]
    ) -> dict[int, Data]:
        start = time.perf_counter()
        fetched = behind(missing)
        with self._stats as counts:
            counts.misses += len(missing)
            counts.miss_bytes += sum(map(len, fetched))
            counts.miss_seconds += time.perf_counter() - start
        return dict(zip([key for key, _ in missing], fetched, strict=True))
