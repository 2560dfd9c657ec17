"""Origins whose bytes any process can compute, and which count what is asked of them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from ropewalk.store.items import Item


def content(name: str, size: int) -> bytes:
    """The bytes that item `name` has by definition."""
    return np.random.default_rng(xxhash.xxh3_64_intdigest(name.encode())).bytes(size)


def make_items(count: int, *, size: int = 100, checked: bool = True, file: str = "origin") -> list[Item]:
    """Items of a made-up file, of sizes that differ."""
    items = []
    start = 0
    for number in range(count):
        stop = start + size + number % 7
        data = content(f"{file}/{start}", stop - start)
        items.append(Item(file, start, stop, xxhash.xxh3_64_intdigest(data) if checked else None, f"d{number}"))
        start = stop
    return items


def truth(item: Item) -> bytes:
    return content(f"{item.file}/{item.start}", len(item))


class Counting:
    """Gives the true bytes and counts the items asked; `gate` holds every fetch back until it is set."""

    def __init__(self, *, gate: threading.Event | None = None) -> None:
        self.asked: Counter[int] = Counter()
        self.requests = 0
        self.closed = False
        self.failing = 0
        self._gate = gate
        self._lock = threading.Lock()

    def fetch(self, items: Sequence[Item]) -> list[bytes | memoryview]:
        with self._lock:
            self.requests += 1
            self.asked.update(item.start for item in items)
            if self.failing:
                self.failing -= 1
                raise OSError("the origin is away")
        if self._gate is not None:
            self._gate.wait()
        return [truth(item) for item in items]

    def close(self) -> None:
        self.closed = True


class Logged:
    """Gives the true bytes and appends each item to a file, for counts over several processes."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def fetch(self, items: Sequence[Item]) -> list[bytes | memoryview]:
        lines = "".join(f"{item.start}\n" for item in items).encode()
        descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, lines)
        os.close(descriptor)
        return [truth(item) for item in items]

    def close(self) -> None: ...


def logged(log: Path) -> Counter[int]:
    """How often each item was asked of the `Logged` origins of all processes."""
    return Counter(map(int, log.read_text().split())) if log.exists() else Counter()
