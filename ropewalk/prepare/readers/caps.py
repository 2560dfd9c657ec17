"""Time and memory for making text of one document: the only limits that are not a count of bytes.

Every converter here is written to be linear in its input, and inputs are bounded, so that these limits are met by
documents that are made to do harm, and by what a library does with them. They are the last resort: unlike all others,
what they set aside may differ between two machines.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar

from ..config import Limits
from .item import Fault

T = TypeVar("T")


def capped(limits: Limits, function: Callable[[], T]) -> T:
    """`function()`; Fault when it takes more time, memory or depth of calls than it may."""
    try:
        with _memory(limits.memory_bytes), _time(limits.document_s):
            return function()
    except _Late:
        raise Fault("too_slow", value=limits.document_s, threshold=limits.document_s) from None
    except MemoryError:
        raise Fault("too_much_memory", value=limits.memory_bytes, threshold=limits.memory_bytes) from None
    except RecursionError:
        raise Fault("too_deep") from None


class _Late(BaseException):
    """Passes through a library's `except Exception`."""


@contextlib.contextmanager
def _time(seconds: float) -> Iterator[None]:
    """Raises _Late in this block once it has used `seconds` of CPU; a wait for a busy machine does not count.

    Signals reach the main thread alone: prepare runs there and in the main thread of its workers. Elsewhere there is
    no limit on time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise _Late

    before = signal.signal(signal.SIGPROF, ring)
    # Again and again: an exception in a finalizer is dropped, and a bare `except:` must not stop the clock.
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def _memory(count: int) -> Iterator[None]:
    """Lets allocations in this block fail once the process has grown by `count` bytes."""
    held = _held_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if held is None or (soft != resource.RLIM_INFINITY and soft < held + count):
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (held + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _held_bytes() -> int | None:
    """What RLIMIT_DATA counts, None where the system does not tell. 17 us (measured)."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[5]) * resource.getpagesize()


_STATM = Path("/proc/self/statm")
