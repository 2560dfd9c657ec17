"""`ropewalk evaluate`"""

from __future__ import annotations

from pathlib import Path

from ropewalk import flow

from .console import Console, emit
from .options import Json, Nproc, Overrides, RecipeOrRun, Runs, verb
from .results import evaluation_line

app = verb()


@app.command()
def evaluate(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    nproc: Nproc = None,
    json: Json = False,
) -> None:
    """Example: ropewalk evaluate recipes/books.toml evaluate.samples=50

    Measures the recipe's trained model on held-out text (training it first where that is not done) and draws samples.
    Of a run directory, as runs/books, it measures the newest checkpoint. Overrides of `evaluate` are recorded in the
    run; settings that evaluation does not use are those of the run. Several processes share the model as in training;
    under torchrun, srun or mpirun, those that these launched.
    """
    result = flow.evaluate(recipe, overrides or (), runs=runs, progress=Console(), nproc=nproc)
    emit(result, as_json=json, text=evaluation_line(result) if result else "")
