"""Files that a stranger may have written: opened and parsed within limits, without reading anything else.

A folder that came from elsewhere may name any file of this machine, hold a FIFO that never ends, a link to a device, or
JSON as deep and as large as it likes. What is read here is a regular file that lies in the folder, no larger than a
limit, and JSON that fits the interpreter's stack. A reason why not is a `ValueError` with words for a message; callers
put the file's name and the right type of error around it.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST_DEPTH = 32
"""Nesting of free-form values, such as the loader's state; ours have up to 5 levels."""


class Refused(ValueError):
    """Why a file of a stranger is not read; the words follow the file's name."""


def open_inside(path: Path, *, roots: Sequence[Path] = ()) -> int:
    """A descriptor of the regular file `path`, open for reading; FileNotFoundError when there is none.

    A link is followed as long as it ends in the file's own folder or below one of `roots`. Neither a FIFO nor a device
    is ever opened: to open one may block or have effects.
    """
    real = Path(os.path.realpath(path))
    allowed = [Path(os.path.realpath(root)) for root in (path.parent, *roots)]
    if not any(real.is_relative_to(root) for root in allowed):
        raise Refused(f"a link to {real}, outside its folder; copy the file itself")
    try:
        _check_kind(os.lstat(real).st_mode)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(real, flags)
    except (NotADirectoryError, IsADirectoryError):
        raise Refused("not a regular file") from None
    try:
        _check_kind(os.fstat(descriptor).st_mode)  # what was looked at may have been replaced
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_inside(path: Path, *, most_bytes: int, roots: Sequence[Path] = ()) -> bytes:
    """The content of a small file, opened as by `open_inside`."""
    with open(open_inside(path, roots=roots), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # One byte more than the limit tells a file that grows while it is read.
        data = file.read(most_bytes + 1) if size <= most_bytes else b""
    if size > most_bytes or len(data) > most_bytes:
        raise Refused(f"{max(size, len(data))} bytes, at most {most_bytes} are read")
    return data


def parse_json(data: bytes) -> Any:
    """The JSON in `data`, UTF-8, in which no key occurs twice and every number is finite.

    The parser refuses to nest deeper than the interpreter's stack allows, about 1,000 levels, before it runs out.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_without_doubles, parse_constant=_no_constant)
    except RecursionError:
        raise Refused("nested too deeply") from None
    except UnicodeDecodeError:
        raise Refused("not UTF-8 text") from None
    except Refused:
        raise
    except ValueError as error:  # also a number of 5,000 digits
        raise Refused(f"not valid JSON: {error}") from None


def plain_tree(value: Any, *, depth: int = MOST_DEPTH) -> bool:
    """Whether a value from JSON is small in every way: few levels, integers of 64 bits, finite numbers, and text that
    can be written again."""
    if depth < 0:
        return False
    if isinstance(value, dict):
        return all(plain_text(key) and plain_tree(child, depth=depth - 1) for key, child in value.items())
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, list):
        return all(plain_tree(child, depth=depth - 1) for child in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or value.bit_length() <= 64


def plain_text(value: str) -> bool:
    """Whether a text has an encoding: JSON may spell half of a surrogate pair, which has none."""
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def _check_kind(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise Refused("not a regular file")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Refused(f"the key {twice!r} occurs twice")
    return tree


def _no_constant(name: str) -> Any:
    raise Refused(f"{name} is not a number of JSON")
