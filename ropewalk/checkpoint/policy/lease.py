"""A checkpoint that somebody reads stays until it is read, whatever the run that made it deletes meanwhile. No torch.

A reader holds a shared lock (`flock`) on the manifest; whoever deletes takes the exclusive one first, and passes over
what is locked: it goes with a later pruning. The kernel frees the lock of a process that dies, so nothing is kept
for ever. Where a file system knows no locks, reading and deleting go on without.
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
"""How often the newest checkpoint of a run may be deleted between finding and locking it."""


@contextlib.contextmanager
def leased(place: Path) -> Iterator[Path]:
    """The checkpoint meant by `place`, as `resolve_checkpoint` finds it, which no pruning deletes within the block."""
    for _ in range(_TRIES):
        path = resolve_checkpoint(place)
        held = _hold(path, fcntl.LOCK_SH)
        if held is not None or path == place:
            break
    try:
        # Without a lock, the reader tells what is missing.
        yield path
    finally:
        if held is not None:
            os.close(held)


@contextlib.contextmanager
def retiring(path: Path) -> Iterator[bool]:
    """Whether nobody reads the checkpoint `path`, nor will begin to within the block."""
    held = _hold(path, fcntl.LOCK_EX)
    try:
        yield held is not None or not (path / FILE).exists()
    finally:
        if held is not None:
            os.close(held)


def _hold(path: Path, kind: int) -> int | None:
    """A descriptor that holds the lock of the checkpoint `path`; None when another has it or it is gone."""
    try:
        descriptor = open_inside(path / FILE)
    except (OSError, Refused):
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        # Between finding and locking, it may have been renamed for deletion.
        if os.path.samestat(os.fstat(descriptor), os.stat(path / FILE)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        return descriptor  # no locks here
    os.close(descriptor)
    return None
