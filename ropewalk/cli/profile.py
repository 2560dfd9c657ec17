"""`ropewalk profile`"""

from __future__ import annotations

from typing import Annotated

import typer

from ropewalk import flow

from .breakdown import kind_lines, setting_lines, speed_lines
from .console import Console, emit
from .options import Json, Overrides, RecipeOrRun, verb

app = verb()


@app.command()
def profile(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are timed, after three of warm-up.")] = 12,
    json: Json = False,
) -> None:
    """Example: ropewalk profile recipes/books.toml

    Makes a few steps of the recipe's model on random tokens and prints tokens a second, both MFUs, memory, the time of
    each kind of work, and how far each is from what this device could do at best. Needs no data, and a run of the
    recipe is not touched.
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
