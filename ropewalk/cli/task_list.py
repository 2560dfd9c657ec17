"""`ropewalk evaluate tasks | datasets`"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated

import typer

from ropewalk import flow

from .options import Json, WithDefault, verb
from .progress_lines import emit

Pattern = Annotated[
    str, typer.Argument(help="Name or ability, or a glob such as '*_zh'.", show_default=False, metavar="[PATTERN]")
]
Folders = Annotated[
    list[Path] | None,
    typer.Option("--folder", help="A folder of task files; may be given several times.", show_default=False),
]
WithRecipe = Annotated[
    Path | None,
    typer.Option("--recipe", help="A recipe, for its task folders and datasets.toml.", show_default=False),
]


def with_task_lists(single: typer.Typer) -> typer.Typer:
    """The verb `evaluate`, which has one command, as a group: that command, and the lists of tasks and data sets."""
    (command,) = single.registered_commands
    assert command.callback is not None
    group = verb(help=inspect.getdoc(command.callback) or "", cls=WithDefault)
    group.command(name="model", hidden=True)(command.callback)
    group.command(name="tasks")(_tasks)
    group.command(name="datasets")(_datasets)
    return group


def _tasks(pattern: Pattern = "", folder: Folders = None, recipe: WithRecipe = None, json: Json = False) -> None:
    """List tasks: kind, ability, metrics, and whether their data are here.

    Example: ropewalk evaluate tasks reasoning

    Shows the tasks that come with ropewalk, and the task files of --folder and of the recipe. A name in the list, also
    that of a suite, may stand in evaluate.tasks.
    """
    from ropewalk.evaluate.harness.task_lists import lines_of

    listed = flow.list_tasks(pattern, folders=folder or (), recipe=recipe)
    text = [*lines_of(listed), *(f"cannot be read: {what}" for what in listed.broken.values())]
    emit(dataclasses.asdict(listed), as_json=json, text="\n".join(text))


def _datasets(pattern: Pattern = "", folder: Folders = None, recipe: WithRecipe = None, json: Json = False) -> None:
    """Print the entries of datasets.toml for data sets that are not here.

    Example: ropewalk evaluate datasets arc_easy

    Each with the command that fetches it on a machine with a network. Nothing is fetched by itself.
    """
    found = flow.list_missing_data(pattern, folders=folder or (), recipe=recipe)
    tree = [{**dataclasses.asdict(each), "command": each.command, "entry": each.entry} for each in found]
    text = "\n\n".join(f"# {each.command}\n{each.entry}" for each in found)
    emit(tree, as_json=json, text=text or "# all data sets of these tasks are here")
