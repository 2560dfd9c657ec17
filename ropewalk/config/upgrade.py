"""Upgrades the text of a recipe to the current names of settings; comments and layout stay.

Names are replaced statement by statement. The result is parsed and compared with the upgraded values: a text that
cannot be rewritten safely is refused, never damaged.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import Any

from ropewalk.base.errors import UserError

from .positions import Statement, lines_of, paths_in, statements
from .read import parse_toml
from .renames import VALUES, Key, dotted, new_key, upgraded

_HEADER = re.compile(r"^(\s*\[\[?\s*)([A-Za-z0-9_.-]+)(\s*\]\]?.*)$")
_SETTING = re.compile(r"^(\s*)([A-Za-z0-9_.-]+)(\s*=.*)$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Change:
    """A name or value that was replaced."""

    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.line}: `{self.before}` is now `{self.after}`"


def upgraded_text(text: str, *, name: str) -> tuple[str, list[Change]]:
    """`text` under the names of now, and what was replaced; UserError that lists it when it cannot be done here. `name`
    is the file's."""
    end = "\r\n" if "\r\n" in text else "\n"
    lines = lines_of(text)
    wanted = upgraded(parse_toml(text, name))
    changes: list[Change] = []
    for statement in statements(text):
        where = slice(statement.first - 1, statement.last)
        rewritten = _header if statement.opens else _setting
        lines[where] = rewritten(statement, "\n".join(lines[where]), changes).split("\n")
    result = "\n".join(lines)
    try:
        done = tomllib.loads(result) == wanted
    except tomllib.TOMLDecodeError:
        done = False
    if not done:
        listed = "\n".join(f"  {name}:{change}" for change in changes)
        raise UserError(f"{name}: its layout cannot be edited safely; rename by hand:\n{listed}")
    return result.replace("\n", end), changes


def _header(statement: Statement, text: str, changes: list[Change]) -> str:
    """The header of a table under its new name."""
    old, new = dotted(statement.table), dotted(new_key(statement.table))
    if old == new:
        return text
    changes.append(Change(statement.first, f"[{old}]", f"[{new}]"))
    return _HEADER.sub(lambda found: found[1] + new + found[3], text)


def _setting(statement: Statement, text: str, changes: list[Change]) -> str:
    """A key and its value under their new names."""
    found = _SETTING.match(text)
    if not found:
        return text  # a quoted key; none of ours needs quotes
    begin, left, rest = found.groups()
    old: Key = (*statement.table, *left.split("."))
    new, table = new_key(old), new_key(statement.table)
    if new[: len(table)] == table:
        if new[len(table) :] != old[len(statement.table) :]:
            changes.append(Change(statement.first, dotted(old), dotted(new)))
        left = dotted(new[len(table) :])
    value: Any = statement.value
    for part in old[len(statement.table) :]:
        value = value[part]
    told = set()
    for path in ((), *paths_in(value)):
        key = (*old, *path)
        now = new_key(key)
        if path and key[-1] != now[-1] and dotted(key) not in told:
            told.add(dotted(key))
            changes.append(Change(statement.first, dotted(key), dotted(now)))
            rest = re.sub(rf"(?<![\w.\"'-]){key[-1]}(?=\s*=)", str(now[-1]), rest)
        item = _at(value, path)
        replaced = VALUES.get(dotted(now), {}).get(item) if isinstance(item, str) else None
        if replaced:
            changes.append(Change(statement.first, f'{dotted(now)} = "{item}"', f'{dotted(now)} = "{replaced}"'))
            rest = re.sub(rf"([\"']){item}\1", rf"\g<1>{replaced}\1", rest)
    return begin + left + rest


def _at(value: Any, path: Key) -> Any:
    for part in path:
        value = value[part]
    return value
