"""A program to test, the limits it runs under, and the verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

import xxhash

VerdictKind = Literal["pass", "fail", "timeout", "fault"]
VERDICTS: tuple[VerdictKind, ...] = get_args(VerdictKind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Code of a stranger, and the tests that judge it."""

    source: str
    """The tested code, which nobody trusts."""
    tests: str
    """Python that raises unless the tested code is right. It runs in a process of its own."""
    names: tuple[str, ...]
    """Functions of the tested code that the tests call."""
    setup: str = ""
    """Python that the tests need before: imports and helpers."""

    def key(self, limits: Limits) -> str:
        """A hash of all that the verdict depends on."""
        parts = [self.source, self.tests, self.setup, *self.names, repr(sorted(asdict(limits).items()))]
        return xxhash.xxh3_128_hexdigest("\0".join(parts).encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one program may use. A program beyond the time limits is a `timeout`, beyond the others a `fail`."""

    cpu_s: int = 5
    """CPU seconds of each process."""
    wall_s: float = 15.0
    """Seconds by the clock, without the start of the sandbox; above `cpu_s`, because a busy machine is no fault of the
    program."""
    memory_bytes: int = 1 << 30
    """Address space of each process, and resident memory of all together."""
    disk_bytes: int = 64 << 20
    """Of the private folder for temporary files, which is in memory."""
    file_bytes: int = 16 << 20
    output_bytes: int = 1 << 20
    """Written to standard output and standard error together."""
    processes: int = 32
    """Processes and threads."""
    open_files: int = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a program."""

    kind: VerdictKind
    """`fault`: the sandbox failed, which says nothing about the program; it is never scored."""
    detail: str = ""
    """Why, in one line of printable text."""
