"""What a tier keeps: small objects that answer one question, what must go so that this may stay.

A policy knows sizes and uses, never bytes. The tier calls it under its own lock.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, Protocol

PolicyName = Literal["keep", "lru", "once"]


class Policy(Protocol):
    """Decides which items a tier holds."""

    def victims(self, key: int, *, size: int, free: int) -> list[int] | None:
        """The items to drop so that this one fits, [] when it fits already, None when it is not to be kept.

        A question only: the tier may ask and then do nothing.
        """
        ...

    def kept(self, key: int, *, size: int) -> None:
        """The item is held now."""
        ...

    def dropped(self, key: int) -> None:
        """The item is held no more, for whatever reason."""
        ...

    def used(self, key: int) -> None:
        """A held item was asked for."""
        ...


class Keep:
    """Fill once, never evict (MinIO of CoorDL, VLDB 2021).

    When every epoch reads every item once in a new random order, all held items are equally likely to be next, so
    swapping gains nothing: the hits of an epoch are the share that is held, which is also Belady's bound (see
    `simulate`). LRU drops an item on average just before it is read again: 15 % hits at half the data, not 50 %.
    """

    def victims(self, key: int, *, size: int, free: int) -> list[int] | None:
        return [] if size <= free else None

    def kept(self, key: int, *, size: int) -> None: ...

    def dropped(self, key: int) -> None: ...

    def used(self, key: int) -> None: ...


class Once:
    """Stream: nothing is held, for data that is read once."""

    def victims(self, key: int, *, size: int, free: int) -> list[int] | None:
        return None

    def kept(self, key: int, *, size: int) -> None: ...

    def dropped(self, key: int) -> None: ...

    def used(self, key: int) -> None: ...


class Lru:
    """Drops what was not asked for the longest: the page cache's habit, right when recent items come again soon."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def victims(self, key: int, *, size: int, free: int) -> list[int] | None:
        victims: list[int] = []
        for old, old_size in self._sizes.items():
            if size <= free:
                break
            victims.append(old)
            free += old_size
        return victims if size <= free else None

    def kept(self, key: int, *, size: int) -> None:
        self._sizes[key] = size
        self._sizes.move_to_end(key)

    def dropped(self, key: int) -> None:
        self._sizes.pop(key, None)

    def used(self, key: int) -> None:
        if key in self._sizes:
            self._sizes.move_to_end(key)


class MostImportant:
    """Keeps the items of highest value (the H-region of iCache, HPCA 2023): a newcomer replaces only lesser ones.

    `value` may change over time; call `refresh` when it did.
    """

    def __init__(self, value: Callable[[int], float]) -> None:
        self._value = value
        self._sizes: dict[int, int] = {}
        self._heap: list[tuple[float, int]] = []

    def victims(self, key: int, *, size: int, free: int) -> list[int] | None:
        if size <= free:
            return []
        value = self._value(key)
        victims: list[int] = []
        popped: list[tuple[float, int]] = []
        while self._heap and free < size and self._heap[0][0] < value:
            entry = heapq.heappop(self._heap)
            # Entries of items that went, or were valued anew, stay behind in the heap; they are passed over here.
            if entry[1] in self._sizes:
                popped.append(entry)
                victims.append(entry[1])
                free += self._sizes[entry[1]]
        for entry in popped:
            heapq.heappush(self._heap, entry)
        return victims if size <= free else None

    def kept(self, key: int, *, size: int) -> None:
        self._sizes[key] = size
        heapq.heappush(self._heap, (self._value(key), key))

    def dropped(self, key: int) -> None:
        self._sizes.pop(key, None)

    def used(self, key: int) -> None: ...

    def refresh(self) -> None:
        """Takes the values of all held items anew."""
        self._heap = [(self._value(key), key) for key in self._sizes]
        heapq.heapify(self._heap)


def make_policy(name: PolicyName) -> Policy:
    """The policy that a recipe names."""
    choices: dict[PolicyName, Callable[[], Policy]] = {"keep": Keep, "lru": Lru, "once": Once}
    return choices[name]()
