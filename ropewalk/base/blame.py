"""Errors that a user, a disk, a peer or a stranger can cause, in one line; the traceback goes to a file.

Libraries raise their own kinds for what is wrong outside of the program: Arrow for a damaged file, JSON and UTF-8 for a
text that is none, MemoryError and RecursionError for an input or a limit. Our own checks turn most of them into
RopewalkErrors where they happen; what slips through is told here, at the top. Every other exception is a bug.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from .errors import RopewalkError, UserError, storage_error

_ERRNO_REMEDIES = {
    errno.ENOENT: "check the name; a folder of the system such as /proc cannot be written",
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "the machine has no open files left; close some programs",
    errno.ENOMEM: "the machine has no memory left; close some programs or use fewer workers",
    errno.ECONNREFUSED: "nothing listens there; check the address, and whether the other side runs",
    errno.ENETUNREACH: "check the network",
    errno.EHOSTUNREACH: "check the network and the address",
    errno.ELOOP: "the name is a link, or leads in a circle; name the folder itself",
}
_AGAIN = "if the same command fails again, this file tells where"


def explain(error: BaseException) -> str | None:
    """What happened and what to do, in one line; None for a bug."""
    if isinstance(error, OSError):
        return _explain_os(error)
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        return (
            "out of memory: this process could not get what it asked for; free memory, raise `ulimit -v` or the job's "
            "limit, or use smaller settings (`prepare.workers`, batch sizes)"
        )
    where = f"{path}: " if (path := _path_of(error)) else ""
    if isinstance(error, RecursionError):
        return f"{where}nested too deeply to be read; check the input"
    if isinstance(error, json.JSONDecodeError):
        return f"{where}damaged JSON: {_line(error)}; restore the file from a copy, or move it away"
    if isinstance(error, UnicodeError):
        return f"{where}not the text that was expected: {_line(error)}; check the encoding, UTF-8 is read"
    kinds = {kind.__module__.partition(".")[0]: kind.__name__ for kind in reversed(type(error).__mro__)}
    if "pyarrow" in kinds:
        remedy = "restore the file from a copy, or move it away; what prepare made is made again"
        return f"{where}damaged or foreign Arrow data: {_line(error)}; {remedy}"
    if "pyo3_runtime" in kinds:
        return f"{where}a library gave up on its input: {_line(error)}; check the input"
    return None


def keep_traceback(error: BaseException, folder: Path | None = None) -> str:
    """Writes the traceback to a new file in `folder`, else in the folder for temporary files; its name, or nothing."""
    text = "".join(traceback.format_exception(error))
    for place in (folder, Path(tempfile.gettempdir())):
        if place is None:
            continue
        # A full disk, or a folder that cannot be written, may be the very error that is told.
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(prefix="ropewalk-traceback-", suffix=".txt", dir=place)
            with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return name
    return ""


def with_traceback(told: str, error: BaseException, folder: Path | None = None) -> str:
    """The line for the user, with the file that has the rest."""
    name = keep_traceback(error, folder)
    return f"{told} (traceback: {name}; {_AGAIN})" if name else told


@contextlib.contextmanager
def traceback_in(folder: Path) -> Iterator[None]:
    """Turns what `explain` knows into a UserError; its traceback goes to a file in `folder`, if that exists."""
    try:
        yield
    except RopewalkError:
        raise
    except BaseException as error:
        line = explain(error)
        if line is None:
            raise
        raise UserError(with_traceback(line, error, folder)) from error


def _explain_os(error: OSError) -> str | None:
    if error.errno is None:
        return None
    known = storage_error(error, doing=str(error.filename or "storage"))
    if known:
        return str(known)
    where = f"{error.filename}: " if error.filename else ""
    remedy = _ERRNO_REMEDIES.get(error.errno, "")
    return f"{where}{error.strerror or error}" + (f"; {remedy}" if remedy else "")


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, which is not imported here, could not get what it asked for."""
    told = any(kind.__name__ == "OutOfMemoryError" and kind.__module__ == "torch" for kind in type(error).__mro__)
    return told or (type(error) is RuntimeError and "can't allocate memory" in str(error))


def _line(error: BaseException) -> str:
    """The message, in one line of a bearable length."""
    return " ".join(str(error).split())[:300]


def _path_of(error: BaseException) -> str:
    """The file that the innermost of our functions was working on, if it calls one `path`."""
    ours = os.path.dirname(os.path.dirname(__file__))
    found = ""
    step = error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if frame.f_code.co_filename.startswith(ours) and isinstance(path := frame.f_locals.get("path"), Path):
            found = str(path)
        step = step.tb_next
    return found
