"""Time spent, by name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Stopwatch:
    """Adds up seconds by name: `with watch("data"): ...`, then `watch.take()` gives and clears the sums."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def take(self) -> dict[str, float]:
        """The sums since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken
