"""Changing some values of a TOML text and nothing else: comments, order and spacing stay.

`tomllib` only reads. A value on a line of its own is replaced there; a new one is put under the header of its table, or
into a new table at the end. The result is parsed and compared, so a text that this cannot change is never damaged.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from ropewalk.base.errors import UserError

from .positions import key_lines
from .write import literal

_VALUE = re.compile(r"^([^=]*=\s*)[^#]*?(\s*(?:#.*)?)$")
"""A key and what follows its value."""


def with_values(text: str, values: Mapping[str, Any], *, name: str) -> str:
    """`text` with each dotted key of `values` set; raises UserError that lists them when it cannot be done here. `name`
    is the file's."""
    wanted = copy.deepcopy(tomllib.loads(text))
    changed = text
    for key, value in values.items():
        _set(wanted, key.split("."), value)
        changed = _with_value(changed, tuple(key.split(".")), value)
    try:
        done = tomllib.loads(changed) == wanted
    except tomllib.TOMLDecodeError:
        done = False
    if not done:
        lines = "\n".join(f"  {key} = {literal(value)}" for key, value in values.items())
        raise UserError(f"{name}: its layout cannot be edited safely; set these by hand:\n{lines}")
    return changed


def _with_value(text: str, path: tuple[str, ...], value: Any) -> str:
    where = key_lines(text)
    lines = text.split("\n")
    if path in where:
        number = where[path] - 1
        lines[number] = _VALUE.sub(lambda found: found[1] + literal(value) + found[2], lines[number])
        return "\n".join(lines)
    if len(path) == 1:  # before any table begins
        return f"{path[0]} = {literal(value)}\n{text}"
    for depth in range(len(path) - 1, 0, -1):
        if path[:depth] not in where:
            continue
        number = where[path[:depth]] - 1
        if not lines[number].lstrip().startswith("["):
            # The table is spelled by dotted keys, as `load.threads = 2`.
            lines.insert(number + 1, f"{'.'.join(path)} = {literal(value)}")
            return "\n".join(lines)
        if depth == len(path) - 1 and _is_header(lines[number], path[:depth]):
            lines.insert(number + 1, f"{path[-1]} = {literal(value)}")
            return "\n".join(lines)
    end = "" if text.endswith("\n") or not text else "\n"
    return f"{text}{end}\n[{'.'.join(path[:-1])}]\n{path[-1]} = {literal(value)}\n"


def _is_header(line: str, path: tuple[str, ...]) -> bool:
    """Whether a line is the header of the table `path`, not of one inside it."""
    table: dict[str, Any] = {}
    for key in reversed(path):
        table = {key: table}
    return tomllib.loads(line) == table


def _set(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
