"""`ropewalk evaluate`"""

from __future__ import annotations

from pathlib import Path

from ropewalk import flow

from .console import Console, emit
from .options import Json, Overrides, RecipeFile, Runs, verb
from .results import evaluation_line

app = verb()


@app.command()
def evaluate(recipe: RecipeFile, overrides: Overrides = None, runs: Runs = Path("runs"), json: Json = False) -> None:
    """Example: ropewalk evaluate recipes/books.toml evaluate.samples=50

    Measures the recipe's trained model on held-out text (training it first where that is not done) and draws samples.
    """
    result = flow.evaluate(recipe, overrides or (), runs=runs, progress=Console())
    emit(result, as_json=json, text=evaluation_line(result))
