"""The memory tier: shards in memory that outlives the process, as files in `/dev/shm` or another folder. No torch.

    FOLDER/RUN/.ropewalk-memory                             marks the folder of the run as created here
    FOLDER/RUN/rank-00000-of-00008/step-00000100.ATTEMPT/   the files of the rank and its manifest

After a crash, the next process finds the last state here. A rank has two slots: while one is written, the other is
intact, so a crash loses only the copy in progress. The older slot is overwritten in place, because clearing fresh pages
costs the kernel more than the copy. A slot that is being written has another name and is a leftover after a crash.

Each shard names its run and rank, has the hashes of all chunks, counts against a limit, and is removed when the run
ends normally. Leftovers of a crash are overwritten when the run starts again; runs that do not start again are removed
by the start of another run, after some idle hours.

Any user can create names in `/dev/shm`. So FOLDER is a real folder of this user with mode 0700 (`base/private.py`); all
changes go through its descriptor and follow no links; and only names of the form above are removed, in folders of runs
with the mark.
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
"""File in the folder of each run created here."""


class MemoryTier:
    """The memory tier of a machine, shared by any number of processes."""

    def __init__(self, folder: Path, *, limit_bytes: int | None = None) -> None:
        """`limit_bytes`: for all shards; not set: half of the file system."""
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
        """Creates a shard of about `size` bytes from the files that `write` puts into a given folder; returns its
        path."""
        with self.filling(key, size=size) as partial:
            record = write(partial, self._disk)
            own = dataclasses.replace(manifest, files=record.files, tensors=record.tensors, world=key.world)
            finish_shard(partial, own, sealed(own))
        return self.path(key)

    @contextlib.contextmanager
    def filling(self, key: ShardKey, *, size: int) -> Iterator[Path]:
        """A folder to fill with files and manifest; it becomes the shard `key` at the end of the block.

        It may have files of an older shard, to be overwritten. StorageError if the tier is full.
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
        """Path of a shard."""
        rank = f"rank-{key.rank:05d}-of-{key.world:05d}"
        return self.folder / key.run / rank / f"step-{key.step:08d}.{key.attempt}"

    def shards(self, run: str) -> list[ShardKey]:
        """The complete shards of a run, newest step last."""
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
        """A file of a shard, open for reading; DataError if it is missing. Follows no links."""
        path = self.path(key).relative_to(self.folder)
        try:
            descriptor = open_file(self._root, f"{path}/{plain_name(name)}")
        except OSError as error:
            raise DataError(f"{name} of {key} is missing: {error.strerror or error}") from None
        with open(descriptor, "rb") as file:
            yield file

    def scratch(self, run: str, rank: int) -> Path:
        """Path of the folder in which `rank` assembles a restore; it may not exist."""
        with storage(f"creating {self.folder / run}"), self._run_folder(run):
            return self.folder / run / f"restore-{rank}{PARTIAL}"

    @contextlib.contextmanager
    def pinned(self, key: ShardKey) -> Iterator[Path]:
        """The path of a shard, which is not overwritten within the block."""
        path = self.path(key)
        with self._guard:
            self._pinned.append(path)
        try:
            yield path
        finally:
            with self._guard:
                self._pinned.remove(path)

    def check(self, key: ShardKey) -> list[str]:
        """Verifies every byte of a shard; returns its damage, after quarantine."""
        wrong = verify_checkpoint(self.path(key), shard=True)
        if wrong:
            self.quarantine(key)
        return wrong

    def quarantine(self, key: ShardKey) -> None:
        """Renames a damaged shard for inspection; the next copy of the rank overwrites it."""
        name = self.path(key).name
        # It may have been overwritten or dropped meanwhile.
        with contextlib.suppress(FileNotFoundError), self._rank_folder(key) as rank:
            remove_below(rank, name + DAMAGED)
            os.rename(name, name + DAMAGED, src_dir_fd=rank, dst_dir_fd=rank)

    def drop(self, run: str) -> None:
        """Removes the shards of a run, if its folder has the mark; other files stay."""
        # Another rank may drop the run at the same time.
        with contextlib.suppress(OSError), self._opened(plain_name(run)) as folder:
            if MARK not in os.listdir(folder):
                return
            for name in os.listdir(folder):
                if _SCRATCH.fullmatch(name):
                    remove_below(folder, name)
                elif _RANK.fullmatch(name):
                    self._drop_rank(folder, name)
            # The mark is last, so that leftovers of a crash can be reclaimed.
            if os.listdir(folder) == [MARK]:
                os.unlink(MARK, dir_fd=folder)
                os.rmdir(run, dir_fd=self._root)

    def reclaim(self, *, own: str = "", idle_s: float = 86400.0) -> list[str]:
        """Removes other runs than `own` that were not written for `idle_s` seconds; returns their names."""
        gone = []
        for run in os.listdir(self._root):
            written = self._last_written(run) if run != own else None
            if written is not None and time.time() - written > idle_s:
                self.drop(run)
                gone.append(run)
        return gone

    def used_bytes(self) -> int:
        """Bytes of all runs. Files renamed concurrently may be missed."""
        total = 0
        for _, _, names, folder in os.fwalk(".", dir_fd=self._root):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(name, dir_fd=folder).st_size
        return total

    def _slot(self, rank: int, path: Path, size: int) -> Path:
        """The folder to write: the older slot if both are in use, otherwise a new one."""
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
                f"{self.folder}: {size} bytes do not fit: {used} of at most {self._limit} are used; raise "
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
        """The folder of a run; created and marked if it is missing."""
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
        """Names in a subfolder; empty if it is no folder or was just removed."""
        try:
            descriptor = open_folder(parent, name)
        except OSError:
            return []
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    def _drop_rank(self, folder: int, name: str) -> None:
        # It may be no folder, or contain other files.
        with contextlib.suppress(OSError):
            rank = open_folder(folder, name)
            try:
                for step in filter(_STEP.fullmatch, os.listdir(rank)):
                    remove_below(rank, step)
            finally:
                os.close(rank)
            os.rmdir(name, dir_fd=folder)

    def _last_written(self, run: str) -> float | None:
        """Time of the last write in the folder of a run; None if it was not created here."""
        try:
            with self._opened(plain_name(run)) as folder:
                if MARK not in os.listdir(folder):
                    return None
                times = [os.fstat(folder).st_mtime]
                for name in filter(_RANK.fullmatch, os.listdir(folder)):
                    for step in self._listed(folder, name):
                        times.append(os.lstat(f"{name}/{step}", dir_fd=folder).st_mtime)
                return max(times)
        except (OSError, DataError):  # no folder, of another user, or being removed
            return None


def finish_shard(partial: Path, manifest: CheckpointManifest, text: bytes) -> None:
    """Writes the manifest and removes files of the older shard."""
    with _Pages().create(partial / FILE) as file:
        file.write(text)
    for file_path in partial.iterdir():
        if file_path.name not in (FILE, *manifest.files):
            file_path.unlink()


class MemorySource:
    """The memory tier of this machine as a source of copies."""

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
    """Overwrites files in place to reuse their pages. Never syncs, because memory does not outlive the machine."""

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
        """No-op."""
