"""Moments on a GPU's stream, as seconds of the host's clock.

Work is queued on a GPU long before it runs, so the host's clock says nothing about it. CUDA events do: they are
recorded on the stream, and read when the stream has passed them. Only `StreamClock.calibrate` waits for the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class StreamClock:
    """Takes the time of the current stream. Events are used again: to create one takes the driver's lock."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._free: list[torch.cuda.Event] = []
        self._reference: tuple[torch.cuda.Event, float] | None = None

    def stamp(self) -> torch.cuda.Event:
        """An event at the end of what is queued on the current stream."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def calibrate(self) -> None:
        """Notes which moment of the GPU is which of the host. Waits for the current stream; to be called when that is
        idle anyway, and now and then, since clocks drift apart."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        self._reference = event, self._clock()

    def host_seconds(self, event: torch.cuda.Event) -> float | None:
        """When the stream passed `event`, on the host's clock; None before the first `calibrate`."""
        if self._reference is None:
            return None
        reference, at = self._reference
        return at + reference.elapsed_time(event) / 1e3

    def release(self, *events: torch.cuda.Event | None) -> None:
        """These were read and may be recorded again."""
        self._free += [event for event in events if event is not None]
