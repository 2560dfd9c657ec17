"""Shards in memory that outlives the process: files in `/dev/shm`, or in another folder. No torch.

    FOLDER/RUN/rank-00000-of-00008/step-00000100.ATTEMPT/   the rank's files and its manifest

A process that dies leaves its memory behind; the next one finds there what it had. A rank has two slots: while one is
written the other stands, so a crash in the middle of a copy costs the copy. The older slot is written over in place,
because fresh pages cost the kernel more to clear than the copy itself. A slot that is being written has another
name, and is garbage after a crash.

What is here names its run and owner, carries the hashes of every chunk, counts against a limit, and goes when the run
ends well. What a crash left is written over by the next start of its run; a run that never starts again is cleared away
by the start of another one, after some idle hours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ropewalk.base.errors import DataError, StorageError
from ropewalk.base.files import PARTIAL, point, storage

from .commit import Record
from .copies import Key, Offer, plain_name
from .disk import Disk, LocalDisk, Open
from .format import FILE, CheckpointManifest, read_checkpoint_manifest, sealed, verify_checkpoint

SLOTS = 2
DAMAGED = ".damaged"
_RANK = re.compile(r"rank-(\d{5})-of-(\d{5})")
_STEP = re.compile(r"step-(\d{8})\.([\w.-]+)")


class Memory:
    """The memory tier of one machine; any number of processes may hold it open."""

    def __init__(self, folder: Path, *, limit_bytes: int | None = None) -> None:
        """`limit_bytes`: of all that lies here; not set: half of the file system."""
        self.folder = folder
        with storage(f"creating {folder}"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise StorageError(
                    f"{folder}: belongs to another user; name another folder in `checkpoint.tiers.folder`"
                )
            self._limit = shutil.disk_usage(folder).total // 2 if limit_bytes is None else limit_bytes
        self._disk = _Pages()
        self._busy: dict[str, threading.Lock] = {}
        self._pinned: list[Path] = []
        self._guard = threading.Lock()

    def keep(self, key: Key, manifest: CheckpointManifest, *, size: int, write: Callable[[Path, Disk], Record]) -> Path:
        """Makes a shard of what `write` puts into the folder it is given, about `size` bytes; returns its path."""
        with self.filling(key, size=size) as partial:
            record = write(partial, self._disk)
            own = dataclasses.replace(manifest, files=record.files, tensors=record.tensors, world=key.world)
            finish_shard(partial, own, sealed(own))
        return self.path(key)

    @contextlib.contextmanager
    def filling(self, key: Key, *, size: int) -> Iterator[Path]:
        """A folder to fill, manifest included, which becomes the shard `key` when the block ends well.

        It may hold files of an older shard, to be written over. StorageError when the tier is full.
        """
        path = self.path(key)
        with self._guard:
            busy = self._busy.setdefault(str(path.parent), threading.Lock())
        if not busy.acquire(blocking=False):
            raise StorageError(f"{path.parent}: another copy of this rank is being written")
        try:
            with storage(f"writing {path}"):
                partial = self._slot(path, size)
                point(f"memory.begin:{path.name}")
                yield partial
                point(f"memory.written:{path.name}")
                if path.exists():
                    self._disk.remove(path)
                os.rename(partial, path)
                point(f"memory.kept:{path.name}")
        finally:
            busy.release()

    def path(self, key: Key) -> Path:
        """Where a shard lies."""
        rank = f"rank-{key.rank:05d}-of-{key.world:05d}"
        return self.folder / key.run / rank / f"step-{key.step:08d}.{key.attempt}"

    def shards(self, run: str) -> list[Key]:
        """What is whole here of a run; newest steps last."""
        found = []
        for folder in _listed(self.folder / plain_name(run)):
            rank = _RANK.fullmatch(folder.name)
            for path in _listed(folder) if rank else ():
                step = _STEP.fullmatch(path.name)
                if rank and step and not path.name.endswith((PARTIAL, DAMAGED)):
                    key = Key(run=run, step=int(step[1]), rank=int(rank[1]), world=int(rank[2]), attempt=step[2])
                    found.append(key)
        return sorted(found)

    @contextlib.contextmanager
    def pinned(self, key: Key) -> Iterator[Path]:
        """The shard's path; it is not written over within the block."""
        path = self.path(key)
        with self._guard:
            self._pinned.append(path)
        try:
            yield path
        finally:
            with self._guard:
                self._pinned.remove(path)

    def check(self, key: Key) -> list[str]:
        """Reads every byte of a shard; what is wrong, after which it is out of sight."""
        wrong = verify_checkpoint(self.path(key))
        if wrong:
            self.quarantine(key)
        return wrong

    def quarantine(self, key: Key) -> None:
        """Renames a damaged shard, for people to look at; the rank's next copy is written over it."""
        path = self.path(key)
        aside = path.with_name(path.name + DAMAGED)
        self._disk.remove(aside)
        with contextlib.suppress(FileNotFoundError):  # written over in the meantime
            os.rename(path, aside)

    def drop(self, run: str) -> None:
        """Removes all that is here of a run."""
        shutil.rmtree(self.folder / plain_name(run), ignore_errors=True)

    def reclaim(self, *, own: str = "", idle_s: float = 86400.0) -> list[str]:
        """Removes runs in which nothing has been written for `idle_s` seconds, all but `own`; returns their names."""
        gone = []
        for run in _listed(self.folder):
            shards = [path for rank in _listed(run) for path in _listed(rank)]
            written = [told.st_mtime for told in map(_stat, (run, *shards)) if told]
            if run.name != own and written and time.time() - max(written) > idle_s:
                self.drop(run.name)
                gone.append(run.name)
        return gone

    def used_bytes(self) -> int:
        """Of all runs. What another thread or process renames in this moment may be missed."""
        files = (Path(folder, name) for folder, _, names in os.walk(self.folder) for name in names)
        return sum(told.st_size for told in map(_stat, files) if told)

    def _slot(self, path: Path, size: int) -> Path:
        """A folder to write to: that of the older slot when both are taken, else a new one."""
        partial = path.with_name(path.name + PARTIAL)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = {p: told.st_mtime_ns for p in _listed(path.parent) if (told := _stat(p))}
        left = [p for p in there if p.name.endswith((PARTIAL, DAMAGED))]
        whole = sorted((p for p in there if p not in left), key=lambda p: there[p])
        with self._guard:
            spare = [p for p in whole if p not in self._pinned]
            reused = left[0] if left else spare[0] if len(whole) >= SLOTS and spare else None
            if reused:
                os.rename(reused, partial)
        for leftover in left[1:]:
            self._disk.remove(leftover)
        partial.mkdir(mode=0o700, exist_ok=True)
        (partial / FILE).unlink(missing_ok=True)
        used = self.used_bytes() - sum(file.stat().st_size for file in partial.iterdir())
        if used + size > self._limit:
            self._disk.remove(partial)
            raise StorageError(
                f"{self.folder}: {size} bytes do not fit beside {used} of at most {self._limit}; raise "
                "`checkpoint.tiers.memory_bytes` or keep fewer copies"
            )
        return partial


def finish_shard(partial: Path, manifest: CheckpointManifest, text: bytes) -> None:
    """Writes the manifest's text and removes files of an older shard that this one does not have."""
    with _Pages().create(partial / FILE) as file:
        file.write(text)
    for file_path in partial.iterdir():
        if file_path.name not in (FILE, *manifest.files):
            file_path.unlink()


class MemorySource:
    """The own memory tier as a place to restore from."""

    name = "own memory"
    checks = False

    def __init__(self, memory: Memory, run: str) -> None:
        self._memory, self._run = memory, run

    def offers(self) -> tuple[list[Offer], list[str]]:
        found, wrong = [], []
        for key in self._memory.shards(self._run):
            path = self._memory.path(key)
            try:
                found.append(Offer(key, read_checkpoint_manifest(path), str(path)))
            except DataError as error:
                wrong.append(str(error))
                self._memory.quarantine(key)
        return found, wrong

    def fetch(self, offer: Offer, file: str, target: Path, chunks: Sequence[int]) -> None:
        target.symlink_to(Path(offer.where) / file)

    def quarantine(self, offer: Offer) -> None:
        self._memory.quarantine(offer.key)


def _stat(path: Path) -> os.stat_result | None:
    """What the file system says of a path, links not followed; None when another process has just removed it."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _listed(folder: Path) -> list[Path]:
    """What is in a folder; nothing when it is none, or another process has just removed it."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


class _Pages(LocalDisk):
    """Files whose pages are used again; nothing is ever synced, because nothing here outlives the machine."""

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[Open]:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            file = _OpenPages(descriptor)
            yield file
            os.ftruncate(descriptor, file.size)
        finally:
            os.close(descriptor)


class _OpenPages:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            count = os.write(self._descriptor, view)
            self.size += count
            view = view[count:]

    def sync(self) -> None:
        """Nothing to wait for."""
