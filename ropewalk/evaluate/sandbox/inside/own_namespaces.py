"""The sandbox without bubblewrap: enters namespaces of its own, builds a small read-only root, becomes the harness.

    python -m inside.own_namespaces LIMITS READ_ONLY_PATH...

Run by root it needs no user namespace, and the harness becomes an unused user.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import NoReturn

from .confinement import die_with_parent
from .harness import start

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    *(0x00020000, 0x02000000, 0x04000000, 0x08000000),
    *(0x10000000, 0x20000000, 0x40000000),
)
_NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 2, 4, 8, 32, 4096, 16384, 1 << 18
_READ_ONLY = 1
_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR = -100, 0x8000, 442
_UNUSED = 65534
_TMP = "/tmp"
DEVICES = ("null", "zero", "full", "random", "urandom")


def run(limits: str, paths: list[str]) -> int:
    """Runs one program in namespaces; returns the exit status of its harness."""
    die_with_parent()
    user, group = os.geteuid(), os.getegid()
    ordinary = user != 0
    flags = _NEWNS | _NEWCGROUP | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET | (_NEWUSER if ordinary else 0)
    _checked(_LIBC.unshare(flags), "unshare")
    if ordinary:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{_UNUSED} {user} 1")
        _write("/proc/self/gid_map", f"{_UNUSED} {group} 1")
    alive, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        die_with_parent()
        if os.read(alive, 1) != b"x":  # the parent died before
            os._exit(1)
        os.close(alive)
        os.setsid()
        _build_root(paths, dict(part.split("=") for part in limits.split(","))["disk_bytes"])
        start(limits)
    os.close(alive)
    os.write(told, b"x")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _build_root(paths: list[str], disk_bytes: str) -> None:
    """Makes a root of `paths`, read only, with devices, processes of this namespace, and a private `/tmp`."""
    os.umask(0o022)
    _mount("", "/", flags=_REC | _PRIVATE)
    _mount("tmpfs", _TMP, kind="tmpfs", flags=_NOSUID | _NODEV, data="mode=755")
    os.makedirs(f"{_TMP}/old")
    os.makedirs(f"{_TMP}/new")
    _checked(_LIBC.pivot_root(_TMP.encode(), f"{_TMP}/old".encode()), "pivot_root")
    os.chdir("/")
    _mount("tmpfs", "/new", kind="tmpfs", flags=_NOSUID | _NODEV, data="mode=755,size=1m")
    for path in paths:
        _bind(path)
    for name in DEVICES:
        _bind(f"/dev/{name}", device=True)
    os.symlink("/tmp", "/new/dev/shm")
    os.symlink("/proc/self/fd", "/new/dev/fd")
    os.mkdir("/new/proc")
    _mount("proc", "/new/proc", kind="proc", flags=_NOSUID | _NODEV | _NOEXEC)
    os.mkdir("/new/tmp")
    _mount("tmpfs", "/new/tmp", kind="tmpfs", flags=_NOSUID | _NODEV, data=f"mode=1777,size={disk_bytes}")
    os.chdir("/new")
    _checked(_LIBC.pivot_root(b".", b"."), "pivot_root")
    _checked(_LIBC.umount2(b".", _DETACH), "umount2")
    os.chdir("/")
    _mount("", "/", flags=_REMOUNT | _BIND | _READ_ONLY | _NOSUID | _NODEV)
    os.chdir("/tmp")


def _bind(path: str, *, device: bool = False) -> None:
    """Shows `path` of the old root in the new one, a link as a link."""
    old, new = f"/old{path}", f"/new{path}"
    os.makedirs(os.path.dirname(new), exist_ok=True)
    if os.path.islink(old):
        os.symlink(os.readlink(old), new)
        return
    if os.path.isdir(old):
        os.makedirs(new, exist_ok=True)
    else:
        os.close(os.open(new, os.O_CREAT | os.O_WRONLY, 0o444))
    _mount(old, new, flags=_BIND | _REC)
    attributes = (ctypes.c_uint64 * 4)(_NOSUID | (0 if device else _READ_ONLY | _NODEV), 0, 0, 0)
    called = _LIBC.syscall(_MOUNT_SETATTR, _AT_FDCWD, new.encode(), _AT_RECURSIVE, attributes, 32)
    _checked(called, f"mount_setattr {path}")


def _mount(source: str, target: str, *, kind: str = "", flags: int = 0, data: str = "") -> None:
    given = [source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None]
    _checked(_LIBC.mount(*given), f"mount {kind or source} {target}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _checked(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def main() -> NoReturn:
    """Runs as a program of its own."""
    raise SystemExit(run(sys.argv[1], sys.argv[2:]))


if __name__ == "__main__":
    main()
