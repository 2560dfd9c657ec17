"""Hits of a cache that holds `capacity` items, for a sequence of accesses known in advance.

Belady's rule drops the item whose next use is farthest away and leaves out a newcomer that would itself be dropped: no
policy has more hits (Belady 1966, with bypass as in Sleator and Tarjan). It needs the future; here it is the bound
against which the others are measured.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

Rule = Literal["keep", "lru", "belady", "once"]
Accesses = npt.NDArray[np.int64]
Hits = npt.NDArray[np.bool_]


def hits(accesses: Accesses, *, capacity: int, rule: Rule) -> Hits:
    """Whether each access finds its item, from an empty cache on; about a million accesses a second."""
    rules: dict[Rule, Callable[[Accesses, int], Hits]] = {
        "keep": _keep,
        "lru": _lru,
        "belady": _belady,
        "once": lambda accesses, _: np.zeros(len(accesses), np.bool_),
    }
    return rules[rule](accesses, capacity)


def epochs_in_random_order(items: int, *, epochs: int, seed: int = 0) -> Accesses:
    """What training reads: every item once an epoch, each epoch in another order."""
    random = np.random.default_rng(seed)
    return np.concatenate([random.permutation(items) for _ in range(epochs)]).astype(np.int64)


def hit_rate(share: float, *, rule: Rule, items: int = 2000, epochs: int = 5, seed: int = 0) -> float:
    """Hits after the first epoch of a cache that holds `share` of the items: for forecasts, within about 1 %."""
    accesses = epochs_in_random_order(items, epochs=epochs, seed=seed)
    return float(hits(accesses, capacity=round(items * min(share, 1.0)), rule=rule)[items:].mean())


def _keep(accesses: Accesses, capacity: int) -> Hits:
    found = np.zeros(len(accesses), np.bool_)
    held: set[int] = set()
    for place, item in enumerate(accesses.tolist()):
        if item in held:
            found[place] = True
        elif len(held) < capacity:
            held.add(item)
    return found


def _lru(accesses: Accesses, capacity: int) -> Hits:
    found = np.zeros(len(accesses), np.bool_)
    held: OrderedDict[int, None] = OrderedDict()
    for place, item in enumerate(accesses.tolist()):
        if item in held:
            found[place] = True
            held.move_to_end(item)
        elif capacity:
            if len(held) == capacity:
                held.popitem(last=False)
            held[item] = None
    return found


def _belady(accesses: Accesses, capacity: int) -> Hits:
    found = np.zeros(len(accesses), np.bool_)
    following = _next_uses(accesses)
    held: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    for place, (item, again) in enumerate(zip(accesses.tolist(), following, strict=True)):
        found[place] = item in held
        if not found[place] and len(held) == capacity:
            # Entries of earlier uses stay in the heap; only the one that `held` confirms counts.
            while farthest and held.get(farthest[0][1]) != -farthest[0][0]:
                heapq.heappop(farthest)
            if not farthest or -farthest[0][0] <= again:
                continue
            del held[heapq.heappop(farthest)[1]]
        held[item] = again
        heapq.heappush(farthest, (-again, item))
    return found


def _next_uses(accesses: Accesses) -> list[int]:
    """The place where each access's item is used next; past the end for the last use."""
    after: dict[int, int] = {}
    following = [len(accesses)] * len(accesses)
    for place in range(len(accesses) - 1, -1, -1):
        item = int(accesses[place])
        following[place] = after.get(item, len(accesses))
        after[item] = place
    return following
