"""Shards in memory that outlives the process: files in `/dev/shm`, or in another folder. No torch.

    FOLDER/RUN/.ropewalk-memory                             says that the run's folder is ours to remove
    FOLDER/RUN/rank-00000-of-00008/step-00000100.ATTEMPT/   the rank's files and its manifest

A process that dies leaves its memory behind; the next one finds there what it had. A rank has two slots: while one is
written the other stands, so a crash in the middle of a copy costs the copy. The older slot is written over in place,
because fresh pages cost the kernel more to clear than the copy itself. A slot that is being written has another
name, and is garbage after a crash.

What is here names its run and owner, carries the hashes of every chunk, counts against a limit, and goes when the run
ends well. What a crash left is written over by the next start of its run; a run that never starts again is cleared away
by the start of another one, after some idle hours.

Anybody may make names in `/dev/shm`. FOLDER is therefore a real folder of this user's, mode 0700 (`base/private.py`);
what is made, renamed and removed goes through its descriptor and follows no link; and only names of the form above are
removed, below a run's folder that has our mark.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ropewalk.base.errors import DataError, StorageError
from ropewalk.base.files import PARTIAL, point, storage
from ropewalk.base.private import open_file, open_folder, open_private, remove_below

from ..commit import RankRecord
from ..disk import Disk, LocalDisk, WritableFile
from ..format import FILE, CheckpointManifest, read_checkpoint_manifest, sealed, verify_checkpoint
from .tier import CopyOffer, ShardKey, plain_name

SLOTS = 2
DAMAGED = ".damaged"
_RANK = re.compile(r"rank-(\d{5})-of-(\d{5})")
_STEP = re.compile(r"step-(\d{8})\.([\w.-]+)")
_SCRATCH = re.compile(r"restore-\d+\.partial")
MARK = ".ropewalk-memory"
"""File in the folder of each run that was made here."""


class MemoryTier:
    """The memory tier of one machine; any number of processes may hold it open."""

    def __init__(self, folder: Path, *, limit_bytes: int | None = None) -> None:
        """`limit_bytes`: of all that lies here; not set: half of the file system."""
        self.folder = folder
        self._root = open_private(folder, setting="checkpoint.tiers.folder")
        weakref.finalize(self, os.close, self._root)
        room = os.fstatvfs(self._root)
        self._limit = room.f_blocks * room.f_frsize // 2 if limit_bytes is None else limit_bytes
        self._disk = _Pages()
        self._busy: dict[str, threading.Lock] = {}
        self._pinned: list[Path] = []
        self._guard = threading.Lock()

    def keep(
        self, key: ShardKey, manifest: CheckpointManifest, *, size: int, write: Callable[[Path, Disk], RankRecord]
    ) -> Path:
        """Makes a shard of what `write` puts into the folder it is given, about `size` bytes; returns its path."""
        with self.filling(key, size=size) as partial:
            record = write(partial, self._disk)
            own = dataclasses.replace(manifest, files=record.files, tensors=record.tensors, world=key.world)
            finish_shard(partial, own, sealed(own))
        return self.path(key)

    @contextlib.contextmanager
    def filling(self, key: ShardKey, *, size: int) -> Iterator[Path]:
        """A folder to fill, manifest included, which becomes the shard `key` when the block ends well.

        It may hold files of an older shard, to be written over. StorageError when the tier is full.
        """
        path = self.path(key)
        with self._guard:
            busy = self._busy.setdefault(str(path.parent), threading.Lock())
        if not busy.acquire(blocking=False):
            raise StorageError(f"{path.parent}: another copy of this rank is being written")
        try:
            with storage(f"writing {path}"), self._rank_folder(key, make=True) as rank:
                partial = self._slot(rank, path, size)
                point(f"memory.begin:{path.name}")
                yield partial
                point(f"memory.written:{path.name}")
                remove_below(rank, path.name)
                os.rename(partial.name, path.name, src_dir_fd=rank, dst_dir_fd=rank)
                point(f"memory.kept:{path.name}")
        finally:
            busy.release()

    def path(self, key: ShardKey) -> Path:
        """Where a shard lies."""
        rank = f"rank-{key.rank:05d}-of-{key.world:05d}"
        return self.folder / key.run / rank / f"step-{key.step:08d}.{key.attempt}"

    def shards(self, run: str) -> list[ShardKey]:
        """What is whole here of a run; newest steps last."""
        found = []
        with contextlib.suppress(FileNotFoundError), self._opened(plain_name(run)) as folder:
            for name in os.listdir(folder):
                if rank := _RANK.fullmatch(name):
                    found += [
                        ShardKey(run=run, step=int(step[1]), rank=int(rank[1]), world=int(rank[2]), attempt=step[2])
                        for step in map(_STEP.fullmatch, self._listed(folder, name))
                        if step and not step[0].endswith((PARTIAL, DAMAGED))
                    ]
        return sorted(found)

    @contextlib.contextmanager
    def opened(self, key: ShardKey, name: str) -> Iterator[BinaryIO]:
        """A file of a shard; DataError when it is not here. No link is followed, so nothing else is ever read."""
        path = self.path(key).relative_to(self.folder)
        try:
            descriptor = open_file(self._root, f"{path}/{plain_name(name)}")
        except OSError as error:
            raise DataError(f"{name} of {key} is not here: {error.strerror or error}") from None
        with open(descriptor, "rb") as file:
            yield file

    def scratch(self, run: str, rank: int) -> Path:
        """A folder of the run in which rank `rank` puts together what it restores; it need not exist."""
        with storage(f"creating {self.folder / run}"), self._run_folder(run):
            return self.folder / run / f"restore-{rank}{PARTIAL}"

    @contextlib.contextmanager
    def pinned(self, key: ShardKey) -> Iterator[Path]:
        """The shard's path; it is not written over within the block."""
        path = self.path(key)
        with self._guard:
            self._pinned.append(path)
        try:
            yield path
        finally:
            with self._guard:
                self._pinned.remove(path)

    def check(self, key: ShardKey) -> list[str]:
        """Reads every byte of a shard; what is wrong, after which it is out of sight."""
        wrong = verify_checkpoint(self.path(key), shard=True)
        if wrong:
            self.quarantine(key)
        return wrong

    def quarantine(self, key: ShardKey) -> None:
        """Renames a damaged shard, for people to look at; the rank's next copy is written over it."""
        name = self.path(key).name
        # Written over in the meantime, or the whole run was dropped.
        with contextlib.suppress(FileNotFoundError), self._rank_folder(key) as rank:
            remove_below(rank, name + DAMAGED)
            os.rename(name, name + DAMAGED, src_dir_fd=rank, dst_dir_fd=rank)

    def drop(self, run: str) -> None:
        """Removes all that we made here for a run, if its folder has our mark; what else lies in it stays."""
        # Another rank may drop it at the same time.
        with contextlib.suppress(OSError), self._opened(plain_name(run)) as folder:
            if MARK not in os.listdir(folder):
                return
            for name in os.listdir(folder):
                if _SCRATCH.fullmatch(name):
                    remove_below(folder, name)
                elif _RANK.fullmatch(name):
                    self._drop_rank(folder, name)
            # The mark last: what a crash leaves behind can still be reclaimed.
            if os.listdir(folder) == [MARK]:
                os.unlink(MARK, dir_fd=folder)
                os.rmdir(run, dir_fd=self._root)

    def reclaim(self, *, own: str = "", idle_s: float = 86400.0) -> list[str]:
        """Removes runs in which nothing has been written for `idle_s` seconds, all but `own`; returns their names."""
        gone = []
        for run in os.listdir(self._root):
            written = self._last_written(run) if run != own else None
            if written is not None and time.time() - written > idle_s:
                self.drop(run)
                gone.append(run)
        return gone

    def used_bytes(self) -> int:
        """Of all runs. What another thread or process renames in this moment may be missed."""
        total = 0
        for _, _, names, folder in os.fwalk(".", dir_fd=self._root):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(name, dir_fd=folder).st_size
        return total

    def _slot(self, rank: int, path: Path, size: int) -> Path:
        """A folder to write to: that of the older slot when both are taken, else a new one."""
        partial = path.with_name(path.name + PARTIAL)
        there = {name: os.lstat(name, dir_fd=rank).st_mtime_ns for name in os.listdir(rank) if _STEP.fullmatch(name)}
        left = [name for name in there if name.endswith((PARTIAL, DAMAGED))]
        whole = sorted((name for name in there if name not in left), key=lambda name: there[name])
        with self._guard:
            spare = [name for name in whole if path.with_name(name) not in self._pinned]
            reused = left[0] if left else spare[0] if len(whole) >= SLOTS and spare else None
            if reused:
                os.rename(reused, partial.name, src_dir_fd=rank, dst_dir_fd=rank)
        for leftover in left[1:]:
            remove_below(rank, leftover)
        descriptor = open_folder(rank, partial.name, make=True)
        try:
            remove_below(descriptor, FILE)
            reusable = sum(os.lstat(name, dir_fd=descriptor).st_size for name in os.listdir(descriptor))
        finally:
            os.close(descriptor)
        used = self.used_bytes() - reusable
        if used + size > self._limit:
            remove_below(rank, partial.name)
            raise StorageError(
                f"{self.folder}: {size} bytes do not fit beside {used} of at most {self._limit}; raise "
                "`checkpoint.tiers.memory_bytes` or keep fewer copies"
            )
        return partial

    @contextlib.contextmanager
    def _opened(self, name: str, *, make: bool = False) -> Iterator[int]:
        descriptor = open_folder(self._root, name, make=make)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _run_folder(self, run: str) -> Iterator[int]:
        """The folder of a run, made and marked as ours if it is not there."""
        new = plain_name(run) not in os.listdir(self._root)
        with self._opened(run, make=True) as folder:
            if new or MARK not in os.listdir(folder):
                os.close(open_file(folder, MARK, os.O_WRONLY | os.O_CREAT))
            yield folder

    @contextlib.contextmanager
    def _rank_folder(self, key: ShardKey, *, make: bool = False) -> Iterator[int]:
        with self._run_folder(key.run) if make else self._opened(key.run) as folder:
            descriptor = open_folder(folder, self.path(key).parent.name, make=make)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def _listed(self, parent: int, name: str) -> list[str]:
        """What is in a folder below; nothing when it is none, or another process has just removed it."""
        try:
            descriptor = open_folder(parent, name)
        except OSError:
            return []
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    def _drop_rank(self, folder: int, name: str) -> None:
        # Not a folder, or something else lies in it.
        with contextlib.suppress(OSError):
            rank = open_folder(folder, name)
            try:
                for step in filter(_STEP.fullmatch, os.listdir(rank)):
                    remove_below(rank, step)
            finally:
                os.close(rank)
            os.rmdir(name, dir_fd=folder)

    def _last_written(self, run: str) -> float | None:
        """When something was last written in a run's folder; None when it is not one that we made."""
        try:
            with self._opened(plain_name(run)) as folder:
                if MARK not in os.listdir(folder):
                    return None
                times = [os.fstat(folder).st_mtime]
                for name in filter(_RANK.fullmatch, os.listdir(folder)):
                    for step in self._listed(folder, name):
                        times.append(os.lstat(f"{name}/{step}", dir_fd=folder).st_mtime)
                return max(times)
        except (OSError, DataError):  # not a folder, not ours, or being removed by another process
            return None


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

    def __init__(self, memory: MemoryTier, run: str) -> None:
        self._memory, self._run = memory, run

    def offers(self) -> tuple[list[CopyOffer], list[str]]:
        found, wrong = [], []
        for key in self._memory.shards(self._run):
            path = self._memory.path(key)
            try:
                found.append(CopyOffer(key, read_checkpoint_manifest(path, shard=True), str(path)))
            except DataError as error:
                wrong.append(str(error))
                self._memory.quarantine(key)
        return found, wrong

    def fetch(self, offer: CopyOffer, file: str, target: Path, chunks: Sequence[int]) -> None:
        target.symlink_to(Path(offer.where) / file)

    def quarantine(self, offer: CopyOffer) -> None:
        self._memory.quarantine(offer.key)


class _Pages(LocalDisk):
    """Files whose pages are used again; nothing is ever synced, because nothing here outlives the machine."""

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[WritableFile]:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
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
