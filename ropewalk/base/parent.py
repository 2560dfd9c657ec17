"""A process that must not live on without the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def die_with_parent(parent: int | None = None) -> None:
    """Makes the kernel kill this process when the one that started it ends, however that ends; Linux only.

    `parent` is the process that should still be there: where it ended before this call, the kernel says nothing more,
    and this process ends here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        raise SystemExit(1)
