"""Hits of a cache that holds `capacity` items, for a sequence of accesses known in advance.

Belady's rule drops the item whose next use is farthest away and leaves out a newcomer that would itself be dropped: no
policy has more hits (Belady 1966, with bypass as in Sleator and Tarjan). It needs the future; here it is the bound
against which the others are measured.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Rule = Literal["keep", "lru", "belady", "once", "page-cache"]
Accesses = npt.NDArray[np.int64]
Hits = npt.NDArray[np.bool_]


def hits(accesses: Accesses, *, capacity: int, rule: Rule) -> Hits:
    """Whether each access finds its item, from an empty cache on; about a million accesses a second."""
    rules: dict[Rule, Callable[[Accesses, int], Hits]] = {
        "keep": _keep,
        "lru": _lru,
        "belady": _belady,
        "once": lambda accesses, _: np.zeros(len(accesses), np.bool_),
        "page-cache": page_cache,
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


def lru_hits(share: float) -> float:
    """Hits of LRU that holds `share` of the items, exactly, for many items read once an epoch in random orders.

    Between two uses of an item, at places x and y of two epochs (as shares), 1 - x (1 - y) of the items come. LRU hits
    when it holds more than these: P(x z > a) = 1 - a + a ln a, for uniform x and z and a = 1 - `share`.
    """
    absent = 1.0 - min(max(share, 0.0), 1.0)
    return 1.0 - absent + (absent * math.log(absent) if absent else 0.0)


def inactive_ratio(memory_bytes: float) -> int:
    """How many times as large as the inactive list Linux lets the active one grow, for so much memory."""
    gigabytes = int(memory_bytes) >> 30
    return max(1, math.isqrt(10 * gigabytes))


def page_cache(accesses: Accesses, capacity: int, ratio: int = 1) -> Hits:
    """Hits of Linux's page cache in a model of its two lists (mm/workingset.c): what is read comes to the inactive
    list, and to the active one when it is read again there, or soon after it was dropped from it. Both lists are
    queues; the active one gives way when it is more than `ratio` times as long."""
    found = np.zeros(len(accesses), np.bool_)
    inactive: OrderedDict[int, None] = OrderedDict()
    active: OrderedDict[int, None] = OrderedDict()
    dropped: dict[int, int] = {}
    age = 0
    for place, item in enumerate(accesses.tolist() if capacity else ()):
        found[place] = item in active or item in inactive
        if item in active:
            continue
        if item in inactive or (item in dropped and age - dropped[item] <= len(active)):
            inactive.pop(item, None)
            active[item] = None
            age += 1
        else:
            inactive[item] = None
        while len(inactive) + len(active) > capacity:
            while len(inactive) * ratio < len(active):
                inactive[active.popitem(last=False)[0]] = None
            victim, _ = inactive.popitem(last=False)
            age += 1
            dropped[victim] = age
    return found


@dataclass(frozen=True, slots=True)
class EpochHits:
    """Share of the reads of an epoch that each way of caching answers from memory, once it is full."""

    page_cache: float
    lru: float
    keep: float


def hits_per_epoch(*, memory_bytes: float, data_bytes: float, items: int = 2000) -> EpochHits:
    """What `memory_bytes` are worth for `data_bytes` that are read once an epoch in random orders: LRU and keeping what
    came first by their formulas, the page cache by its model, within about 1 %."""
    share = min(1.0, memory_bytes / data_bytes) if data_bytes else 1.0
    cached = share
    if 0.0 < share < 1.0:
        accesses = epochs_in_random_order(items, epochs=12)
        ratio = inactive_ratio(memory_bytes)
        # The lists need some epochs to find their lengths.
        cached = float(page_cache(accesses, round(items * share), ratio)[6 * items :].mean())
    return EpochHits(page_cache=cached, lru=lru_hits(share), keep=share)


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
