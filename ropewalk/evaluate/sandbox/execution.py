"""Runs one program in a sandbox and returns its verdict."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import time
from dataclasses import dataclass

import orjson

from .inside.framed_pipe import send
from .inside.harness import READY
from .inside.plain_data import dump, load
from .isolation import Isolation
from .program import VERDICTS, Limits, Program, Verdict

START_S = 60.0
"""For the sandbox to start, however busy the machine is."""
_MOST_VERDICT_BYTES = 1 << 16
_TOLD_BYTES = 2000
"""Of what a sandbox that fails says about it."""


def run_program(program: Program, isolation: Isolation, limits: Limits) -> Verdict:
    """The verdict on `program`. Whatever it started has ended when this returns."""
    nonce = secrets.token_bytes(16)
    names = list(program.names)
    parts = (nonce, program.source, program.setup, program.tests, names)
    request = dump(parts, lambda value: 0)
    environment = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "HOME": "/tmp", "TMPDIR": "/tmp", "PATH": "/usr/bin"}
    pipe = subprocess.PIPE
    info, told = os.pipe()
    try:
        process = subprocess.Popen(
            isolation.command(limits, told),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=environment,
            start_new_session=True,
            pass_fds=(told,),
            bufsize=0,
        )
    except BaseException:
        os.close(info)
        raise
    finally:
        os.close(told)
    conversation = _Conversation(process, limits, info)
    try:
        return conversation.verdict(request, nonce)
    finally:
        conversation.end()


@dataclass(slots=True)
class _Conversation:
    """What is said to a harness and heard from it."""

    process: subprocess.Popen[bytes]
    limits: Limits
    info: int
    """Where bubblewrap tells the pid of the harness."""
    heard: bytes = b""
    """Of the harness."""
    told: bytes = b""
    """The beginning of standard error, of the sandbox before the program starts."""
    written: int = 0

    def verdict(self, request: bytes, nonce: bytes) -> Verdict:
        """Sends the program when the harness is ready, and waits for the verdict."""
        if not self._listen(START_S, until=READY):
            return Verdict("fault", f"the sandbox did not start: {printable(self.told) or 'it said nothing'}")
        self.heard, self.told, self.written = self.heard[len(READY) :], b"", 0
        assert self.process.stdin is not None
        try:
            # It stays open: at its end the harness ends too, also when this process is killed.
            send(self.process.stdin.fileno(), request)
        except BrokenPipeError:
            return Verdict("fault", "the sandbox ended before the program was sent")
        ended = self._listen(self.limits.wall_s)
        found = _read_verdict(self.heard, nonce)
        if found:
            return found
        if self.written > self.limits.output_bytes:
            return Verdict("fail", f"output limit of {self.limits.output_bytes} bytes")
        if not ended:
            return Verdict("timeout", f"time limit of {self.limits.wall_s:g} s")
        return Verdict("fault", f"the sandbox ended without a verdict: {printable(self.told)}")

    def _listen(self, seconds: float, *, until: bytes = b"") -> bool:
        """Reads until `until` is heard, or the harness has ended; False if it has not, or did not say `until`."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        out, err = self.process.stdout.fileno(), self.process.stderr.fileno()
        poll = select.poll()
        poll.register(out, select.POLLIN)
        poll.register(err, select.POLLIN)
        deadline = time.monotonic() + seconds
        open_files = {out, err}
        while out in open_files:
            left = deadline - time.monotonic()
            if left <= 0 or self.written > self.limits.output_bytes or len(self.heard) > _MOST_VERDICT_BYTES:
                return False
            for file, _ in poll.poll(1000 * left):
                data = os.read(file, 1 << 16)
                if not data:
                    open_files.discard(file)
                    poll.unregister(file)
                elif file == out:
                    self.heard += data
                else:
                    self.written += len(data)
                    self.told = (self.told + data)[-_TOLD_BYTES:]
            if until and self.heard.startswith(until):
                return True
        return not until

    def end(self) -> None:
        """Kills the sandbox, with all in it, and reaps it."""
        with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            if self.process.poll() is None and (pid := self._harness_pid()):
                os.kill(pid, signal.SIGKILL)
                self.process.wait(1)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.info)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()

    def _harness_pid(self) -> int | None:
        """The harness under bubblewrap; it is a child that bubblewrap has not reaped yet."""
        if not select.select([self.info], [], [], 0)[0]:
            return None
        try:
            return int(orjson.loads(os.read(self.info, 1 << 12))["child-pid"])
        except (ValueError, KeyError, TypeError):
            return None


def _read_verdict(heard: bytes, nonce: bytes) -> Verdict | None:
    """The verdict in the bytes from the harness, if it bears the nonce."""
    try:
        said = load(heard[4:], lambda number: None)
        own, kind, detail = said
    except Exception:
        return None
    if not (isinstance(own, bytes) and secrets.compare_digest(own, nonce) and kind in VERDICTS):
        return None
    return Verdict(kind, printable(detail))


def printable(text: str | bytes) -> str:
    """Text of a stranger in one line, without characters that a terminal obeys."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "\ufffd" for c in line)[:500]
