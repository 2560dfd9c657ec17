"""`ropewalk profile`"""

from __future__ import annotations

from typing import Annotated

import typer

from ropewalk import flow

from .breakdown import kind_lines, setting_lines, speed_lines
from .options import Json, Overrides, RecipeOrRun, verb
from .progress_lines import Console, emit

app = verb()


@app.command()
def profile(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to time, after three warm-up steps.")] = 12,
    json: Json = False,
) -> None:
    """Profile the training step of a recipe's model.

    Example: ropewalk profile recipes/books.toml

    Runs a few steps on random tokens and prints tokens/s, both MFUs, memory, and the time per class of operations
    with its distance from this device's measured limits. Needs no data and does not touch the run.
    """
    found = flow.profile(recipe, overrides or (), steps=steps, progress=Console())
    contender = [{"contender": found["recipe"], "error": None, **found}]
    lines = [
        *setting_lines(found, name=found["recipe"]),
        "",
        *speed_lines(contender, peak_flops=found["peak_flops"], peak_from=found["peak_from"]),
        "",
        *kind_lines(contender),
    ]
    emit(found, as_json=json, text="\n".join(lines))
