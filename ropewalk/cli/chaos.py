"""`ropewalk chaos`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropewalk import flow
from ropewalk.base.progress import duration

from .console import Console, emit, table
from .options import Json, Overrides, RecipeFile, Runs, verb

app = verb()


@app.command()
def chaos(
    recipe: RecipeFile,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    quick: Annotated[
        bool, typer.Option("--quick", help="One labelled point of each kind, few random moments.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of moments, places and bits.")] = 0,
    json: Json = False,
) -> None:
    """Example: ropewalk chaos recipes/books.toml --quick train.steps=20

    Trains copies of a run that are killed, lose their disk or their bits, or are preempted, on the storage that the
    run uses. Each must end with the bits of an undisturbed run. The run itself is not touched. Exit status 2 when a
    trial failed; every trial trains the whole run, so choose few steps.
    """
    result = flow.chaos(recipe, overrides or (), runs=runs, quick=quick, seed=seed, progress=Console())
    rows = [(trial["trial"], _verdict(trial)) for trial in result["trials"]]
    rows.append(("in all", f"{len(rows)} trials, {len(result['failed'])} failed"))
    if result["failed"]:
        rows.append(("copies", result["folder"]))
    emit(result, as_json=json, text=table(rows))
    if result["failed"]:
        raise typer.Exit(2)


def _verdict(trial: dict[str, object]) -> str:
    seconds = duration(float(str(trial["seconds"])))
    return f"same bits  ({seconds})" if trial["passed"] else f"FAILED: {trial['wrong']}  ({seconds})"
