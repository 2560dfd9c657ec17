"""Draws few-shot examples: the same ones as lm-eval, whose generator starts at seed 1234 and is used for one document
after the other in their order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.base.errors import DataError

SEED = 1234


class FewShotSampler:
    """Examples from a pool, for one document after the other."""

    def __init__(self, pool: Sequence[Mapping[str, Any]], *, first: bool, where: str) -> None:
        self._pool, self._first, self._where = list(pool), first, where
        self._random = random.Random(SEED)

    def draw(self, count: int, *, besides: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
        """`count` examples; never the document `besides`, which is given where it may stand in the pool."""
        pool = self._pool
        if self._first:
            found = [each for each in pool if each != besides] if besides is not None else pool
            return self._enough(found, count)[:count]
        if not besides:
            return self._random.sample(self._enough(pool, count), count)
        drawn = self._random.sample(self._enough(pool, count + 1), count + 1)
        found = [each for each in drawn if each != besides][:count]
        if len(found) < count:  # the document stands in the pool several times
            others = [each for each in pool if each != besides]
            found = self._random.sample(self._enough(others, count), count)
        return found

    def _enough(self, pool: list[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
        if len(pool) < count:
            raise DataError(f"{self._where}: {count} few-shot examples are needed, and there are {len(pool)}")
        return pool
