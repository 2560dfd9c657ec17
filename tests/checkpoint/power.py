"""A disk that remembers what was asked of it, and the states in which a power cut may leave it.

The model is the weakest that POSIX allows. Bytes of a file are safe once it was synced; of those written later any
prefix may be there. A name (of a new file or folder, a rename, a removal) is safe once its folder was synced; of
changes to names made later any part may have happened, in any order. A removed folder may have lost any of its files.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ropewalk.checkpoint.disk import LocalDisk, WritableFile


@dataclass(frozen=True, slots=True)
class Op:
    """One request: `kind` is create, write, sync, mkdir, rename, sync_folder, remove or acknowledge."""

    kind: str
    path: Path = Path()
    other: Path = Path()
    data: bytes = b""
    step: int = 0


class RecordingDisk(LocalDisk):
    """Does everything and writes it down."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[WritableFile]:
        self.ops.append(Op("create", path))
        with super().create(path) as file:
            yield _Recording(file, path, self.ops)

    def make_folder(self, path: Path) -> None:
        if not path.is_dir():
            self.ops.append(Op("mkdir", path))
        super().make_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self.ops.append(Op("rename", old, new))
        super().rename(old, new)

    def sync_folder(self, path: Path) -> None:
        self.ops.append(Op("sync_folder", path))
        super().sync_folder(path)

    def remove(self, path: Path) -> None:
        if path.exists():
            # Every name inside is a removal of its own.
            inside = sorted(path.rglob("*"), reverse=True) if path.is_dir() else []
            self.ops.extend(Op("remove", name) for name in (*inside, path))
        super().remove(path)

    def acknowledge(self, step: int) -> None:
        """The caller was told that `step` is safe."""
        self.ops.append(Op("acknowledge", step=step))


@dataclass(slots=True)
class _Recording:
    file: WritableFile
    path: Path
    ops: list[Op]

    def write(self, data: bytes | memoryview) -> None:
        self.ops.append(Op("write", self.path, data=bytes(data)))
        self.file.write(data)

    def sync(self) -> None:
        self.ops.append(Op("sync", self.path))
        self.file.sync()


@dataclass(slots=True)
class _Node:
    """A file, or a folder with what it holds."""

    folder: bool
    names: dict[str, _Node] = field(default_factory=dict)
    synced: bytes = b""
    unsynced: bytes = b""


@dataclass(frozen=True, slots=True)
class State:
    """What a power cut left: contents by path below the root, None for a folder; and what had been acknowledged."""

    contents: dict[Path, bytes | None]
    acknowledged: int
    after: int
    """Requests before the cut."""


def states(ops: list[Op], root: Path, *, subsets: int = 12, seed: int = 0) -> Iterator[State]:
    """States after a cut behind each request: every loss of names where there are few, else `subsets` of them drawn;
    each with the unsynced bytes all lost, all there, and torn."""
    draw = random.Random(seed)
    acknowledged = 0
    for cut in range(len(ops) + 1):
        if cut and ops[cut - 1].kind == "acknowledge":
            acknowledged = ops[cut - 1].step
        loose = _unsynced_names(ops[:cut])
        for lost in _subsets(loose, subsets, draw):
            for kept in (0.0, 1.0, draw.random()):
                yield State(_replay(ops[:cut], root, lost, kept), acknowledged, cut)


def _unsynced_names(ops: list[Op]) -> list[int]:
    """Numbers of the changes to names that no sync of their folder has followed."""
    loose: dict[int, set[Path]] = {}
    for number, op in enumerate(ops):
        if op.kind in ("create", "mkdir", "remove"):
            loose[number] = {op.path.parent}
        elif op.kind == "rename":
            loose[number] = {op.path.parent, op.other.parent}
        elif op.kind == "sync_folder":
            for other in list(loose):
                loose[other].discard(op.path)
                if not loose[other]:
                    del loose[other]
    return list(loose)


def _subsets(loose: list[int], most: int, draw: random.Random) -> Iterator[frozenset[int]]:
    if 2 ** len(loose) <= most:
        for count in range(len(loose) + 1):
            yield from map(frozenset, itertools.combinations(loose, count))
        return
    yield frozenset()
    yield frozenset(loose)
    for _ in range(most - 2):
        yield frozenset(number for number in loose if draw.random() < 0.5)


def _replay(ops: list[Op], root: Path, lost: frozenset[int], kept: float) -> dict[Path, bytes | None]:
    """The tree after `ops`, without the changes of names in `lost`, with a part `kept` of unsynced bytes."""
    top = _Node(folder=True)
    open_files: dict[Path, _Node] = {}
    for number, op in enumerate(ops):
        if op.kind == "create":
            node = open_files[op.path] = _Node(folder=False)
            _put(top, root, op.path, node, lost=number in lost)
        elif op.kind == "write":
            open_files[op.path].unsynced += op.data
        elif op.kind == "sync":
            node = open_files[op.path]
            node.synced, node.unsynced = node.synced + node.unsynced, b""
        elif op.kind == "mkdir":
            _put(top, root, op.path, _Node(folder=True), lost=number in lost)
        elif op.kind == "rename" and number not in lost:
            moved = _take(top, root, op.path)
            if moved is not None:
                _put(top, root, op.other, moved, lost=False)
        elif op.kind == "remove" and number not in lost:
            _take(top, root, op.path)
    contents: dict[Path, bytes | None] = {}
    _list(top, Path(), contents, kept)
    return contents


def _folder(top: _Node, root: Path, path: Path) -> _Node | None:
    node: _Node | None = top
    for name in path.relative_to(root).parts:
        node = node.names.get(name) if node else None
    return node


def _put(top: _Node, root: Path, path: Path, node: _Node, *, lost: bool) -> None:
    parent = _folder(top, root, path.parent)
    if parent is not None and not lost:
        parent.names[path.name] = node


def _take(top: _Node, root: Path, path: Path) -> _Node | None:
    parent = _folder(top, root, path.parent)
    return parent.names.pop(path.name, None) if parent else None


def _list(node: _Node, path: Path, contents: dict[Path, bytes | None], kept: float) -> None:
    for name, child in node.names.items():
        if child.folder:
            contents[path / name] = None
            _list(child, path / name, contents, kept)
        else:
            contents[path / name] = child.synced + child.unsynced[: round(kept * len(child.unsynced))]
