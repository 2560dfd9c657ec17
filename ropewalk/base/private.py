"""Folders that this user alone can write, wherever they lie: safe in `/dev/shm`, where anybody may make names.

A folder is made with mode 0700, or opened if it is a real folder (no symbolic link) that belongs to this user and that
nobody else can write. Callers work below the descriptor that they get, so that a name exchanged later leads nowhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from .errors import StorageError
from .files import storage

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_private(folder: Path, *, setting: str) -> int:
    """A descriptor of `folder`, which is made if it is not there; `setting` is what the user changes to name another.

    StorageError if somebody else could put something into the folder, or put another one in its place.
    """
    with storage(f"creating {folder}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _check_parent(folder.parent, setting)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        _check_real(folder, setting)
        descriptor = os.open(folder, _FOLDER)
    try:
        _check_owner(descriptor, folder, setting)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_folder(parent: int, name: str, *, make: bool = False) -> int:
    """A descriptor of the folder `name` below `parent`, links not followed; OSError if it is none, or not ours."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    descriptor = os.open(name, _FOLDER, dir_fd=parent)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{name} belongs to another user")
    return descriptor


def open_file(parent: int, path: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file at the relative `path` below `parent`; no part of the path may be a link.

    A FIFO or a device is not waited for: OSError.
    """
    *folders, name = path.split("/")
    if not name or any(part in ("", ".", "..") for part in (*folders, name)):
        raise OSError(f"{path!r} names no file below a folder")
    with contextlib.ExitStack() as opened:
        for part in folders:
            parent = os.open(part, _FOLDER, dir_fd=parent)
            opened.callback(os.close, parent)
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=parent)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def remove_below(parent: int, name: str) -> None:
    """Removes the file, the link itself, or the whole folder `name`; content when there is none."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
            shutil.rmtree(name, dir_fd=parent)  # follows no link
        else:
            os.unlink(name, dir_fd=parent)


def _check_parent(parent: Path, setting: str) -> None:
    mode = os.stat(parent).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise StorageError(
            f"{parent}: anybody can exchange the folders in it (mode {stat.S_IMODE(mode):04o}); `chmod +t {parent}` or "
            f"name another folder in `{setting}`"
        )


def _check_real(folder: Path, setting: str) -> None:
    found = os.lstat(folder)
    if stat.S_ISDIR(found.st_mode):
        return
    kind = f"a symbolic link to {os.readlink(folder)}" if stat.S_ISLNK(found.st_mode) else "not a folder"
    raise StorageError(
        f"{folder}: {kind}, made by user {found.st_uid}, and nothing is written through it; move it away or name "
        f"another folder in `{setting}`"
    )


def _check_owner(descriptor: int, folder: Path, setting: str) -> None:
    found = os.fstat(descriptor)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        raise StorageError(f"{folder}: belongs to user {found.st_uid}; name another folder in `{setting}`")
    if mode & 0o022:
        raise StorageError(
            f"{folder}: other users can write here (mode {mode:04o}); look at what it holds, then `chmod 700 {folder}` "
            f"or name another folder in `{setting}`"
        )
    if mode & 0o077:
        os.fchmod(descriptor, 0o700)
