"""`ropewalk new`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropewalk import flow

from .console import emit
from .options import Json, verb

app = verb()


@app.command()
def new(
    recipe: Annotated[Path, typer.Argument(help="The TOML file to write.", show_default=False)],
    data: Annotated[list[str], typer.Argument(help="Your files, folders or globs.", show_default=False)],
    name: Annotated[str | None, typer.Option("--name", help="Name of the run; the file's name when left out.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    json: Json = False,
) -> None:
    """Example: ropewalk new books.toml my-books/

    Writes a recipe for your own files: text, Markdown, source code, JSON lines. Every setting is in it as a comment,
    with its meaning and default.
    """
    path = flow.new_recipe(recipe, data=data, name=name, force=force)
    emit({"recipe": str(path)}, as_json=json, text=f"wrote {path}; next: ropewalk recipe check {path}")
