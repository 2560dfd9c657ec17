"""How a command names a recipe, for warnings that print one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from ropewalk.config.read import COMMAND_LINE, Resolved

from .recipe import Recipe

_GIVEN = f"{COMMAND_LINE}: "
_FILTER = "prepare.filter."


def recipe_words(resolved: Resolved[Recipe]) -> str:
    """The recipe's file and the overrides that decide what is prepared, as words of a shell; empty without a file.

    Overrides of filter rules are left out: commands that take these words try others.
    """
    file = _file(resolved)
    return shlex.join([file, *_overrides(resolved)]) if file else ""


def _file(resolved: Resolved[Recipe]) -> str:
    places = (resolved.origins.get(key, "") for key in ("name", *resolved.origins))
    files = (found[1] for place in places if (found := re.fullmatch(r"(.+):\d+", place)))
    return next((file for file in files if Path(file).is_file()), "")


def _overrides(resolved: Resolved[Recipe]) -> Iterator[str]:
    given = {
        origin.removeprefix(_GIVEN): None
        for key, origin in resolved.origins.items()
        if origin.startswith(_GIVEN) and key.partition(".")[0] in ("seed", "prepare")
    }
    return (text for text in given if not text.startswith(_FILTER))
