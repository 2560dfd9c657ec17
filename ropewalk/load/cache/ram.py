"""Host memory as a tier: items held whole, within a budget counted to the byte.

`fetch` is safe from any number of threads; several that want the same item cause one fetch of it. A hit costs about
2 us, most of it the item's key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ropewalk.store.items import Fetch, Item

from .flights import Data, Flights
from .policies import Keep, Policy
from .stats import Counts, Stats


class Ram:
    """Items in this process's memory, in front of `behind`."""

    def __init__(
        self,
        behind: Fetch,
        *,
        budget_bytes: int,
        policy: Policy | None = None,
        pin: bool = False,
        elsewhere: Callable[[Item], bool] | None = None,
    ) -> None:
        """`pin` takes the whole budget at once as page-locked memory, from which a GPU copies directly.

        Pinned memory is handed out as views into it, so only a policy that never drops an item may use it. What
        `elsewhere` says is held well enough by another tier is not held here.
        """
        self._behind = behind
        self._policy = Keep() if policy is None else policy
        assert not pin or isinstance(self._policy, Keep), "views into pinned memory outlive a drop"
        self._arena = _Arena(budget_bytes) if pin else None
        self._budget = budget_bytes
        self._elsewhere = elsewhere
        self._lock = threading.Lock()
        self._held: dict[int, tuple[Item, Data]] = {}
        self._used = 0
        self._stats = Stats()
        self._flights = Flights(self._stats)

    @property
    def used_bytes(self) -> int:
        """Bytes of the items held."""
        return self._used

    def __len__(self) -> int:
        return len(self._held)

    def fetch(self, items: Sequence[Item]) -> list[Data]:
        """The items' bytes; those not held come from behind in one call."""
        start = time.perf_counter()
        found = [self._find(item.key, item) for item in items]
        data = [value for value in found if value is not None]
        if len(data) < len(items):
            return self._flights.fetch(items, held=self._find, behind=self._fetch_behind)
        # The usual case once the tier is full of what is asked for; the way through the flights takes twice as long.
        with self._stats as counts:
            counts.hits += len(data)
            counts.hit_bytes += sum(map(len, data))
            counts.hit_seconds += time.perf_counter() - start
        return data

    def revalue(self, refresh: Callable[[], None]) -> None:
        """Runs a policy's own refresh while no item comes or goes."""
        with self._lock:
            refresh()

    def counts(self) -> Counts:
        """What happened so far."""
        return self._stats.counts()

    def close(self) -> None:
        """Lets go of the memory and closes what is behind."""
        with self._lock:
            self._held.clear()
            self._used = 0
        self._behind.close()

    def _find(self, key: int, item: Item) -> Data | None:
        with self._lock:
            kept, data = self._held.get(key, (None, b""))
            # Two ranges may share a key of 64 bits, and a file may have been written anew: neither is a hit.
            if kept is None or (kept.start, kept.stop, kept.file) != (item.start, item.stop, item.file):
                return None
            if kept.checksum != item.checksum:
                return None
            self._policy.used(key)
            return data

    def _fetch_behind(self, missing: list[tuple[int, Item]]) -> list[Data]:
        fetched = self._behind.fetch([item for _, item in missing])
        return [self._keep(key, item, data) for (key, item), data in zip(missing, fetched, strict=True)]

    def _keep(self, key: int, item: Item, data: Data) -> Data:
        """Holds `data` where the policy says so; gives what the caller is to read."""
        size = len(data)
        if self._elsewhere is not None and self._elsewhere(item):
            return data
        with self._lock:
            if key in self._held:
                return data
            victims = self._policy.victims(key, size=size, free=self._budget - self._used)
            if victims is None:
                return data
            for victim in victims:
                self._used -= len(self._held.pop(victim)[1])
                self._policy.dropped(victim)
            # A view may be a small part of a large joined read: kept as it is, it would hold all of that.
            data = self._arena.copy(data) if self._arena else bytes(data)
            self._held[key] = (item, data)
            self._used += size
            self._policy.kept(key, size=size)
        with self._stats as counts:
            counts.kept += 1
            counts.dropped += len(victims)
        return data


class _Arena:
    """One page-locked block, given out from its beginning; nothing is taken back before the end."""

    def __init__(self, size: int) -> None:
        import torch  # only a process that trains on a GPU pins memory

        self._block = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        block: Any = self._block.numpy()
        self._view = memoryview(block)
        self._used = 0

    def copy(self, data: Data) -> memoryview:
        stop = self._used + len(data)
        place = self._view[self._used : stop]
        place[:] = data
        self._used = stop
        return place.toreadonly()
