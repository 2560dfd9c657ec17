"""A job of the pool as a process that torchrun started: for what finds out itself who it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Iterator[pytest.MonkeyPatch]:
    """In the block the environment says that this is rank `rank` of `world`, all on this machine. What is set by the
    patch that it gives is undone after it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}.items():
            patch.setenv(name, str(value))
        yield patch
