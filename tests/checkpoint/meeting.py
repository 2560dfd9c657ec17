"""Ranks that meet without a network: threads of one process by a barrier, processes of one machine by files."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any


class Threads:
    """The collectives of ranks that are threads; each makes its own view with `of`."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=60)
        self._said: list[Any] = [None] * world

    def of(self, rank: int) -> _OneThread:
        return _OneThread(self._barrier, self._said, rank)


class _OneThread:
    def __init__(self, barrier: threading.Barrier, said: list[Any], rank: int) -> None:
        self._barrier, self._said, self._rank = barrier, said, rank

    def _all(self, value: Any) -> list[Any]:
        self._said[self._rank] = value
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said

    def agree(self, yes: bool) -> bool:
        return all(self._all(yes))

    def barrier(self) -> None:
        self._all(None)

    def broadcast(self, value: Any) -> Any:
        return json.loads(json.dumps(self._all(value)[0]))


class Files:
    """The collectives of ranks that are processes: each leaves a file for each call, and waits for those of others."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self._folder, self._rank, self._world = folder, rank, world
        self._calls = 0
        folder.mkdir(parents=True, exist_ok=True)

    def _all(self, value: Any) -> list[Any]:
        self._calls += 1
        own = self._folder / f"{self._calls}-{self._rank}"
        beside = own.with_suffix(".partial")
        beside.write_text(json.dumps(value))
        os.rename(beside, own)
        return [self._read(self._folder / f"{self._calls}-{rank}") for rank in range(self._world)]

    def _read(self, path: Path) -> Any:
        while True:
            try:
                return json.loads(path.read_text())
            except FileNotFoundError:
                time.sleep(0.001)

    def agree(self, yes: bool) -> bool:
        return all(self._all(yes))

    def barrier(self) -> None:
        self._all(None)

    def broadcast(self, value: Any) -> Any:
        return self._all(value)[0]
