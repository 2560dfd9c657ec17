"""Small files that carry their own checksum: JSON, TOML and JSON lines.

A seal says how many bytes the rest of the file has, and their BLAKE2b hash. A file with a wrong seal was damaged, or
edited by hand; it is never read as if nothing had happened.

    {"format": 3, ..., "seal": "b2:812:3f2a..."}     JSON: the last key
    # seal: b2:812:3f2a...                           TOML: the last line
    {"seal": "b2:812:3f2a..."}                       JSON lines: the first line, so that no cut leaves whole lines alone

Versions of ropewalk before the seal wrote the same files without one. They are told by their `format`: such a file is
read with a warning and stays as it is. Bulk files have a footer instead (`store/sealed.py`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .errors import DamagedData, DamagedFile, DamagedPlan, DamagedTokenizer, DataError
from .files import committed_file, read_regular, storage, upgraded

_JSON, _JSON_END = b',\n "seal": "', b'"\n}\n'
_LINES, _LINES_END = b'{"seal": "', b'"}\n'
_TOML, _TOML_END = b"# seal: ", b"\n"
_SEAL = re.compile(rb"b2:(\d{1,15}):([0-9a-f]{32})")
BLAMED: dict[str, type[DamagedFile]] = {
    "manifest": DamagedData,
    "plan": DamagedPlan,
    "tokenizer": DamagedTokenizer,
}
"""Files whose damage has an error of its own."""
ALTERED = "its bytes are not what ropewalk wrote (or it was edited by hand)"

_log = logging.getLogger(__name__)

Upgrades = dict[int, Callable[[dict[str, Any]], dict[str, Any]]]


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """Commits `value`, which has at least one key, as indented JSON with a seal."""
    with committed_file(path) as file:
        file.write(sealed_json(value))


def sealed_json(value: dict[str, Any]) -> bytes:
    """`value` as indented JSON with a seal."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    return _sealed(text.removesuffix("\n}").encode(), _JSON, _JSON_END)


def read_sealed(
    path: Path, *, what: str, remedy: str, current: int, sealed_since: int, upgrades: Upgrades | None = None
) -> dict[str, Any]:
    """The JSON object in `path`, whole and brought to format `current`; formats before `sealed_since` have no seal.

    DamagedFile names the file and the `remedy` when it is not what was written, DataError when there is none or a newer
    ropewalk wrote it.
    """
    try:
        with storage(f"reading {path}"):
            data = read_regular(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such {what}; {remedy}") from None
    tree = parse_sealed(data, path=path, what=what, remedy=remedy, sealed_since=sealed_since)
    return upgraded(tree, path=path, what=what, current=current, upgrades=upgrades or {})


def parse_sealed(data: bytes, *, path: Path, what: str, remedy: str, sealed_since: int) -> dict[str, Any]:
    """The JSON object in `data`, which was read from `path`, without its seal."""
    body = _body(data, _JSON, _JSON_END)
    try:
        if body is not None:
            tree: dict[str, Any] = json.loads(body + b"\n}")
            return tree
        tree = json.loads(data)
    except (ValueError, RecursionError):
        raise damaged(path, what=what, remedy=remedy) from None
    if not _is_older(tree, sealed_since) or "seal" in tree:
        raise damaged(path, what=what, remedy=remedy)
    warn_unsealed(path, what)
    return tree


def sealed_toml(text: str) -> bytes:
    """A TOML text, which ends with a line, and its seal."""
    return _sealed(text.encode(), _TOML, _TOML_END)


def parse_sealed_toml(data: bytes, *, path: Path, what: str, remedy: str, sealed_since: int) -> str:
    """The TOML text in `data`, which was read from `path`; its `format` stands on a line of its own."""
    body = _body(data, _TOML, _TOML_END)
    if body is not None:
        return body.decode()
    found = re.search(rb"^format = (\d+)$", data, re.MULTILINE)
    old = found is not None and int(found[1]) < sealed_since and b"# seal" not in data
    try:
        text = data.decode()
    except UnicodeDecodeError:
        old = False
    if not old:
        raise damaged(path, what=what, remedy=remedy)
    warn_unsealed(path, what)
    return text


def is_sealed_text(data: bytes) -> bool:
    """Whether `data` is a text with comments after `#`, sealed as TOML is, and nobody has changed it."""
    return _body(data, _TOML, _TOML_END) is not None


def sealed_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    """JSON lines after a line with their seal."""
    body = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()
    return _LINES + _told(body) + _LINES_END + body


def parse_sealed_lines(data: bytes, *, path: Path, what: str, remedy: str) -> list[Any]:
    """The rows in `data`, which was read from `path`. Lines have no format: without any seal they are an older file."""
    first, _, body = data.partition(b"\n")
    if first + b"\n" != _LINES + _told(body) + _LINES_END:
        if not data or first.startswith(_LINES) or _SEAL.search(first):
            raise damaged(path, what=what, remedy=remedy)
        warn_unsealed(path, what)
        body = data
    try:
        return [json.loads(line) for line in body.splitlines()]
    except (ValueError, RecursionError):
        raise damaged(path, what=what, remedy=remedy) from None


def damaged(path: Path, *, what: str, remedy: str, why: str = ALTERED) -> DamagedFile:
    """The error for a file that is not what was written."""
    return BLAMED.get(what, DamagedFile)(f"{path}: this {what} is damaged: {why}", remedy)


def warn_unsealed(path: Path, what: str) -> None:
    """Says once of a file that nothing tells whether it is as it was written."""
    if _is_new(path.absolute().parent):  # one line for all such files of a folder
        _log.warning("%s: this %s of an earlier version has no checksum; it is read as it is", path, what)


def _is_new(path: Path) -> bool:
    """Whether this is asked of `path` for the first time, among the last thousand."""
    before = _met.cache_info().misses
    _met(path)
    return _met.cache_info().misses > before


@functools.lru_cache(maxsize=1024)
def _met(path: Path) -> None:
    """Remembers a path."""


def _sealed(body: bytes, mark: bytes, end: bytes) -> bytes:
    return body + mark + _told(body) + end


def _told(body: bytes) -> bytes:
    return f"b2:{len(body)}:{_hash(body)}".encode()


def _body(data: bytes, mark: bytes, end: bytes) -> bytes | None:
    """What the seal at the end of `data` covers; None when there is no seal, or a wrong one."""
    body, found, rest = data.rpartition(mark)
    told = _SEAL.fullmatch(rest.removesuffix(end)) if found and rest.endswith(end) else None
    if told is None or int(told[1]) != len(body) or told[2].decode() != _hash(body):
        return None
    return body


def _hash(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _is_older(tree: Any, sealed_since: int) -> bool:
    version = tree.get("format") if isinstance(tree, dict) else None
    return type(version) is int and 1 <= version < sealed_since
