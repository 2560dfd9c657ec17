"""Attempts to leave the sandbox, to exhaust the machine, or to forge a verdict, and the verdicts that they must get.

`ropewalk code check` runs them, and so do the tests. An attempt that only looks or reaches out returns what it got, and
must get nothing: its verdict is `pass`. Attempts on resources and verdicts must fail or run out of time.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from .program import Program, VerdictKind

_PRELUDE = """
import ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
tmp, home = "/tmp", "/home"
def tried(call, *arguments):
    try:
        return call(*arguments)
    except Exception:
        return None
def read(path, size=64):
    return tried(lambda: open(path, "rb").read(size))
def connect(family, address, kind=socket.SOCK_STREAM):
    def call():
        one = socket.socket(family, kind)
        one.settimeout(0.5)
        one.connect(address)
        one.send(b"x")
        return "connected"
    return tried(call)
"""
_NOTHING = "assert not attempt(), attempt()\n"
_ANSWER = "assert attempt() == 42\n"
"""What no attempt of this kind computes."""


@dataclass(frozen=True, slots=True)
class Escape:
    """One attempt."""

    name: str
    program: Program
    verdicts: tuple[VerdictKind, ...]
    """The right ones."""


def _escape(name: str, code: str, tests: str, *verdicts: VerdictKind) -> Escape:
    body = textwrap.dedent(code).strip("\n")
    if "def attempt" not in body:
        body = "def attempt():\n" + textwrap.indent(body, "    ")
    source = f"{_PRELUDE}\n{body}\n"
    return Escape(name, Program(source=source, tests=tests, names=("attempt",)), verdicts)


_LOOKS = {
    "TCP to another machine": 'return connect(socket.AF_INET, ("192.0.2.1", 80))',
    "TCP to services of this machine": """
        return [port for port in (22, 25, 53, 80, 443, 631, 2375, 5432, 6379, 8080, 9090)
                if connect(socket.AF_INET, ("127.0.0.1", port))]""",
    "UDP": 'return connect(socket.AF_INET, ("192.0.2.1", 53), socket.SOCK_DGRAM)',
    "IPv6": 'return connect(socket.AF_INET6, ("2001:db8::1", 80)) or connect(socket.AF_INET6, ("::1", 80))',
    "DNS": 'return tried(socket.getaddrinfo, "example.com", 80)',
    "network interfaces": """
        return [line for line in open("/proc/net/dev").read().splitlines()[2:] if "lo:" not in line]""",
    "raw packets": """
        return (tried(socket.socket, socket.AF_PACKET, socket.SOCK_RAW) or tried(socket.socket, socket.AF_NETLINK)
                or tried(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1))""",
    "host of a virtual machine (vsock)": "return tried(socket.socket, 40, socket.SOCK_STREAM)",
    "Docker socket": """
        return [path for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock",
                "/run/dbus/system_bus_socket", f"{tmp}/.X11-unix/X0") if connect(socket.AF_UNIX, path)]""",
    "abstract sockets of others": 'return tried(lambda: open("/proc/net/unix").read().splitlines()[1:])',
    "accounts and passwords": 'return read("/etc/passwd") or read("/etc/shadow") or read("/etc/hostname")',
    "home folders": """
        homes = [f"{home}/{name}" for name in tried(os.listdir, home) or ()] + ["/root"]
        wanted = (".ssh", ".bashrc", ".profile", ".netrc", ".aws", ".cache", ".config", ".bash_history")
        return [f"{one}/{name}" for one in homes for name in wanted if os.path.lexists(f"{one}/{name}")]""",
    "other folders of the host": """
        return [name for name in ("/var", "/opt", "/srv", "/mnt", "/run", "/sys", "/boot", "/home", "/data")
                if tried(os.listdir, name)]""",
    "file of the host through /proc/1/root": """
        return tried(os.listdir, "/proc/1/root") or read("/proc/1/root/etc/passwd")""",
    "environment of others": """
        return [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()
                and read(f"/proc/{pid}/environ")]""",
    "memory of the harness": 'return tried(open, "/proc/1/mem", "rb") or tried(os.listdir, "/proc/1/fd")',
    "processes of the host": """
        return [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (1, os.getpid())]""",
    "secrets in the environment": """
        return [name for name in os.environ if name not in ("HOME", "LANG", "LC_CTYPE", "PATH", "PWD", "PYTHONHASHSEED",
                "TMPDIR")]""",
    "inherited files": """
        import stat
        kinds = [os.fstat(int(name)).st_mode for name in os.listdir("/proc/self/fd") if tried(os.fstat, int(name))]
        return [kind for kind in kinds if stat.S_ISSOCK(kind) or stat.S_ISREG(kind) or stat.S_ISBLK(kind)]""",
    "reading from standard input": "return os.read(0, 100)",
    "writing to the root": """
        library = os.path.dirname(os.__file__)
        return [path for path in ("/x", "/usr/lib/x", "/dev/x", "/etc/x", "/proc/x", f"{library}/x")
                if tried(open, path, "w")]""",
    "changing the harness": """
        import inside.harness
        return tried(open, inside.harness.__file__, "a") or tried(os.unlink, inside.harness.__file__)""",
    "symbolic link to a file of the host": """
        os.symlink("/etc/shadow", f"{tmp}/link")
        os.symlink("../../../../../../etc/passwd", f"{tmp}/up")
        return read(f"{tmp}/link") or read(f"{tmp}/up") or tried(os.link, os.__file__, f"{tmp}/hard")""",
    "device files": """
        return (tried(os.mknod, f"{tmp}/disk", 0o60600, os.makedev(254, 0)) or read("/dev/mem") or read("/dev/kmsg")
                or read("/dev/sda") or read("/dev/vda") or read("/dev/fuse") or read("/dev/kvm"))""",
    "settings of the kernel": """
        return [path for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger",
                "/proc/sys/vm/drop_caches", "/proc/1/oom_score_adj") if tried(open, path, "w")]""",
    "mount": """
        got = libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0 or libc.umount2(b"/tmp", 2) == 0
        return got or libc.mount(b"", b"/", None, 32 | 4096, None) == 0 or libc.syscall(428, -100, b"/", 1) >= 0""",
    "chroot": 'return tried(lambda: [os.chroot("/tmp")])',
    "namespaces of its own": """
        return [flag for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000) if libc.unshare(flag) == 0]""",
    "namespaces of the harness": """
        return [name for name in ("net", "mnt", "pid", "user") if tried(
                lambda: libc.setns(os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0) == 0)]""",
    "becoming root": """
        for call in (os.setuid, os.seteuid, os.setgid):
            tried(call, 0)
        return os.getuid() == 0 or os.geteuid() == 0 or tried(lambda: [os.setgroups([0])])""",
    "programs that become root": """
        return [path for path in ("/bin/su", "/usr/bin/sudo", "/usr/bin/passwd", "/usr/bin/mount")
                if tried(os.stat, path)]""",
    "capabilities": """
        lines = open("/proc/self/status").read().splitlines()
        sets = [line.split() for line in lines if line.startswith(("CapPrm", "CapEff", "CapAmb"))]
        return [name for name, bits in sets if int(bits, 16)]""",
    "tracing the harness": "return libc.ptrace(16, 1, 0, 0) == 0 or libc.ptrace(0x4206, 1, 0, 0) == 0",
    "files of the harness by pidfd": """
        pidfd = tried(os.pidfd_open, 1)
        return pidfd is not None and [n for n in range(8) if libc.syscall(438, pidfd, n, 0) >= 0]""",
    "reading another process": """
        import ctypes
        class Span(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
        data = ctypes.create_string_buffer(8)
        here, there = Span(ctypes.addressof(data), 8), Span(ctypes.addressof(data), 8)
        return libc.process_vm_readv(1, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0""",
    "io_uring, userfaultfd and bpf": """
        numbers = {"x86_64": (425, 323, 321), "aarch64": (425, 282, 280)}.get(os.uname().machine, ())
        return [number for number in numbers if libc.syscall(number, 0, 0, 0) >= 0 or ctypes.get_errno() == 14]""",
    "killing its parent": "for signal_ in (9, signal.SIGSTOP):\n    tried(os.kill, os.getppid(), signal_)",
    "interrupting the harness": "for number in range(1, 65):\n    tried(os.kill, 1, number)",
    "raising its limits": """
        import resource
        kinds = [getattr(resource, name) for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE")]
        return [kind for kind in kinds if tried(lambda: [resource.setrlimit(kind, (-1, -1))])]""",
    "the tests in its memory": """
        import gc
        wanted = "assert not att" + "empt()"
        seen = [str(each)[:4000] for each in gc.get_objects() if isinstance(each, (dict, list, tuple, str))]
        frame, frames = sys._getframe(), []
        while frame:
            frames.append(str(frame.f_locals)[:4000])
            frame = frame.f_back
        return [text for text in (*seen, *frames) if wanted in text]""",
}
"""Attempts that look or reach out, and get nothing."""

_BOUNDED: tuple[VerdictKind, ...] = ("fail", "timeout")
"""Whichever limit it meets first: a busy machine is slow to fill memory."""

_ENDS: dict[str, tuple[str, tuple[VerdictKind, ...]]] = {
    "fork bomb": (
        """
        while True:
            tried(os.fork)""",
        _BOUNDED,
    ),
    "thread bomb": (
        """
        import threading
        while True:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()""",
        _BOUNDED,
    ),
    "memory in a list": ("held = []\nwhile True:\n    held.append(bytearray(1 << 20))", _BOUNDED),
    "memory by mmap": (
        """
        import mmap
        held = []
        while True:
            held.append(mmap.mmap(-1, 1 << 24))
            held[-1].write(b"x" * (1 << 24))""",
        _BOUNDED,
    ),
    "memory of many processes": (
        """
        for _ in range(8):
            if os.fork() == 0:
                held = bytearray(b"x" * (100 << 20))
                time.sleep(60)
        time.sleep(60)""",
        _BOUNDED,
    ),
    "memory files": (
        "held = []\nwhile True:\n    held.append(os.memfd_create('x'))\n    os.write(held[-1], b'x' * (8 << 20))",
        _BOUNDED,
    ),
    "filling the disk": (
        """
        for number in range(1 << 20):
            with open(f"{tmp}/{number}", "wb") as file:
                file.write(bytes(8 << 20))""",
        _BOUNDED,
    ),
    "a huge file": ("file = open(f'{tmp}/x', 'wb')\nwhile True:\n    file.write(bytes(1 << 20))", _BOUNDED),
    "countless files": ("for n in range(1 << 30):\n    os.mkdir(f'{tmp}/{n}')", _BOUNDED),
    "countless open files": ("held = []\nwhile True:\n    held.append(os.dup(2))", _BOUNDED),
    "endless output": ("while True:\n    os.write(1, b'x' * 65536)", _BOUNDED),
    "endless loop": ("while True:\n    pass", ("timeout",)),
    "endless loop on import": ("while True:\n    pass\ndef attempt():\n    pass", ("timeout",)),
    "sleep": ("time.sleep(1000)", ("timeout",)),
    "ignoring the time limit": (
        "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass",
        ("timeout",),
    ),
    "endless recursion": (
        "sys.setrecursionlimit(1 << 30)\ndef f(n):\n    return [f(n + 1)]\nreturn f(0)",
        _BOUNDED,
    ),
    "zip bomb": (
        "import zlib\ndata = zlib.compress(bytes(1 << 24))\nheld = [zlib.decompress(data) for _ in range(1000)]",
        _BOUNDED,
    ),
    "killing everybody": ("os.kill(-1, 9)\nreturn 0", ("fail",)),
    "killing its group": ("os.killpg(0, 9)", ("fail",)),
    "a daemon that outlives it": (
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(1000)
            os._exit(0)
        os._exit(0)""",
        ("fail",),
    ),
    "os._exit(0)": ("os._exit(0)", ("fail",)),
    "os._exit(0) on import": ("os._exit(0)\ndef attempt():\n    pass", ("fail",)),
    "sys.exit(0)": ("sys.exit(0)", ("fail",)),
    "sys.exit(0) on import": ("sys.exit(0)\ndef attempt():\n    pass", ("fail",)),
    "SystemExit in a thread": (
        """
        import threading
        thread = threading.Thread(target=sys.exit)
        thread.start()
        thread.join()""",
        ("fail",),
    ),
    "BaseException": ("class Passed(BaseException):\n    pass\nraise Passed('ok')", ("fail",)),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", ("fail",)),
    "atexit": ("import atexit\natexit.register(os._exit, 0)\nsys.exit(0)", ("fail",)),
    "a destructor that raises": (
        "class Late:\n    def __del__(self):\n        os._exit(0)\nlate = Late()\nreturn late and 0",
        ("fail",),
    ),
    "another program in its place": ("os.execv(sys.executable, ['python', '-c', 'pass'])", ("fail",)),
    "a crash": ("import ctypes\nctypes.string_at(0)", ("fail",)),
    "a crash with a fault handler": (
        "import faulthandler\nfaulthandler.enable()\nfaulthandler._sigsegv()",
        ("fail",),
    ),
    "abort": ("os.abort()", ("fail",)),
    "text that says it passed": (
        "print('ready\\npassed\\npass', flush=True)\nprint('pass', file=sys.stderr, flush=True)\nreturn 'pass'",
        ("fail",),
    ),
    "a verdict on every file": (
        """
        from inside.plain_data import dump
        data = dump((bytes(16), "pass", ""), lambda value: 0)
        for file in range(64):
            tried(os.write, file, len(data).to_bytes(4, "big") + data)
        time.sleep(0.1)
        os._exit(0)""",
        ("fail",),
    ),
    "closing every file": ("os.closerange(0, 1 << 16)\nreturn 42", ("fail",)),
    "an answer equal to everything": (
        """
        class Equal:
            def __eq__(self, other):
                return True
            def __getattr__(self, name):
                return self
        return Equal()""",
        ("fail",),
    ),
    "a number that lies": (
        """
        class Lie(int):
            __eq__ = lambda self, other: True
            __int__ = __index__ = lambda self: 42
            __hash__ = None
        return Lie(0)""",
        ("fail",),
    ),
    "built-ins replaced": (
        """
        import builtins
        builtins.AssertionError = type("Nothing", (BaseException,), {})
        builtins.__build_class__ = builtins.isinstance = builtins.len = builtins.all = lambda *a, **k: True
        return 0""",
        ("fail",),
    ),
    "the harness in its own memory replaced": (
        """
        import inside.harness, inside.framed_pipe, inside.plain_data
        inside.harness._judge = lambda *a: ("pass", "")
        inside.plain_data.load = inside.framed_pipe.receive = lambda *a: ("value", 42, ())
        return 0""",
        ("fail",),
    ),
    "a trace of every line": (
        "sys.settrace(lambda *a: os._exit(0))\nreturn (lambda: 0)()",
        ("fail",),
    ),
    "answers in disorder": (
        """
        for file in range(3, 64):
            tried(os.write, file, os.urandom(4096))
        return 0""",
        _BOUNDED,
    ),
    "an answer without end": ("return 'x' * (100 << 20)", _BOUNDED),
    "an answer without bottom": (
        """
        from inside import framed_pipe
        data = b"l\\0\\0\\0\\1" * 1000000 + b"N"
        for file in range(3, 64):
            tried(framed_pipe.send, file, data)
        return 0""",
        _BOUNDED,
    ),
    "a fault of the sandbox feigned": (
        "os.write(2, b'the sandbox did not start')\nos.kill(os.getpid(), 9)",
        ("fail",),
    ),
    "MemoryError feigned": ("raise MemoryError", ("fail",)),
}
"""Attempts on resources and verdicts, and what they must come to."""

ESCAPES = (
    *(_escape(name, code, _NOTHING, "pass") for name, code in _LOOKS.items()),
    *(_escape(name, code, _ANSWER, *verdicts) for name, (code, verdicts) in _ENDS.items()),
    # One call of C code, during which no other thread of the harness runs.
    _escape(
        "an answer that takes forever to compare", "return range(1 << 62)", "assert sum(attempt()) == 42\n", "timeout"
    ),
)
