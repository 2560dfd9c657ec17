"""The first process of a sandbox: holds the tests, asks the tested code for answers, and reports the verdict.

It forks the process of the tested code (inside/candidate.py) before it reads what must stay secret: tests, expected
answers and the nonce that authenticates the verdict. The two share two pipes of plain data and nothing else, so that
tests compare answers in an interpreter where no tested code has run. As process 1 of its namespace it cannot be
signalled or traced from inside, and when it ends the kernel kills every other process there.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes 3 ms to import
import _thread
import builtins
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .candidate import CONFINED, serve
from .confinement import die_with_parent, drop_capabilities, drop_root, hide_from_others, limit_resources
from .framed_pipe import receive, send
from .plain_data import dump, load

READY = b"ready\n"
_TESTS = "tests"
_WATCH_S = 0.02
_PRIVATE = "/tmp"
_MOST_FILES = 10_000
"""Of the private folder: the kernel's memory for them has no other limit."""
_SIGKILL, _SIGXCPU = 9, 24


class CandidateError(Exception):
    """An exception of the tested code whose class tests do not know."""


class _Gone(BaseException):
    """The tested code answers no more, whatever tests catch: `kind` and `detail` of the verdict."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail


class _Unsupported(BaseException):
    """The tests ask for what cannot be done across processes; the tested code has no part in it."""


class Opaque:
    """An object of the tested code that is no plain data. It can be passed back, called, read, changed and iterated
    over, and equals only itself."""

    def __init__(self, candidate: _Candidate, number: int) -> None:
        # Attributes live with the tested code, but for these.
        object.__setattr__(self, "_candidate", candidate)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._candidate.ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._candidate.ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._candidate.ask("set", self, name, value)

    def __iter__(self) -> Any:
        return self._candidate.ask("iterate", self)

    def __next__(self) -> Any:
        more, value = self._candidate.ask("next", self)
        if not more:
            raise StopIteration
        return value


class _Candidate:
    """The tested code as the tests see it."""

    def __init__(self, pid: int, requests: int, answers: int, limits: Mapping[str, int]) -> None:
        self._pid, self._requests, self._answers, self._limits = pid, requests, answers, limits
        self._ended: tuple[str, str] | None = None
        self.opaque = False
        """Whether an answer was no plain data."""
        self._alone = bool(limits["alone"])

    def ask(self, kind: str, *what: Any) -> Any:
        """The answer to a request; raises what the tested code raised."""
        try:
            send(self._requests, dump((kind, *what), self._number_of))
            data = receive(self._answers)
            if data is None:
                raise EOFError
            answer = load(data, self._object_of)
        except _Unsupported:
            raise
        except (EOFError, BrokenPipeError):
            raise self._gone() from None
        except (Exception, RecursionError, MemoryError) as error:
            raise _Gone("fail", f"the answer cannot be read: {error}") from None
        if isinstance(answer, tuple) and len(answer) == 3 and answer[0] == "value":
            if kind == "call":
                _restore(what[1], answer[2])
            return answer[1]
        if isinstance(answer, tuple) and len(answer) == 4 and answer[0] == "raised":
            raise _error(*answer[1:])
        raise _Gone("fail", "the answer cannot be read")

    def function(self, name: str) -> Callable[..., Any]:
        """A function of the tested code, to be called by tests."""

        def call(*arguments: Any, **named: Any) -> Any:
            return self.ask("call", name, arguments, named)

        call.__name__ = name
        return call

    def watch(self) -> None:
        """Reaps processes and ends them all when the tested code ends or takes more than its share."""
        while self._ended is None:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                pid, status, usage = self._pid, 0, None
            if pid == self._pid:
                seconds = usage.ru_utime + usage.ru_stime if usage else 0.0
                self._end(*self._reason(status, seconds))
            elif not pid:
                excess = self._excess()
                if excess:
                    self._end("fail", excess)
                time.sleep(_WATCH_S)

    def _reason(self, status: int, seconds: float) -> tuple[str, str]:
        if not os.WIFSIGNALED(status):
            return "fail", f"the program ended itself with exit status {os.waitstatus_to_exitcode(status)}"
        signal = os.WTERMSIG(status)
        if signal == _SIGXCPU or (signal == _SIGKILL and seconds >= self._limits["cpu_s"]):
            return "timeout", f"CPU time limit of {self._limits['cpu_s']} s"
        return "fail", f"the program was ended by signal {signal}"

    def _end(self, kind: str, detail: str) -> None:
        self._ended = self._ended or (kind, detail)
        self._kill_all()

    def _kill_all(self) -> None:
        try:
            os.kill(-1 if self._alone else -self._pid, _SIGKILL)
        except OSError:  # nobody is left
            return

    def _excess(self) -> str:
        """What all processes together take too much of."""
        if not self._alone:
            return ""
        try:
            pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        except OSError:
            return ""
        if len(pids) > 2 * self._limits["processes"]:
            return f"more than {self._limits['processes']} processes"
        used = sum(map(_resident_bytes, pids))
        if used > self._limits["memory_bytes"]:
            return f"memory limit of {self._limits['memory_bytes']} bytes"
        files = os.statvfs(_PRIVATE)
        if files.f_files - files.f_ffree > _MOST_FILES:
            return f"more than {_MOST_FILES} files"
        return ""

    def _gone(self) -> _Gone:
        """Why the tested code answers no more. It may have closed its pipe and live on."""
        deadline = time.monotonic() + 0.5
        while self._ended is None and time.monotonic() < deadline:
            time.sleep(0.001)
        self._kill_all()
        return _Gone(*(self._ended or ("fail", "the program closed its pipe")))

    def _number_of(self, value: Any) -> int:
        if isinstance(value, Opaque):
            return value._number
        raise _Unsupported(f"tests pass a {type(value).__name__}, which is no plain data")

    def _object_of(self, number: int) -> Opaque:
        self.opaque = True
        return Opaque(self, number)


def main(limits: Mapping[str, int]) -> NoReturn:
    """Runs one program in the sandbox that this process stands in: reads it from standard input once it has said that
    it is ready, and writes the verdict to standard output."""
    if limits["alone"] and os.getpid() != 1:
        raise SystemExit("the harness is not the first process of a namespace")
    # A first process gets only signals that it handles: none from inside.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    if limits["uid"]:
        drop_root(limits["uid"])
    die_with_parent()
    drop_capabilities()
    asked, answered = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(asked[1])
        os.close(answered[0])
        serve(asked[0], answered[1], limits)
    os.close(asked[0])
    os.close(answered[1])
    hide_from_others()
    limit_resources({"cpu_s": limits["harness_s"]})
    if receive(answered[0]) != CONFINED:
        os._exit(1)
    os.write(1, READY)
    message = receive(0)
    if message is None:
        os._exit(1)
    nonce, source, setup, tests, names = load(message, lambda number: None)
    candidate = _Candidate(pid, asked[1], answered[0], limits)
    _thread.start_new_thread(candidate.watch, ())
    _thread.start_new_thread(_end_with_input, ())
    verdict = _judge(candidate, source, setup, tests, names)
    send(1, dump((nonce, *verdict), lambda value: 0))
    os._exit(0)


def _end_with_input() -> None:
    """Ends all when the other end of standard input is closed: whoever wants the verdict is gone."""
    os.read(0, 1)
    os._exit(1)


def _judge(candidate: _Candidate, source: str, setup: str, tests: str, names: list[str]) -> tuple[str, str]:
    """The verdict and its reason."""
    scope: dict[str, Any] = {"__name__": _TESTS}
    try:
        exec(compile(setup, "<setup>", "exec"), scope)
        code = compile(tests, f"<{_TESTS}>", "exec")
    except Exception as error:
        return "fault", f"the problem's own code fails: {_described(error)}"
    try:
        candidate.ask("load", source)
        scope.update({name: candidate.function(name) for name in names})
        exec(code, scope)
    except _Gone as gone:
        return gone.kind, gone.detail
    except _Unsupported as error:
        return "fault", str(error)
    except BaseException as error:
        hint = "; an answer was an object other than plain data" if candidate.opaque else ""
        return "fail", _described(error) + _failing_line(error, tests) + hint
    return "pass", ""


def _described(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _failing_line(error: BaseException, tests: str) -> str:
    """The line of the tests where `error` was raised."""
    lines, found, trace = tests.splitlines(), "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == f"<{_TESTS}>" and 0 < trace.tb_lineno <= len(lines):
            found = f" at `{lines[trace.tb_lineno - 1].strip()[:200]}`"
        trace = trace.tb_next
    return found


def _error(name: str, text: str, catchable: bool) -> BaseException:
    """An exception of the tested code, of the built-in class of that name where there is one."""
    told = f"{name}: {text}" if text else name
    if not catchable:
        return _Gone("fail", told)
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except Exception:
            pass  # a class with other arguments, such as UnicodeDecodeError
    return CandidateError(told)


def _restore(before: Any, after: Any) -> None:
    """Changes arguments in place as the tested code has changed its copies."""
    if isinstance(before, (list, tuple)) and type(before) is type(after) and len(before) == len(after):
        for old, new in zip(before, after, strict=True):
            _restore(old, new)
        if isinstance(before, list):
            before[:] = [old if _kept(old, new) else new for old, new in zip(before, after, strict=True)]
    elif type(before) is not type(after):
        return
    elif isinstance(before, (list, bytearray)):
        before[:] = after
    elif isinstance(before, (dict, set)):
        before.clear()
        before.update(after)


def _kept(old: Any, new: Any) -> bool:
    return type(old) is type(new) and isinstance(old, (list, dict, set, bytearray, tuple))


def _resident_bytes(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0  # it has ended


_PAGE = os.sysconf("SC_PAGE_SIZE")


def start(text: str) -> NoReturn:
    """`main` with limits as `name=number`, separated by commas."""
    main({name: int(value) for name, _, value in (part.partition("=") for part in text.split(","))})


if __name__ == "__main__":
    start(sys.argv[1])
