"""Files that exist whole or not at all.

Everything ropewalk keeps is written beside its final name, fsynced, renamed, and the folder fsynced. Each
commit passes labelled points, announced with `sys.audit("ropewalk.point", label)`: a test installs an audit
hook and kills the process at any of them. Without a hook an announcement costs about 50 ns.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import DamagedFile, DataError, RunConflict, storage_error

PARTIAL = ".partial"
"""Suffix of a file or folder that is being written; whatever carries it after a crash is garbage."""
NO_FILE = "not a regular file"


def point(label: str) -> None:
    """Announces a moment at which a crash must be harmless."""
    sys.audit("ropewalk.point", label)


@contextlib.contextmanager
def committed_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """An open file that replaces `path` when the block ends without an exception, durable, in one instant."""
    partial = path.with_name(path.name + PARTIAL)
    with storage(f"writing {path}"):
        _make_folder(path.parent)
        point(f"file.begin:{path.name}")
        try:
            with open(partial, mode, encoding=None if "b" in mode else "utf-8") as file:
                yield file
                file.flush()
                point(f"file.written:{path.name}")
                os.fsync(file.fileno())
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        point(f"file.synced:{path.name}")
        os.replace(partial, path)
        sync_folder(path.parent)
        point(f"file.committed:{path.name}")


@contextlib.contextmanager
def committed_folder(path: Path) -> Iterator[Path]:
    """A fresh folder to fill, which becomes `path` when the block ends; whoever writes its files syncs them.

    An existing `path` is replaced by two renames: never half of it is seen, but in the instant between them
    there is no `path`. Use names that are never reused (a step, a hash) where that matters.
    """
    partial = path.with_name(path.name + PARTIAL)
    replaced = path.with_name(path.name + ".old" + PARTIAL)
    with storage(f"writing {path}"):
        _remove(partial)
        _remove(replaced)
        _make_folder(partial)
        point(f"folder.begin:{path.name}")
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_folder(partial)
        point(f"folder.synced:{path.name}")
        if path.exists():
            os.replace(path, replaced)
        os.replace(partial, path)
        sync_folder(path.parent)
        _remove(replaced)
        point(f"folder.committed:{path.name}")


def write_json(path: Path, value: Any) -> None:
    """Commits `value` as indented JSON."""
    with committed_file(path, "w") as file:
        json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")


def check_regular(path: Path) -> os.stat_result:
    """The status of a file. DamagedFile for a folder, a pipe or a device in its place: opening one may never end."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedFile(f"{path}: {NO_FILE}", "move it away and run the same command again")
    return status


def open_regular(path: Path) -> IO[bytes]:
    """A file, open for reading; DamagedFile as `check_regular`."""
    check_regular(path)
    return open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def read_regular(path: Path) -> bytes:
    """The bytes of a file; DamagedFile as `check_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_json(path: Path, *, what: str) -> Any:
    """The JSON in `path`; `what` names the file in the error when it is missing or damaged."""
    try:
        with storage(f"reading {path}"):
            return json.loads(read_regular(path).decode())
    except FileNotFoundError:
        raise DataError(f"{path}: no such {what}") from None
    except ValueError as error:
        raise DataError(f"{path}: this {what} is damaged: {error}") from None


def upgraded(
    value: dict[str, Any],
    *,
    path: Path,
    what: str,
    current: int,
    upgrades: dict[int, Callable[[dict[str, Any]], dict[str, Any]]],
) -> dict[str, Any]:
    """`value` brought to format `current`, one function a version; refuses what a newer ropewalk wrote."""
    version = value.get("format") if isinstance(value, dict) else None
    if type(version) is not int or version < 1:
        raise DataError(f"{path}: not a ropewalk {what}: `format` is {version!r}")
    if version > current:
        raise DataError(
            f"{path}: this {what} has format {version}, this ropewalk reads up to {current}; upgrade ropewalk"
        )
    for old in range(version, current):
        value = {**upgrades[old](value), "format": old + 1}
    return value


def open_lock(folder: Path) -> IO[str]:
    """The lock file of `folder`, both of which are made if they are not there; DamagedFile as `check_regular`."""
    path = folder / ".lock"
    with storage(f"creating {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFile(f"{path}: {NO_FILE}", "move it away and run the same command again")
    return open(descriptor, "r+", encoding="utf-8", errors="replace")


@contextlib.contextmanager
def locked(folder: Path, *, wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Holds `folder` for this process. A second process gets RunConflict or, with `wait`, waits, after `wait` was told
    for whom. The kernel frees the folder if we die."""
    file = open_lock(folder)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "?"
            if wait is None:
                raise RunConflict(f"{folder}: process {owner} is writing here; wait for it or stop it first") from None
            wait(f"{folder}: process {owner} is making the same; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        with storage(f"writing {folder / '.lock'}"):
            file.seek(0)  # behind the other's number, if that was read
            file.truncate()
            file.write(str(os.getpid()))
            file.flush()
        yield
    finally:
        file.close()


def lock_owner(folder: Path) -> str | None:
    """The process that holds `folder` now, None when nobody does."""
    path = folder / ".lock"
    if not path.is_file():
        return None
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "?"
    return None


def sync_folder(folder: Path) -> None:
    """Makes the names inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def storage(doing: str) -> Iterator[None]:
    """Errors of the disk raised in the block become StorageError; `doing` says what was tried and where."""
    try:
        yield
    except OSError as error:
        translated = storage_error(error, doing=doing)
        if translated is None:
            raise
        raise translated from error


def _make_folder(folder: Path) -> None:
    """Makes `folder` and its parents, each name durable: a synced file in a lost folder is a lost file."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
