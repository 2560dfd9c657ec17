"""Samples of low importance in packages, so that one sequential read brings many (dynamic packing of iCache).

A sample of the low region is asked for rarely, and scattered over storage each would cost a random read. They are
grouped at random into packages of a few megabytes; the first use of a package collects its samples one by one and
writes them down together, every later use is one read. When importance changes, a package keeps those of its samples
that are still low; one of which more than half has left is taken apart and its rest packed anew.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ropewalk.base.files import storage
from ropewalk.store.items import Fetch, Item

from .flights import Data
from .importance import Indices, Mask

_log = logging.getLogger(__name__)
_LEAST_LIVE = 0.5
_PACKAGE = re.compile(r"\d{8,}\.package(\.partial)?")


@dataclass(slots=True)
class PackageCounts:
    """What the low region cost."""

    hits: int = 0
    """Samples found in a package that is in memory."""
    packages_read: int = 0
    """Sequential reads."""
    packages_written: int = 0
    samples_collected: int = 0
    """Samples fetched one by one, to be packed."""
    damaged: int = 0


class Packages:
    """The low region: samples of `items` by number, packed under `folder`, read from `behind` the first time.

    The folder belongs to one process and is emptied when it is opened: what is packed depends on importance, which
    begins anew too. `memory_bytes` bounds the packages held at once; at least one is.
    """

    def __init__(
        self,
        behind: Fetch,
        items: Sequence[Item],
        folder: Path,
        *,
        package_bytes: int = 4 << 20,
        memory_bytes: int = 64 << 20,
        seed: int = 0,
    ) -> None:
        self._behind = behind
        self._items = items
        self._folder = folder
        self._package_bytes = package_bytes
        self._memory_bytes = memory_bytes
        self._seed = seed
        self._lock = threading.Lock()
        self._members: dict[int, Indices] = {}
        self._package_of = np.full(len(items), -1, np.int64)
        self._checksums: dict[int, int] = {}
        self._low: Mask = np.zeros(len(items), np.bool_)
        self._next = 0
        self._held: OrderedDict[int, dict[int, Data]] = OrderedDict()
        self._held_bytes = 0
        self._counts = PackageCounts()
        with storage(f"opening {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if _PACKAGE.fullmatch(path.name):
                    path.unlink()

    def arrange(self, low: Mask, *, epoch: int) -> Indices:
        """Packs for a new epoch; gives the line of low samples, package after package, in an order of that epoch."""
        random = np.random.Generator(np.random.Philox(key=[self._seed % 2**64, epoch]))
        with self._lock:
            self._low = low
            for package, members in [*self._members.items()]:
                if low[members].mean() < _LEAST_LIVE:
                    self._take_apart(package)
            loose = np.flatnonzero(low & (self._package_of < 0))
            random.shuffle(loose)
            self._pack(loose)
            order = [*self._members]
            random.shuffle(order)
            lines = [self._members[package][low[self._members[package]]] for package in order]
            for line in lines:
                random.shuffle(line)
        return np.concatenate(lines) if lines else np.zeros(0, np.int64)

    def get(self, sample: int) -> Data:
        """The bytes of a low sample; reads its package when that is not in memory."""
        with self._lock:
            package = int(self._package_of[sample])
            held = self._held.get(package)
            if held is None:
                held = self._load(package)
            else:
                self._held.move_to_end(package)
                self._counts.hits += 1
            return held[sample]

    def membership(self) -> tuple[Indices, Indices]:
        """The package of each sample, -1 for none, and its place there: what the next packing hangs on."""
        with self._lock:
            place = np.zeros(len(self._items), np.int64)
            for members in self._members.values():
                place[members] = np.arange(len(members))
            return self._package_of.copy(), place

    def restore(self, package_of: Indices, place: Indices) -> None:
        """Packs as `membership` said; files are written anew when they are needed."""
        with self._lock:
            for package in self._members:
                self._path(package).unlink(missing_ok=True)
            self._checksums.clear()
            self._held.clear()
            self._held_bytes = 0
            self._package_of = package_of.copy()
            order = np.lexsort((place, package_of))
            order = order[package_of[order] >= 0]
            packages, firsts = np.unique(package_of[order], return_index=True)
            members = np.split(order, firsts[1:]) if len(packages) else []
            self._members = dict(zip(packages.tolist(), members, strict=True))
            self._next = int(packages.max()) + 1 if len(packages) else 0

    def counts(self) -> PackageCounts:
        """What happened so far."""
        with self._lock:
            return dataclasses.replace(self._counts)

    def close(self) -> None:
        """Removes the packages and closes what is behind."""
        with self._lock:
            for package in self._members:
                self._path(package).unlink(missing_ok=True)
            self._held.clear()
        self._behind.close()

    def _path(self, package: int) -> Path:
        return self._folder / f"{package:08}.package"

    def _pack(self, loose: Indices) -> None:
        members: list[int] = []
        size = 0
        for sample in loose.tolist():
            if members and size + len(self._items[sample]) > self._package_bytes:
                self._add(members)
                members, size = [], 0
            members.append(sample)
            size += len(self._items[sample])
        if members:
            self._add(members)

    def _add(self, members: list[int]) -> None:
        package, self._next = self._next, self._next + 1
        self._members[package] = np.array(members, np.int64)
        self._package_of[members] = package

    def _take_apart(self, package: int) -> None:
        self._package_of[self._members.pop(package)] = -1
        self._checksums.pop(package, None)
        self._drop(package)
        self._path(package).unlink(missing_ok=True)

    def _drop(self, package: int) -> None:
        held = self._held.pop(package, None)
        self._held_bytes -= sum(map(len, held.values())) if held else 0

    def _load(self, package: int) -> dict[int, Data]:
        members = self._members[package].tolist()
        content = self._read(package) if package in self._checksums else None
        if content is None:
            # A sample that has left the low region is packed all the same: it may come back.
            parts = self._behind.fetch([self._items[member] for member in members])
            self._counts.samples_collected += len(members)
            content = memoryview(b"".join(parts))
            self._write(package, content)
        stops = np.cumsum([len(self._items[member]) for member in members]).tolist()
        held: dict[int, Data] = {}
        start = 0
        for member, stop in zip(members, stops, strict=True):
            held[member] = content[start:stop]
            start = stop
        self._held[package] = held
        self._held_bytes += len(content)
        while self._held_bytes > self._memory_bytes and len(self._held) > 1:
            self._drop(next(iter(self._held)))
        return held

    def _read(self, package: int) -> memoryview | None:
        """The package by one sequential read; None when it is gone or damaged."""
        try:
            content = self._path(package).read_bytes()
        except OSError as error:
            _log.warning("%s; its samples are collected again", error)
            content = b""
        if xxhash.xxh3_64_intdigest(content) != self._checksums.pop(package):
            self._counts.damaged += 1
            return None
        self._checksums[package] = xxhash.xxh3_64_intdigest(content)
        self._counts.packages_read += 1
        return memoryview(content)

    def _write(self, package: int, content: memoryview) -> None:
        path = self._path(package)
        try:
            path.write_bytes(content)
        except OSError as error:
            _log.warning("%s; the package is collected again when it is needed", error)
            path.unlink(missing_ok=True)
            return
        self._checksums[package] = xxhash.xxh3_64_intdigest(content)
        self._counts.packages_written += 1
