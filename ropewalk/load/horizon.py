"""The part of the future that is being read: what is wanted, under way and at hand. Bookkeeping only: no thread, no
clock, no I/O.

Batches are planned one after the other while their items, each counted once, fit the bytes allowed. What is planned may
be read, so that the bound on what is planned bounds all that waits, is under way or is held. An item that several
planned batches share is read once and kept until the last of them is taken.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ropewalk.store.items import Item

MOST_BATCHES = 4096
"""Batches that are planned at most."""
_AT_ONCE = 64
"""Batches that one call plans at most, at some 100 us each."""

Got = TypeVar("Got")
"""What is kept of an item that has arrived."""


class Horizon(Generic[Got]):
    """The batches from `first` on whose items are known; `needs` gives those of any batch."""

    def __init__(self, needs: Callable[[int], Sequence[Item]], *, first: int = 0) -> None:
        self._needs = needs
        self._next = first
        self._next_items: tuple[Item, ...] | None = None
        self._end: Exception | None = None
        self._batches: dict[int, tuple[Item, ...]] = {}
        self._users: dict[Item, int] = {}
        # In the order of deadlines: a batch is planned after those before it.
        self._waiting: dict[Item, None] = {}
        self._beside: dict[str, list[Item]] = {}
        self._under_way: set[Item] = set()
        self._held: dict[Item, Got] = {}
        self._failed: dict[Item, Exception] = {}
        self._planned_bytes = self._stray_bytes = 0
        self._wanted_for: dict[Item, int] = {}

    @property
    def bytes(self) -> int:
        """Bytes wanted, under way and held, with those still under way that a seek has made useless."""
        return self._planned_bytes + self._stray_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes at hand."""
        return sum(map(len, self._held))

    @property
    def waiting(self) -> bool:
        """Whether there is something to request."""
        return bool(self._waiting)

    @property
    def batches(self) -> int:
        """Batches planned and not taken."""
        return len(self._batches)

    @property
    def next(self) -> int:
        """The first batch that is not planned."""
        return self._next

    def plan(self, most_bytes: int, *, through: int | None = None) -> None:
        """Plans further batches as far as `most_bytes` reach; one batch, and those to `through`, in any case.

        A corpus smaller than that is never too much, however often it is read: batches are bounded too, and those that
        one call plans, as others wait for it.
        """
        last = min(self._next + _AT_ONCE, self._next - len(self._batches) + MOST_BATCHES)
        while (items := self._items_of_next()) is not None:
            fresh = [item for item in items if item not in self._users]
            size = sum(map(len, fresh))
            needed = not self._batches or (through is not None and self._next <= through)
            if not needed and (self.bytes + size > most_bytes or self._next >= last):
                return
            self._batches[self._next] = items
            self._next, self._next_items = self._next + 1, None
            self._planned_bytes += size
            for item in items:
                self._users[item] = self._users.get(item, 0) + 1
            for item in fresh:
                self._wanted_for[item] = self._next - 1
                self._want(item)

    def request(self, *, most_bytes: int, gap_bytes: int) -> list[Item]:
        """The item needed first, with waiting neighbours of its file, in the order of the file; then under way.

        Neighbours are at most `gap_bytes` apart and span at most `most_bytes`. Empty when nothing waits.
        """
        first = next(iter(self._waiting), None)
        if first is None:
            return []
        beside = self._beside[first.file]
        low = bisect_left(beside, _place(first), key=_place)
        high = low + 1

        def joins(left: int, right: int, *, inner: int) -> bool:
            gap = beside[inner].start - beside[inner - 1].stop
            return gap <= gap_bytes and beside[right].stop - beside[left].start <= most_bytes

        # Forwards before backwards: what follows is more likely to be needed next.
        while high < len(beside) and joins(low, high, inner=high):
            high += 1
        while low and joins(low - 1, high - 1, inner=low):
            low -= 1
        items = beside[low:high]
        for item in items:
            self._unwant(item)
        self._under_way.update(items)
        return items

    def wanted_for(self, item: Item) -> int:
        """The batch for which an item that waits, is under way or held was last requested."""
        return self._wanted_for[item]

    def arrived(self, item: Item, got: Got | Exception) -> None:
        """Takes in what came for an item that was under way, or why nothing could be had."""
        self._under_way.discard(item)
        if item not in self._users:
            self._stray_bytes -= len(item)
            del self._wanted_for[item]
        elif isinstance(got, Exception):
            self._failed[item] = got
        else:
            self._held[item] = got

    def held(self, item: Item) -> Got | None:
        """What came for an item that is at hand."""
        return self._held.get(item)

    def is_planned(self, batch: int) -> bool:
        """Whether the items of the batch are wanted, under way or held."""
        return batch in self._batches

    def passed(self, batch: int) -> bool:
        """Whether the batch was released, or left behind by a seek."""
        return batch < self._next and batch not in self._batches

    def ready(self, batch: int) -> bool:
        """Whether `check` returns or raises at once."""
        if batch not in self._batches:
            return self._end is not None and batch >= self._next
        return all(item in self._held or item in self._failed for item in self._batches[batch])

    def check(self, batch: int) -> dict[Item, Got]:
        """The items of a batch that is ready.

        Raises why one could not be had, and then wants it again; or why the future is not known as far as that.
        """
        if batch not in self._batches:
            assert self._end is not None, f"batch {batch} is not planned"
            raise self._end
        items = self._batches[batch]
        failures = {item: self._failed.pop(item) for item in items if item in self._failed}
        if failures:
            for item in failures:
                self._want(item)
            self._reorder()
            raise next(iter(failures.values()))
        return {item: self._held[item] for item in items}

    def release(self, batch: int) -> None:
        """Lets go of what a batch needed and no other planned batch needs."""
        self._release(self._batches.pop(batch))

    def release_before(self, batch: int) -> None:
        """Lets go of all planned batches before `batch`."""
        for passed in [number for number in self._batches if number < batch]:
            self.release(passed)

    def seek(self, batch: int, *, most_bytes: int) -> None:
        """Plans anew from `batch` on; what is held or under way and needed again stays."""
        left, self._batches = self._batches, {}
        self._next, self._next_items, self._end = batch, None, None
        # New claims come before the old ones end, so that what both want is neither dropped nor read again.
        self.plan(most_bytes + self._planned_bytes)
        for items in left.values():
            self._release(items)
        while len(self._batches) > 1 and self.bytes > most_bytes:
            self._next, self._next_items, self._end = self._next - 1, None, None
            self._release(self._batches.pop(self._next))
        self._reorder()

    def _items_of_next(self) -> tuple[Item, ...] | None:
        """What the first unplanned batch needs, in the order of the files; None when that is not known."""
        if self._next_items is None and self._end is None:
            try:
                needed = set(self._needs(self._next))
                self._next_items = tuple(sorted(needed, key=lambda item: (item.file, _place(item))))
            except Exception as error:
                # The order ends here, or cannot be computed: told to whoever wants this batch.
                self._end = error
        return self._next_items

    def _release(self, items: Sequence[Item]) -> None:
        for item in items:
            self._users[item] -= 1
            if self._users[item]:
                continue
            del self._users[item]
            self._planned_bytes -= len(item)
            self._held.pop(item, None)
            self._failed.pop(item, None)
            if item in self._waiting:
                self._unwant(item)
            if item in self._under_way:
                self._stray_bytes += len(item)
            else:
                del self._wanted_for[item]

    def _want(self, item: Item) -> None:
        if item in self._under_way:
            self._stray_bytes -= len(item)
        else:
            self._waiting[item] = None
            insort(self._beside.setdefault(item.file, []), item, key=_place)

    def _unwant(self, item: Item) -> None:
        del self._waiting[item]
        beside = self._beside[item.file]
        beside.pop(bisect_left(beside, _place(item), key=_place))
        if not beside:
            del self._beside[item.file]

    def _reorder(self) -> None:
        """Puts what waits into the order of deadlines again."""
        wanted = (item for items in self._batches.values() for item in items)
        self._waiting = {item: None for item in wanted if item in self._waiting}


def _place(item: Item) -> tuple[int, int, str, int]:
    return item.start, item.stop, item.name, item.checksum or 0
