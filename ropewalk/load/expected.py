"""What the run is about to do, and how far ahead to read because of it.

evaluation, phase   the step pauses: reading goes on meanwhile, by as much as the store delivers in the pause
checkpoint          the store or the network is busy: what the steps of that time read is at hand before it begins
ramp                batches grow: more bytes are at hand from then on
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["evaluation", "checkpoint", "phase", "ramp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """One thing to come, before batch `at` is taken."""

    kind: Kind
    at: int
    seconds: float = 0.0
    """How long the pause or the traffic lasts; of traffic, 0 when only its bytes are known."""
    bytes: int = 0
    """Of traffic, what is written; of a ramp, how much more has to be at hand from then on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """What has been measured of the reading so far."""

    batch_bytes: float = 0.0
    compute_s: float = 0.0
    """From one batch at hand to asking for the next: what a step takes without waiting."""
    bytes_per_s: float = 0.0
    """What the store delivers when asked."""

    @property
    def eaten_per_s(self) -> float:
        """Bytes a second that the steps read when they do not wait."""
        return self.batch_bytes / self.compute_s if self.compute_s else 0.0


def budget(usual_bytes: int, *, most_bytes: int, expected: Iterable[Expected], batch: int, pace: Pace) -> int:
    """Bytes to have wanted, under way and at hand while `batch` is the next to be taken; never above `most_bytes`."""
    extra = sum(_extra(coming, batch, pace) for coming in expected)
    return max(usual_bytes, min(most_bytes, usual_bytes + int(extra)))


def is_past(coming: Expected, *, batch: int, pace: Pace) -> bool:
    """Whether it no longer changes the budget; a ramp does so for good."""
    return batch > _end(coming, pace)


def _extra(coming: Expected, batch: int, pace: Pace) -> float:
    if coming.kind in ("evaluation", "phase"):
        return pace.bytes_per_s * coming.seconds if batch == coming.at else 0.0
    extra = coming.bytes if coming.kind == "ramp" else _busy_s(coming, pace) * pace.eaten_per_s
    return extra if coming.at - _lead(extra, pace) <= batch <= _end(coming, pace) else 0.0


def _lead(extra: float, pace: Pace) -> float:
    """Batches before which reading more has to begin: twice what the spare bandwidth needs, as it varies."""
    spare = pace.bytes_per_s - pace.eaten_per_s
    return 2 * extra / spare / pace.compute_s if spare > 0 and pace.compute_s else float("inf")


def _end(coming: Expected, pace: Pace) -> float:
    """The last batch that it concerns."""
    if coming.kind == "ramp":
        return float("inf")
    if coming.kind != "checkpoint" or not pace.compute_s:
        return coming.at
    return coming.at + _busy_s(coming, pace) / pace.compute_s


def _busy_s(coming: Expected, pace: Pace) -> float:
    if coming.seconds or not pace.bytes_per_s:
        return coming.seconds
    return coming.bytes / pace.bytes_per_s
