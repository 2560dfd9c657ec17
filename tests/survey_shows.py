"""How each technique of docs/survey.md is shown: a command and what it says, or a run with and without the setting.

A row that names a setting in its `use` column is shown by a tiny run with that setting and one without (the tables of
tests/wiring say what differs). Rows in `COMMANDS` are shown by a command of the command line, those in `GPU` by tests
that need a GPU; all others by the tests of their last column.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Literal

from tests.wiring.rows import Row, keys_of
from tests.wiring.table import ROWS

Kind = Literal["command", "run", "GPU run", "test"]


@dataclass(frozen=True)
class Show:
    """A command in a folder with `tiny.toml` and its finished run `runs/tiny`, and a pattern of what it prints."""

    command: str
    sign: str


COMMANDS: dict[str, Show] = {
    "A systematic path from collection to processed data": Show(
        "ropewalk run tiny.toml name=whole", r"report.*whole.report\.html"
    ),
}
"""By technique."""

GPU = ("NCCL",)
"""Techniques that a machine without GPUs cannot show."""

BY_TESTS: tuple[str, ...] = ()
"""Techniques whose setting needs more than the tiny run has: files of a format, several machines, a longer run."""


def runs_of(technique: str, use: str) -> list[Row]:
    """The runs that show a technique which is used like this."""
    if technique in BY_TESTS:
        return []
    found = []
    for token in re.findall(r"`([^`]+)`", use):
        key, _, value = token.partition(" = ")
        for row in ROWS:
            if row.name == _numbered(key) or row.name.startswith(f"{_numbered(key)}."):
                found.append(_with_value(row, value) if value else row)
                break
    return found


def _with_value(row: Row, value: str) -> Row:
    """The row with the value that the page names, unless that is the default."""
    default = dict(keys_of())[row.name].default
    return row if json.loads(value) == default else dataclasses.replace(row, value=value)


def _numbered(key: str) -> str:
    """A key of the page as the reference has it: `prepare.sources.paths` is a key of each source."""
    for table in ("prepare.sources", "load.corpus", "load.remote.mirrors", "train.phases", "train.mixture"):
        if key.startswith(f"{table}.") and not key.startswith(f"{table}.N"):
            return key.replace(table, f"{table}.N", 1)
    return key


def kind_of(technique: str, use: str) -> Kind:
    """How a technique in place is shown."""
    if technique in COMMANDS:
        return "command"
    if technique in GPU:
        return "GPU run"
    return "run" if runs_of(technique, use) else "test"
