"""`ropewalk run`"""

from __future__ import annotations

from pathlib import Path

from ropewalk import flow

from .options import Json, New, Nproc, Overrides, RecipeOrRun, Runs, verb
from .progress_lines import Console, emit
from .run_results import run_text

app = verb()


@app.command()
def run(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    new: New = False,
    nproc: Nproc = None,
    json: Json = False,
) -> None:
    """Run a recipe from raw files to the report: prepare, plan, train, evaluate.

    Example: ropewalk run recipes/books.toml train.steps=200

    Skips stages whose inputs have not changed. Killed at any instant, the same command continues. A run directory,
    such as runs/books, can stand in place of the recipe.
    """
    result = flow.run(recipe, overrides or (), runs=runs, new=new, progress=Console(), nproc=nproc)
    emit(result, as_json=json, text=run_text(result) if result else "")
