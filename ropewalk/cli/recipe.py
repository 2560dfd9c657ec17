"""`ropewalk recipe check | show | diff | upgrade`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropewalk import flow
from ropewalk.config.write import plain, show, shown

from .options import Json, Overrides, RecipeFile, RecipeOrRun, verb
from .progress_lines import emit

app = verb(
    help="""Check, show, compare and upgrade recipes.

    Example: ropewalk recipe check recipes/books.toml"""
)


@app.command()
def check(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    remote: Annotated[bool, typer.Option("--remote", help="Also read the first records of files behind URLs.")] = False,
    json: Json = False,
) -> None:
    """Report everything wrong with a recipe at once.

    Example: ropewalk recipe check recipes/books.toml

    Finds unknown keys, wrong types and ranges, contradictions, missing files, and formats or text keys that do not
    fit the first records. Exit status 2 when there is a problem.
    """
    checked = flow.check(recipe, overrides or (), remotely=remote)
    remarks = [str(remark) for remark in checked.remarks]
    text = "\n".join([*(f"note: {remark}" for remark in remarks), f"{recipe}: no problems"])
    emit({"recipe": str(recipe), "problems": [], "remarks": remarks}, as_json=json, text=text)


@app.command(name="show")
def show_command(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not a default.")] = False,
    json: Json = False,
) -> None:
    """Print every value of a recipe and where it comes from.

    Example: ropewalk recipe show recipes/books.toml --changed
    """
    resolved = flow.show(recipe, overrides or ())
    value = {"config": plain(resolved.value), "origins": dict(resolved.origins)}
    emit(value, as_json=json, text=show(resolved, changed_only=changed).rstrip())


@app.command()
def diff(
    first: RecipeOrRun, second: Annotated[Path, typer.Argument(help="The other recipe or run.")], json: Json = False
) -> None:
    """List the settings in which two recipes differ, defaults included.

    Example: ropewalk recipe diff recipes/a.toml recipes/b.toml
    """
    found = flow.diff(first, second)
    rows = {key: {"first": one, "second": two} for key, (one, two) in found.items()}
    text = "\n".join(f"{key}: {shown(one)} -> {shown(two)}" for key, (one, two) in found.items()) or "no difference"
    emit(rows, as_json=json, text=text)


@app.command()
def upgrade(recipe: RecipeFile, json: Json = False) -> None:
    """Rename outdated keys in a recipe file.

    Example: ropewalk recipe upgrade recipes/books.toml

    Comments, order and layout stay.
    """
    changes = flow.upgrade(recipe)
    rows = [{"line": change.line, "before": change.before, "after": change.after} for change in changes]
    text = "\n".join(f"{recipe}:{change}" for change in changes) or f"{recipe}: nothing to upgrade"
    emit({"recipe": str(recipe), "changes": rows}, as_json=json, text=text)
