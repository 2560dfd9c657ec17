"""Ways to isolate a program: bubblewrap, namespaces of our own, or (where the user insists) none.

Each is a command that starts the harness (inside/harness.py) in a read-only root with Python's own files, without
network, in which nothing outside is seen or can be written. The harness does the rest.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ropewalk.base.errors import UserError

from .inside import own_namespaces
from .program import Limits, Program, Verdict

SandboxChoice = Literal["auto", "bubblewrap", "namespaces", "none"]
"""`auto` takes the first that works of bubblewrap and namespaces, and refuses where neither does."""
_FOLDER = "/sandbox"
"""Where the folder `inside` is seen."""
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.{0} import {1}; {1}({2})"
_UNUSED = "65534"


@dataclass(frozen=True, slots=True)
class Isolation:
    """One way to isolate."""

    name: SandboxChoice
    command: Callable[[Limits, int], list[str]]
    """The command line that starts a harness. The other argument is a file to which bubblewrap writes the pid of the
    harness: root must end it itself, because bubblewrap without capabilities cannot end a process of another user."""


def available(name: SandboxChoice) -> Isolation | str:
    """The isolation of that name, or why this machine has none. It is not tried."""
    if sys.platform != "linux":
        return "it needs Linux"
    if name == "none":
        return Isolation(name, _no_isolation)
    if name == "bubblewrap" and not shutil.which("bwrap"):
        return "the program `bwrap` is not installed (on Debian and Ubuntu: apt-get install bubblewrap)"
    return Isolation(name, _bubblewrap if name == "bubblewrap" else _own_namespaces)


def choose(choice: SandboxChoice, run: Callable[[Isolation], Verdict]) -> Isolation:
    """The isolation to use, after `run` has run a program in it; UserError if none works."""
    names: tuple[SandboxChoice, ...] = ("bubblewrap", "namespaces") if choice == "auto" else (choice,)
    reasons = []
    for name in names:
        found = available(name)
        if isinstance(found, str):
            reasons.append(f"{name}: {found}")
            continue
        verdict = run(found)
        if verdict.kind == "pass":
            return found
        reasons.append(f"{name}: {verdict.detail or verdict.kind}")
    remedy = (
        'install bubblewrap, or allow user namespaces; `evaluate.sandbox = "none"` runs the code without protection, '
        "with your rights"
    )
    raise UserError(f"no sandbox for generated code works here ({'; '.join(reasons)}); {remedy}")


TRIAL = Program(source="def add(a, b):\n    return a + b\n", tests="assert add(2, 3) == 5\n", names=("add",))
"""Shows that a sandbox works."""


def _bubblewrap(limits: Limits, info: int) -> list[str]:
    # Root keeps out of a user namespace: there it would stay root outside, whose processes no limit binds. With two
    # capabilities the harness becomes an unused user instead.
    root = os.geteuid() == 0
    who = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    who = who if root else ["--unshare-user", "--uid", _UNUSED, "--gid", _UNUSED]
    spaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    paths = readable_paths()
    parents = {str(parent) for path in (*paths, "/dev/null", f"{_FOLDER}/inside") for parent in Path(path).parents}
    mounts: list[str] = []
    for folder in sorted(parents - {"/"}):  # else only root may enter them
        mounts += ["--perms", "0755", "--dir", folder]
    mounts += ["--ro-bind", str(_INSIDE), f"{_FOLDER}/inside"]
    for path in paths:
        link = os.path.islink(path)
        mounts += ["--symlink", os.readlink(path), path] if link else ["--ro-bind", path, path]
    for device in own_namespaces.DEVICES:
        mounts += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    mounts += ["--symlink", "/tmp", "/dev/shm", "--symlink", "/proc/self/fd", "/dev/fd", "--proc", "/proc"]
    mounts += ["--size", str(limits.disk_bytes), "--perms", "1777", "--tmpfs", "/tmp", "--remount-ro", "/"]
    guard = ["--info-fd", str(info), "--as-pid-1", "--die-with-parent", "--new-session", "--chdir", "/tmp"]
    program = shutil.which("bwrap") or "bwrap"
    harness = _python("harness", "start", "sys.argv[1]", _FOLDER)
    return [program, *who, *spaces, *mounts, *guard, "--", *harness, _told(limits, uid=_unused_uid() if root else 0)]


def _own_namespaces(limits: Limits, info: int) -> list[str]:
    uid = _unused_uid() if os.geteuid() == 0 else 0
    launcher = _python("own_namespaces", "main", "", str(_INSIDE.parent))
    return [*launcher, _told(limits, uid=uid), *readable_paths()]


def _no_isolation(limits: Limits, info: int) -> list[str]:
    return [*_python("harness", "start", "sys.argv[1]", str(_INSIDE.parent)), _told(limits, uid=0, alone=False)]


_INSIDE = Path(own_namespaces.__file__).parent


def _python(module: str, function: str, arguments: str, folder: str) -> list[str]:
    """Python's own command line; no site-packages, no byte code to write."""
    program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return [program, "-s", "-S", "-B", "-X", "utf8", "-c", _START.format(module, function, arguments), folder]


def _told(limits: Limits, *, uid: int, alone: bool = True) -> str:
    """Limits as the harness reads them; `alone` in a namespace it may kill everything that it sees."""
    # Before Linux 5.14 the limit counts all processes of the user, those outside too.
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    bound = limits.processes if uid or release >= (5, 14) else 0
    numbers = {
        "alone": int(alone),
        "uid": uid,
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_bytes,
        "disk_bytes": limits.disk_bytes,
        "file_bytes": limits.file_bytes,
        "processes": limits.processes,
        "user_processes": bound,
        "open_files": limits.open_files,
        "harness_s": int(limits.wall_s) + 60,
    }
    return ",".join(f"{name}={number}" for name, number in numbers.items())


def readable_paths() -> Sequence[str]:
    """What a program may read: Python and the libraries of the system. Parents come before what they hold."""
    prefix = os.path.realpath(sys.base_prefix)
    python = [prefix]
    if prefix in ("/", "/usr", "/usr/local"):
        program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        python = [program, *(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))]
    libraries = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache"]
    found: list[str] = []
    for path in [*libraries, *python]:
        seen = any(path == each or path.startswith(f"{each}/") for each in found)
        if os.path.lexists(path) and not seen:
            found.append(path)
    return found


_FIRST_UID, _SLOTS = 0x60000000, 256
_turn, _turn_lock = itertools.count(), threading.Lock()


def _unused_uid() -> int:
    """A user that nobody is: different for the programs that this machine runs at a time, so that each has its own
    count of processes."""
    with _turn_lock:
        slot = next(_turn) % _SLOTS
    uid = _FIRST_UID + os.getpid() * _SLOTS + slot
    with open("/proc/self/uid_map") as file:
        inside, _, count = (int(part) for part in file.readline().split())
    # A container may have few users: one of the last.
    return uid if uid < inside + count else max(1, inside + count - 2 - uid % min(4096, max(1, count // 2)))
