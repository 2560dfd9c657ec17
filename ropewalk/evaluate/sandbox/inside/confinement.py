"""What a process gives up before it runs code of strangers: uid, capabilities, resources and system calls.

Namespaces hide files, processes and the network (`bwrap`, inside/own_namespaces.py). This file bounds what is left: the
limits of processes and the kernel's surface.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Mapping

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SIGKILL = 9


def drop_root(uid: int) -> None:
    """Becomes the user `uid`, for good; OSError if a root that no limit of processes binds would be left."""
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:
        # In a user namespace with a single uid, root is an ordinary user outside, whom limits bind.
        with open("/proc/self/uid_map") as file:
            if int(file.read().split()[1]) == 0:
                raise


def drop_capabilities() -> None:
    """Gives up all capabilities; no program that is executed gets any."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("=Ii", 0x20080522, 0)
    if _LIBC.capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "capset")


def hide_from_others() -> None:
    """Lets no process of the same user trace this one, read its memory or open its files through /proc."""
    _prctl(_PR_SET_DUMPABLE, 0)


def die_first() -> None:
    """Has the kernel kill this process before others when the machine is out of memory."""
    _prctl(_PR_SET_DUMPABLE, 1)  # a process that changed its user cannot write its own settings
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # no /proc: then the machine decides by itself
        return


def die_with_parent() -> None:
    """Has the kernel kill this process when the one that started it ends. Changing the uid undoes it."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def limit_resources(limits: Mapping[str, int]) -> None:
    """Sets the limits of one process, hard ones too."""
    for kind, name in _LIMITS.items():
        if (value := limits.get(name, 0)) or kind == resource.RLIMIT_CORE:
            # The soft CPU limit ends a program by SIGXCPU, the hard one a program that ignores that signal.
            resource.setrlimit(kind, (value, value + 1 if kind == resource.RLIMIT_CPU else value))


_LIMITS = {
    resource.RLIMIT_CPU: "cpu_s",
    resource.RLIMIT_AS: "memory_bytes",
    resource.RLIMIT_FSIZE: "file_bytes",
    resource.RLIMIT_NPROC: "user_processes",
    resource.RLIMIT_NOFILE: "open_files",
    resource.RLIMIT_CORE: "core_bytes",
}


def forbid_system_calls() -> bool:
    """Makes calls fail that a program has no need of: to trace, mount, make namespaces, load code into the kernel, and
    memory that no limit counts. False on a machine other than x86-64 and arm64."""
    machine = os.uname().machine
    if machine not in _MACHINES or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    program = _filter(*_MACHINES[machine])
    code = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, 2, ctypes.create_string_buffer(pointer, len(pointer)))
    return True


def _prctl(option: int, *arguments: object) -> None:
    given = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    if _LIBC.prctl(option, *given, *[ctypes.c_ulong(0)] * (4 - len(given))):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


# Call numbers on x86-64 (asm/unistd_64.h) and arm64 (asm-generic/unistd.h).
_CALLS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "fanotify_init": (300, 262),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
# (audit architecture, column of _CALLS, numbers of clone, clone3, socket and socketpair)
_MACHINES = {
    "x86_64": (0xC000003E, 0, (56, 435, 41, 53)),
    "aarch64": (0xC00000B7, 1, (220, 435, 198, 199)),
}
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_NEW_NAMESPACES = 0x02000000 | 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_FAMILIES = (1, 2, 10)
"""Unix, IPv4 and IPv6, which a network namespace confines; vsock, for one, reaches the host of a virtual machine."""
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def _filter(architecture: int, column: int, special: tuple[int, int, int, int]) -> bytes:
    """The filter as a program of the kernel's packet-filter machine (linux/filter.h)."""
    clone, clone3, socket, socketpair = special
    lines = [
        _line(_LOAD, 4),
        _line(_EQUAL, architecture, 1, 0),
        _line(_RETURN, _KILL),  # calls of another architecture have other numbers
        _line(_LOAD, 0),
        _line(_AT_LEAST, 0x40000000, 0, 1),  # so have those of x32
        _line(_RETURN, _ERROR | _EPERM),
    ]
    for numbers in _CALLS.values():
        lines += [_line(_EQUAL, numbers[column], 0, 1), _line(_RETURN, _ERROR | _EPERM)]
    # The flags of clone3 lie in memory, which a filter cannot read; without it the C library uses clone.
    lines += [_line(_EQUAL, clone3, 0, 1), _line(_RETURN, _ERROR | _ENOSYS)]
    lines += [
        _line(_EQUAL, clone, 0, 4),
        _line(_LOAD, 16),
        _line(_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        _line(_RETURN, _ERROR | _EPERM),
        _line(_RETURN, _ALLOW),
    ]
    for number in (socket, socketpair):
        lines += [_line(_EQUAL, number, 0, 3 + len(_FAMILIES)), _line(_LOAD, 16)]
        lines += [_line(_EQUAL, family, len(_FAMILIES) - index, 0) for index, family in enumerate(_FAMILIES)]
        lines += [_line(_RETURN, _ERROR | _EAFNOSUPPORT), _line(_RETURN, _ALLOW)]
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
