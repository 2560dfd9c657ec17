"""Why a step waits for data: always on, without extra passes or threads.

Each batch carries the moments at which it was begun, fetched, prepared and copied. The time that a step waits for it is
split by overlap with these: the part before it was begun is `queue` (reading began too late), then `fetch` (the store),
`prepare` (the cores: gathering, decoding, collating) and `copy` (to the device, and handing over). The parts sum to the
wait, so nothing is left unexplained. One call costs about a microsecond.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Cause = Literal["queue", "fetch", "prepare", "copy"]
CAUSES: tuple[Cause, ...] = get_args(Cause)

LARGE_SHARE = 0.1
"""Share of the time from which on waiting is worth a warning."""


@dataclass(slots=True)
class Times:
    """When one batch passed its stages, in seconds of the clock of its `Stalls`."""

    fetch_began: float
    """The first byte was asked for."""
    fetched: float
    """All its bytes were there; equal to `fetch_began` for memory-mapped shards, whose reading is preparing."""
    prepared: float
    """The batch lay in host memory, as the step wants it."""
    copied: float = math.nan
    """It was on the device; nan while that is not known, or where there is nothing to copy."""


class Stalls:
    """Counts the waiting of one process, from the thread that trains; `clock` gives all its times."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._clear()

    def waited(self, began: float, ended: float, times: Times, *, bytes: int = 0, tokens: int = 0) -> None:
        """A step wanted a batch at `began` and had it at `ended`; `bytes` were fetched for it, it holds `tokens`."""
        self._batches += 1
        self._bytes += bytes
        self._tokens += tokens
        begun, fetched, prepared, copied = times.fetch_began, times.fetched, times.prepared, times.copied
        self._fetch_busy += fetched - begun
        self._prepare_busy += prepared - fetched
        if copied == copied:  # not nan
            self._copy_busy += copied - prepared
        # The bounds of the four parts rise; each is moved into the time of waiting, so that the parts sum to it.
        first = min(max(begun, began), ended)
        second = min(max(fetched, first), ended)
        third = min(max(prepared, second), ended)
        self._queue += first - began
        self._fetch += second - first
        self._prepare += third - second
        self._copy += ended - third

    def take(self) -> dict[str, float]:
        """What has been counted since the last call, which it ends.

        `elapsed_s` in all; `wait_s` and its parts `queue_s`, `fetch_s`, `prepare_s`, `copy_s`; `fetch_busy_s`,
        `prepare_busy_s` and `copy_busy_s`, the seconds that batches spent in a stage whether or not a step waited, with
        their waiting for a thread, summed over batches; `batches`, `bytes` and `tokens`.
        """
        figures = {
            "elapsed_s": self.clock() - self._since,
            "wait_s": self._queue + self._fetch + self._prepare + self._copy,
            "queue_s": self._queue,
            "fetch_s": self._fetch,
            "prepare_s": self._prepare,
            "copy_s": self._copy,
            "fetch_busy_s": self._fetch_busy,
            "prepare_busy_s": self._prepare_busy,
            "copy_busy_s": self._copy_busy,
            "batches": float(self._batches),
            "bytes": float(self._bytes),
            "tokens": float(self._tokens),
        }
        self._clear()
        return figures

    def _clear(self) -> None:
        self._since = self.clock()
        self._queue = self._fetch = self._prepare = self._copy = 0.0
        self._fetch_busy = self._prepare_busy = self._copy_busy = 0.0
        self._batches = self._bytes = self._tokens = 0


REMEDIES: dict[Cause, str] = {
    "queue": "batches are begun too late: raise `load.prefetch_bytes`",
    "fetch": "the store is too slow: raise `load.remote.max_requests` or `load.remote.prefetch_bytes`, give "
    "`load.cache` room, or keep a local copy",
    "prepare": "too few cores prepare batches: raise `load.threads`",
    "copy": "the way to the device is too slow: fewer or smaller tensors a batch, or a link of more lanes",
}
"""What helps against each cause of waiting."""


def binding_cause(figures: Mapping[str, float]) -> Cause:
    """The cause of most of the waiting in what `Stalls.take` gave."""
    return max(CAUSES, key=lambda cause: figures[f"{cause}_s"])


def warning(figures: Mapping[str, float], *, least: float = LARGE_SHARE) -> str | None:
    """Cause and remedy in words when waiting took more than the share `least` of the time; else None."""
    share = figures["wait_s"] / max(figures["elapsed_s"], 1e-9)
    if share <= least or not figures["batches"]:
        return None
    cause = binding_cause(figures)
    part = figures[f"{cause}_s"] / figures["wait_s"]
    return (
        f"steps wait for data {share:.0%} of the time, {part:.0%} of that for `{cause}`: {REMEDIES[cause]}; "
        "`ropewalk doctor data RECIPE` measures what each remedy gains"
    )
