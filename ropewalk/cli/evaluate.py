"""`ropewalk evaluate`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropewalk import flow

from .options import Json, Nproc, Overrides, Runs, verb
from .progress_lines import Console, emit
from .run_results import evaluation_text
from .task_list import with_task_lists

app = verb()


@app.command()
def evaluate(
    target: Annotated[
        Path,
        typer.Argument(help="A recipe, a run directory, a checkpoint or a Hugging Face directory.", show_default=False),
    ],
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    nproc: Nproc = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", min=1, help="Ask the first so many questions of each task (evaluate.limit).", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder of results of a checkpoint or Hugging Face directory. Default: evaluation/NAME in --runs.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Evaluate a model: held-out text, samples, benchmarks.

    Example: ropewalk evaluate recipes/books.toml evaluate.samples=50

    Trains the recipe first where that is not done. For a run directory, such as runs/books, evaluates the newest
    checkpoint; overrides of `evaluate` are recorded in the run. A checkpoint or a Hugging Face directory is evaluated
    without run and corpus: name tasks that need none, as evaluate.tasks=["TASK"]. Answers are saved as they come; the
    same command continues. With several processes the model is sharded as in training; under torchrun, srun or mpirun
    it uses the processes they launched.
    """
    words = [*(overrides or ()), *([f"evaluate.limit={limit}"] if limit else [])]
    result = flow.evaluate(target, words, runs=runs, progress=Console(), nproc=nproc, out=out)
    where = [f"report: {result['report']}"] if "report" in result else []
    emit(result, as_json=json, text="\n".join([evaluation_text(result), *where]))


app = with_task_lists(app)
