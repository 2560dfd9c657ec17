"""`ropewalk prepare`, `ropewalk prepare explain | what-if | report | prune`"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ropewalk import flow
from ropewalk.base.progress import amount

from .options import Json, New, Overrides, RecipeOrRun, Runs, WithDefault, verb
from .progress_lines import Console, emit, table

app = verb(
    help="""Turn raw files into filtered, deduplicated token shards.

    Example: ropewalk prepare recipes/books.toml

    Writes a manifest and a ledger with a row for every document. Runs with the same settings and files share
    prepared data, and unchanged work is not repeated.""",
    cls=WithDefault,
)


@app.command(name="data", hidden=True)
def prepare(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    new: New = False,
    json: Json = False,
) -> None:
    """Turn raw files into token shards.

    Example: ropewalk prepare recipes/books.toml
    """
    result = flow.prepare(recipe, overrides or (), runs=runs, new=new, progress=Console())
    emit(result, as_json=json, text=_text(result))


@app.command()
def explain(
    recipe: RecipeOrRun,
    document: Annotated[str, typer.Argument(help="The document's id.", metavar="ID", show_default=False)],
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Explain what happened to a document and why.

    Example: ropewalk prepare explain recipes/books.toml "books:my-books/a.txt"

    Kept, edited or removed, by which rule, with the measured value and the threshold, the document it duplicates,
    and where its tokens are. Prepares the data first where needed.
    """
    story = flow.explain(recipe, document, overrides or (), progress=Console())
    emit(dataclasses.asdict(story), as_json=json, text=str(story))


@app.command(name="what-if")
def what_if(
    recipe: RecipeOrRun,
    settings: Annotated[
        list[str],
        typer.Argument(
            help="Thresholds to try, as filter.min_characters=100; other settings replace the recipe's.",
            show_default=False,
        ),
    ],
    json: Json = False,
) -> None:
    """Show which documents other thresholds would keep or remove.

    Example: ropewalk prepare what-if recipes/books.toml filter.min_characters=1000

    Uses the statistics that were kept, by source and by rule; no text is read. Prepares the data first where
    needed.
    """
    changes = [item for item in settings if item.startswith(("filter.", "prepare.filter."))]
    overrides = [item for item in settings if item not in changes]
    found = flow.what_if(recipe, changes, overrides, progress=Console())
    emit(dataclasses.asdict(found), as_json=json, text=str(found))


@app.command()
def report(recipe: RecipeOrRun, overrides: Overrides = None, json: Json = False) -> None:
    """Write an offline HTML page about the corpus.

    Example: ropewalk prepare report recipes/books.toml

    Shows what each rule removed, how rules overlap, samples of removed documents, repetition and composition.
    """
    path = flow.prepare_report(recipe, overrides or (), progress=Console())
    emit({"report": str(path)}, as_json=json, text=str(path))


@app.command()
def prune(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be deleted.")] = False,
    json: Json = False,
) -> None:
    """Delete intermediate results that this recipe's data does not need.

    Example: ropewalk prepare prune recipes/books.toml --dry-run

    Removes results in `prepared/stages` of earlier settings and files, and of other recipes in the same folder.
    Prepared data stays.
    """
    found = flow.prune_stages(recipe, overrides or (), dry_run=dry_run, progress=Console())
    rows = [
        ("would delete" if dry_run else "deleted", f"{found.files:,} files, {amount(found.bytes, 'B')}"),
        ("kept", f"{found.kept_files:,} files, {amount(found.kept_bytes, 'B')}"),
    ]
    emit(dataclasses.asdict(found), as_json=json, text=table(rows))


def _text(result: dict[str, Any]) -> str:
    rows = [
        ("folder", result["folder"]),
        ("documents", f"{result['kept']} kept of {result['documents']}"),
        ("train", amount(result["train_tokens"], "tokens")),
        ("validation", amount(result["validation_tokens"], "tokens")),
        ("vocabulary", str(result["vocabulary"])),
    ]
    return table(rows)
