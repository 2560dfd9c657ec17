"""The importance cache whole: epochs drawn by importance, the high region in memory, the low one in packages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ropewalk.store.items import Fetch, Item

from .flights import Data
from .importance import Draws, Floats, Indices, Mask, ValueOf, draw, make_regions, write_draws
from .packages import PackageCounts, Packages
from .policies import MostImportant
from .ram import Ram


class HighRegion:
    """The most important samples in memory; several jobs of one process may share it."""

    def __init__(self, behind: Fetch, items: Sequence[Item], *, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._value = ValueOf(items)
        self._policy = MostImportant(self._value)
        self.ram = Ram(behind, budget_bytes=budget_bytes, policy=self._policy)

    def value(self, importance: Floats) -> None:
        """Takes the importance of a new epoch (for several jobs: what `combined` gives)."""
        self._value.set(importance)
        self.ram.revalue(self._policy.refresh)


class Sampled:
    """The samples of a data set as one job reads them.

    draws = cache.begin(epoch, importance.values(), count=len(items))
    for batch in ...: data = cache.fetch(draws.given[batch]); loss * draws.weights[batch]
    """

    def __init__(self, items: Sequence[Item], high: HighRegion, packages: Packages, *, seed: int = 0) -> None:
        self._items = items
        self._sizes = np.array([len(item) for item in items], np.int64)
        self._high = high
        self._packages = packages
        self._seed = seed
        self._in_high: Mask = np.ones(len(items), np.bool_)

    def begin(
        self,
        epoch: int,
        importance: Floats,
        *,
        count: int,
        shared: Floats | None = None,
        floor: float = 0.25,
        record: Path | None = None,
    ) -> Draws:
        """The draws of an epoch; `record` keeps them in a file. `read_draws` of it gives the epoch again, exactly: any
        sample can be fetched from any state of the cache."""
        regions = make_regions(importance, self._sizes, high_bytes=self._high.budget_bytes, floor=floor, shared=shared)
        self._high.value(importance if shared is None else shared)
        self._in_high = regions.high
        line = self._packages.arrange(~regions.high, epoch=epoch)
        draws = draw(regions, count=count, seed=self._seed, epoch=epoch, line=line)
        if record is not None:
            write_draws(record, draws)
        return draws

    def resume(self, high: Mask, importance: Floats) -> None:
        """Goes on in the middle of an epoch in which `high` were held."""
        self._in_high = high
        self._high.value(importance)

    @property
    def high(self) -> Mask:
        """The samples that are held in the current epoch."""
        return self._in_high

    def low_counts(self) -> PackageCounts:
        """What the low region cost this job; the high region counts for all who share it."""
        return self._packages.counts()

    def fetch(self, samples: Indices) -> list[Data]:
        """The bytes of samples of the current epoch, by number."""
        in_high, numbers = self._in_high, samples.tolist()
        high = [number for number in numbers if in_high[number]]
        fetched = iter(self._high.ram.fetch([self._items[number] for number in high]))
        return [next(fetched) if in_high[number] else self._packages.get(number) for number in numbers]
