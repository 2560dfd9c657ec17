"""`ropewalk recipe check | show | diff`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropewalk import flow
from ropewalk.config.write import plain, show, shown

from .console import emit
from .options import Json, Overrides, RecipeFile, verb

app = verb(
    help="""Example: ropewalk recipe check recipes/books.toml

    Checks, shows and compares recipes without running anything."""
)


@app.command()
def check(recipe: RecipeFile, overrides: Overrides = None, json: Json = False) -> None:
    """Example: ropewalk recipe check recipes/books.toml

    Finds everything wrong with a recipe at once: unknown keys, types, ranges, contradictions, missing files. Exit
    status 2 when there is something.
    """
    flow.check(recipe, overrides or ())
    emit({"recipe": str(recipe), "problems": []}, as_json=json, text=f"{recipe}: no problems")


@app.command(name="show")
def show_command(
    recipe: RecipeFile,
    overrides: Overrides = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not a default.")] = False,
    json: Json = False,
) -> None:
    """Example: ropewalk recipe show recipes/books.toml --changed

    Prints every value that a run would use and where it comes from.
    """
    resolved = flow.show(recipe, overrides or ())
    value = {"config": plain(resolved.value), "origins": dict(resolved.origins)}
    emit(value, as_json=json, text=show(resolved, changed_only=changed).rstrip())


@app.command()
def diff(
    first: RecipeFile, second: Annotated[Path, typer.Argument(help="The other recipe.")], json: Json = False
) -> None:
    """Example: ropewalk recipe diff recipes/a.toml recipes/b.toml

    Lists the settings in which two recipes differ, defaults included.
    """
    found = flow.diff(first, second)
    rows = {key: {"first": one, "second": two} for key, (one, two) in found.items()}
    text = "\n".join(f"{key}: {shown(one)} -> {shown(two)}" for key, (one, two) in found.items()) or "no difference"
    emit(rows, as_json=json, text=text)
