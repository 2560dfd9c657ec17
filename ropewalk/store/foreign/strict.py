"""What the files of another program say of themselves, read as a stranger's: whatever does not fit is named."""

from __future__ import annotations

import contextlib
import math
import struct
import tarfile
import tokenize
import zlib
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError
from ropewalk.base.untrusted import Refused, parse_json, plain_text
from ropewalk.store.origin import Origin, is_inside
from ropewalk.store.references import Catalogue

INDEX = "index.json"
RESTORE = "restore the file from a copy"
_UNREADABLE = (
    *(ValueError, LookupError, TypeError, ArithmeticError, EOFError, RecursionError, NotImplementedError),
    *(OSError, SyntaxError, struct.error, tokenize.TokenError, zlib.error, tarfile.TarError),
)
"""What libraries raise when bytes are not what they take them for; Arrow's own errors are among these."""
Kind = TypeVar("Kind")


@contextlib.contextmanager
def reading(file: str) -> Iterator[None]:
    """Errors of the libraries that read `file` become DataError with its name; errors of the disk stay."""
    try:
        yield
    except _UNREADABLE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(f"{file}: damaged, or not what its name tells ({told}); {RESTORE}") from None


def read_index(folder: str, *, origin: Origin) -> dict[str, Any]:
    """The object in the `index.json` of a folder."""
    file = f"{folder.rstrip('/')}/{INDEX}"
    try:
        tree = parse_json(origin.read(file))
    except Refused as error:
        raise DataError(f"{file}: {error}; {RESTORE}") from None
    if not isinstance(tree, dict):
        raise DataError(f"{file}: a {type(tree).__name__} instead of an object; {RESTORE}")
    return tree


def taken(tree: Any, name: str, kind: type[Kind], *, where: str) -> Kind:
    """The value of `name` in an object of an index, which must be of `kind`; numbers count things."""
    value = tree.get(name) if isinstance(tree, dict) else None
    if isinstance(value, kind) and not isinstance(value, bool) and _is_sound(value):
        return value
    raise DataError(f"{where}: `{name}` is {_shown(value)}; {RESTORE}")


def listed(tree: Any, name: str, kind: type[Kind], *, where: str) -> list[Kind]:
    """The list `name` in an object of an index, all of whose values are of `kind`."""
    values = taken(tree, name, list, where=where)
    for value in values:
        if not isinstance(value, kind) or not _is_sound(value):
            raise DataError(f"{where}: `{name}` holds {_shown(value)}; {RESTORE}")
    return values


def place(folder: str, name: str, *, where: str) -> str:
    """The file `name` of a folder; DataError for a name that leads out of it."""
    if not is_inside(name):
        raise DataError(f"{where}: {_shown(name)} is no file of its folder; {RESTORE}")
    return f"{folder}/{name}"


def check_offsets(offsets: npt.NDArray[np.int64], *, begin: int, end: int, file: str) -> None:
    """DataError unless the items that lie between `offsets` follow each other from `begin` or later to `end`."""
    if len(offsets) and (offsets[0] < begin or offsets[-1] > end or (np.diff(offsets) < 0).any()):
        raise DataError(f"{file}: its offsets do not follow each other within its {end} bytes; {RESTORE}")


def check_tokens(
    start: npt.NDArray[np.int64],
    stop: npt.NDArray[np.int64],
    *,
    first: npt.NDArray[np.int64],
    last: npt.NDArray[np.int64],
    file: str,
) -> None:
    """DataError unless every row of tokens lies in its item, bytes `first` to `last`."""
    if ((start < first) | (stop < start) | (stop > last)).any():
        raise DataError(f"{file}: its tokens lie outside of their samples; {RESTORE}")


def check_catalogue(catalogue: Catalogue) -> Catalogue:
    """`catalogue` when no document begins before its unit or has fewer tokens than none."""
    for number in np.flatnonzero((catalogue.length < 0) | (catalogue.start < 0))[:1].tolist():
        raise DataError(f"{catalogue.units[catalogue.unit[number]].file}: document {number} has no place; {RESTORE}")
    return catalogue


def _is_sound(value: Any) -> bool:
    if isinstance(value, str):
        return plain_text(value)
    return not isinstance(value, int) or 0 <= value < 1 << 62


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = "missing" if value is None else ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
