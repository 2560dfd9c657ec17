"""What a cache tier did: counted by every tier in the same words, printed side by side."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Figures of one tier since it was opened."""

    hits: int = 0
    """Items that were held here, or on their way here for another thread."""
    misses: int = 0
    """Items asked of what is behind."""
    hit_bytes: int = 0
    miss_bytes: int = 0
    hit_seconds: float = 0.0
    """Time that callers spent looking and reading here, or asking peers, summed over threads."""
    miss_seconds: float = 0.0
    """Time that callers spent in what is behind, summed over threads."""
    kept: int = 0
    """Items admitted."""
    dropped: int = 0
    """Items let go to make room."""
    damaged: int = 0
    """Items whose bytes had changed while they were held; each was fetched again."""
    refused: int = 0
    """Items that storage would not take (full, read-only); they were handed on without being kept."""
    failures: int = 0
    """Requests to a peer that did not bring what was asked."""

    @property
    def hit_rate(self) -> float:
        """Hits of all that was asked; 0 before the first."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class Stats:
    """The counts of a tier that several threads add to: `with stats as counts: counts.hits += 1`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()

    def __enter__(self) -> Counts:
        self._lock.acquire()
        return self._counts

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def counts(self) -> Counts:
        """A copy of the counts."""
        with self as counts:
            return dataclasses.replace(counts)
