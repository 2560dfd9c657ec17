"""Lists the tasks that a recipe may name, and the data sets that they need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ropewalk.base.errors import UserError
from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.harness.datasets import Missing
from ropewalk.evaluate.harness.task_lists import TaskList, listed_tasks, missing_data


def list_tasks(pattern: str = "", *, folders: Sequence[Path] = (), recipe: Path | None = None) -> TaskList:
    """The tasks of the suites, of `folders`, and of the folders that the recipe names; UserError if none matches."""
    found = listed_tasks(_settings(folders, recipe), pattern)
    if not (found.tasks or found.suites):
        raise UserError(f'no task matches "{pattern}"; `ropewalk evaluate tasks` lists all')
    return found


def list_missing_data(pattern: str = "", *, folders: Sequence[Path] = (), recipe: Path | None = None) -> list[Missing]:
    """The data sets of those tasks that are not on this machine."""
    return missing_data(_settings(folders, recipe), pattern)


def _settings(folders: Sequence[Path], recipe: Path | None) -> Evaluate:
    named = tuple(map(str, folders))
    if recipe is None:
        return Evaluate(task_folders=named)
    from ropewalk.config.read import read  # a recipe costs a quarter of a second

    from .recipe import Recipe

    settings = read(Recipe, recipe).value.evaluate
    return Evaluate(task_folders=(*named, *settings.task_folders), datasets=settings.datasets)
