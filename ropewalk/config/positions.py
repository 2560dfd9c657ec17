"""The line on which each key of a TOML text stands.

`tomllib` gives values without positions. Every TOML statement (`key = value`, `[table]`, `[[tables]]`) is
itself a valid TOML text, so the text is cut into statements by adding lines until `tomllib` accepts them: no
second parser that could disagree with the first.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]

# A statement of several lines ends on one that holds one of these; trying `tomllib` on the others too took
# 1.6 s for a list of 1,000 lines.
_ENDS = ("]", "}", '"' * 3, "'" * 3)


@dataclass(frozen=True, slots=True)
class Statement:
    """One `key = value`, `[table]` or `[[tables]]` and the lines it takes, counted from 1."""

    first: int
    last: int
    table: Path
    """The table in which it stands, or which it opens."""
    opens: bool
    """Whether it opens that table."""
    value: dict[str, Any]
    """The statement by itself, as `tomllib` reads it."""


def statements(text: str) -> Iterator[Statement]:
    """The statements of a valid TOML text in order; the tables in a list are numbered."""
    table: Path = ()
    counts: dict[Path, int] = {}
    for first, last, beginning, value in _statements(text):
        opens = beginning.startswith("[")
        if opens:
            table = _resolve(_only_path(value), counts)
            if beginning.startswith("[["):
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
        yield Statement(first, last, table, opens, value)


def key_lines(text: str) -> dict[Path, int]:
    """Line numbers (from 1) by key path, tables included; the tables in a list are numbered: ("x", 0, "key").

    `text` must be valid TOML. Keys inside one multi-line value carry the line where the value starts.
    """
    lines: dict[Path, int] = {}
    for statement in statements(text):
        table = statement.table
        if statement.opens:
            for depth in range(1, len(table) + 1):
                lines.setdefault(table[:depth], statement.first)
        else:
            for path in paths_in(statement.value):
                lines.setdefault((*table, *path), statement.first)
    return lines


def lines_of(text: str) -> list[str]:
    """The lines as TOML counts them: `splitlines` would also cut at form feeds and Unicode separators."""
    return text.replace("\r\n", "\n").split("\n")


def paths_in(value: Any, path: Path = ()) -> Iterator[Path]:
    """The path of every key in a parsed value, and of every table in a list."""
    if path:
        yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, child in items:
        if isinstance(value, dict) or isinstance(child, dict):
            yield from paths_in(child, (*path, key))


def _statements(text: str) -> Iterator[tuple[int, int, str, dict[str, Any]]]:
    pending: list[str] = []
    start = 0
    for number, line in enumerate(lines_of(text), 1):
        if not pending and (not line.strip() or line.lstrip().startswith("#")):
            continue
        start = start or number
        pending.append(line)
        if len(pending) > 1 and not any(end in line for end in _ENDS):
            continue
        try:
            value = tomllib.loads("\n".join(pending))
        except tomllib.TOMLDecodeError:
            continue
        yield start, number, pending[0].lstrip(), value
        pending, start = [], 0


def _only_path(value: Any) -> Path:
    """The path spelled by a table header: its parse is a chain of single keys."""
    path: Path = ()
    while isinstance(value, (dict, list)) and value:
        if isinstance(value, list):
            value = value[0]
            continue
        key, value = next(iter(value.items()))
        path = (*path, key)
    return path


def _resolve(path: Path, counts: dict[Path, int]) -> Path:
    """`path` with the index of the newest item after every array of tables but the last key."""
    resolved: Path = ()
    for depth, key in enumerate(path):
        resolved = (*resolved, key)
        if depth < len(path) - 1 and resolved in counts:
            resolved = (*resolved, counts[resolved])
    return resolved
