"""`ropewalk evaluate`"""

from __future__ import annotations

from pathlib import Path

from ropewalk import flow

from .options import Json, Nproc, Overrides, RecipeOrRun, Runs, verb
from .progress_lines import Console, emit
from .run_results import evaluation_text
from .task_list import with_task_lists

app = verb()


@app.command()
def evaluate(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    nproc: Nproc = None,
    json: Json = False,
) -> None:
    """Evaluate a trained model on held-out text and draw samples.

    Example: ropewalk evaluate recipes/books.toml evaluate.samples=50

    Trains the recipe first where that is not done. For a run directory, such as runs/books, evaluates the newest
    checkpoint; overrides of `evaluate` are recorded in the run. With several processes the model is sharded as in
    training; under torchrun, srun or mpirun it uses the processes they launched.
    """
    result = flow.evaluate(recipe, overrides or (), runs=runs, progress=Console(), nproc=nproc)
    emit(result, as_json=json, text=evaluation_text(result))


app = with_task_lists(app)
