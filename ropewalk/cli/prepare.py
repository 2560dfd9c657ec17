"""`ropewalk prepare`, `ropewalk prepare explain`"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ropewalk import flow
from ropewalk.base.progress import amount

from .console import Console, emit, table
from .options import Json, New, Overrides, RecipeFile, Runs, verb

app = verb()


@app.command()
def prepare(
    recipe: RecipeFile,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    new: New = False,
    explain: Annotated[
        str | None, typer.Option("--explain", help="Tell what became of the document with this id, and stop.")
    ] = None,
    json: Json = False,
) -> None:
    """Example: ropewalk prepare recipes/books.toml

    Example: ropewalk prepare recipes/books.toml --explain "books:my-books/a.txt"

    Turns raw files into filtered, deduplicated token shards with a manifest and a ledger in which every document has a
    row. Prepared data is shared by all runs whose settings and files are the same.
    """
    settings = overrides or ()
    if explain is not None:
        story = flow.explain(recipe, explain, settings, progress=Console())
        emit(dataclasses.asdict(story), as_json=json, text=str(story))
        return
    result = flow.prepare(recipe, settings, runs=runs, new=new, progress=Console())
    emit(result, as_json=json, text=_text(result))


def _text(result: dict[str, Any]) -> str:
    rows = [
        ("folder", result["folder"]),
        ("documents", f"{result['kept']} kept of {result['documents']}"),
        ("train", amount(result["train_tokens"], "tokens")),
        ("validation", amount(result["validation_tokens"], "tokens")),
        ("vocabulary", str(result["vocabulary"])),
    ]
    return table(rows)
