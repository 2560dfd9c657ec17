"""The process that runs the tested code: loads it, calls what the tests ask for, and answers with plain data.

It never holds the tests, the expected answers or the channel of the verdict. Whatever the tested code does to this
interpreter, it can only change its own answers.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping
from typing import Any, NoReturn

from .confinement import (
    die_first,
    die_with_parent,
    drop_capabilities,
    forbid_system_calls,
    limit_resources,
)
from .framed_pipe import receive, send
from .plain_data import dump, load

MODULE = "solution"
"""The module name that the tested code sees, so that a block under `if __name__ == "__main__"` does not run."""

CONFINED = b"confined"
"""The first message: what fails before it is no fault of the tested code."""


def serve(requests: int, answers: int, limits: Mapping[str, int]) -> NoReturn:
    """Confines this process and answers requests until there are no more."""
    requests, answers = _own_files(requests, answers)
    os.setsid()
    die_with_parent()
    die_first()
    drop_capabilities()
    limit_resources(limits)
    forbid_system_calls()
    sys.argv = [MODULE]
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)]
    kept: list[Any] = []
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    send(answers, CONFINED)
    while (request := receive(requests)) is not None:
        asked = load(request, kept.__getitem__)
        try:
            answer = ("value", _answer(module, asked), _arguments(asked))
            data = dump(answer, lambda value: _keep(kept, value))
        except BaseException as error:
            data = dump(_raised(error, asked), lambda value: _keep(kept, value))
        send(answers, data)
    os._exit(0)


def _answer(module: types.ModuleType, asked: tuple[Any, ...]) -> Any:
    kind, what, *rest = asked
    if kind == "load":
        exec(compile(what, f"<{MODULE}>", "exec"), module.__dict__)  # the point of it all
        return None
    if kind == "name":
        return getattr(module, what)
    if kind == "attribute":
        return getattr(what, rest[0])
    if kind == "set":
        return setattr(what, *rest)
    if kind == "next":
        try:
            return (True, next(what))
        except StopIteration:
            return (False, None)
    if kind == "iterate":
        return iter(what)
    target = getattr(module, what) if isinstance(what, str) else what
    return target(*rest[0], **rest[1])


def _arguments(asked: tuple[Any, ...]) -> Any:
    """The arguments after the call, which the tested code may have changed in place."""
    return asked[2] if asked[0] == "call" else ()


def _raised(error: BaseException, asked: tuple[Any, ...]) -> tuple[Any, ...]:
    """The error as text: its class, its message, and whether tests may catch it."""
    try:
        text = str(error)[:500]
    except BaseException:
        text = ""
    return ("raised", type(error).__name__[:100], text, isinstance(error, Exception))


def _keep(kept: list[Any], value: Any) -> int:
    kept.append(value)
    return len(kept) - 1


def _own_files(requests: int, answers: int) -> tuple[int, int]:
    """Closes all files but the two pipes; standard output becomes standard error, which nobody trusts."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(2, 1)
    first = os.dup(requests), os.dup(answers)
    kept = sorted(first)
    os.closerange(3, kept[0])
    os.closerange(kept[0] + 1, kept[1])
    os.closerange(kept[1] + 1, 1 << 16)
    return first
