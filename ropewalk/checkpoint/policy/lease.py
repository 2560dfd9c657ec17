"""Leases: a checkpoint is not deleted while another process reads it. No torch.

A reader holds a shared lock (`flock`) on the manifest. Retention takes the exclusive lock first and skips locked
checkpoints until a later save. The kernel releases the locks of dead processes. On file systems without locks there are
no leases.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ropewalk.base.untrusted import Refused, open_inside

from ..format import FILE, resolve_checkpoint

_TRIES = 100
"""Retries when the newest checkpoint is deleted between finding and locking it."""


@contextlib.contextmanager
def leased(path_or_run: Path) -> Iterator[Path]:
    """The checkpoint of `resolve_checkpoint(path_or_run)`, protected from deletion within the block."""
    for _ in range(_TRIES):
        path = resolve_checkpoint(path_or_run)
        held = _hold(path, fcntl.LOCK_SH)
        if held is not None or path == path_or_run:
            break
    try:
        # Without a lock, the reader reports what is missing.
        yield path
    finally:
        if held is not None:
            os.close(held)


@contextlib.contextmanager
def retiring(path: Path) -> Iterator[bool]:
    """Whether the checkpoint `path` has no readers; new ones cannot start within the block."""
    held = _hold(path, fcntl.LOCK_EX)
    try:
        yield held is not None or not (path / FILE).exists()
    finally:
        if held is not None:
            os.close(held)


def _hold(path: Path, kind: int) -> int | None:
    """A descriptor with the lock of the checkpoint `path`; None if it is locked or deleted."""
    try:
        descriptor = open_inside(path / FILE)
    except (OSError, Refused):
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        # It may have been renamed for deletion before it was locked.
        if os.path.samestat(os.fstat(descriptor), os.stat(path / FILE)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        return descriptor  # a file system without locks
    os.close(descriptor)
    return None
