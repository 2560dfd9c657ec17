"""Threads that save give way to the threads that train. No torch."""

from __future__ import annotations

import os
import sys
import threading

NICE = 5
"""A third of the share of a thread that trains, where both want the same core; all of a core that nobody else wants.
At 10 or 19 a save on a machine that others use too would hardly get on."""


def give_way() -> None:
    """Lowers the priority of the calling thread for good. Only Linux has priorities by thread; elsewhere nothing."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
