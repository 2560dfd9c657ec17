"""`ropewalk chaos`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ropewalk import flow
from ropewalk.base.errors import UserError
from ropewalk.base.progress import duration

from .options import Json, Overrides, RecipeOrRun, Runs, verb
from .progress_lines import Console, emit, table

app = verb()


@app.command()
def chaos(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    quick: Annotated[
        bool, typer.Option("--quick", help="One crash point of each kind and few random moments.")
    ] = False,
    damage: Annotated[
        int, typer.Option("--damage", min=0, help="Damage this many files of a run instead, one at a time.")
    ] = 0,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of crash moments and flipped bits; number of the first damage.")
    ] = 0,
    json: Json = False,
) -> None:
    """Test a run's recovery: kill it, fill its disk, flip bits, preempt it.

    Example: ropewalk chaos recipes/books.toml --quick train.steps=20

    Trains copies of the run on the same storage; the run itself is not touched. Each copy must end with the bits of
    an undisturbed run. Every trial trains the whole run, so choose few steps. Exit status 2 when a trial failed.

    With --damage, damages files of every kind and reads them as ropewalk does: each damaged file must be rejected
    by name or rebuilt. Exit status 1 when one was not; --damage 1 --seed NUMBER repeats a case.
    """
    if damage:
        if quick:
            raise UserError("--quick chooses among trials and --damage makes none; leave one of them out")
        _damage(
            flow.damage_run(recipe, overrides or (), count=damage, runs=runs, seed=seed, progress=Console()),
            json=json,
        )
        return
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


def _damage(result: dict[str, Any], *, json: bool) -> None:
    outcomes: dict[str, dict[str, int]] = result["outcomes"]
    heads = list(outcomes["in all"])
    rows = [("file", " ".join(f"{head:>10}" for head in heads))]
    rows += [(kind, " ".join(f"{counts[head]:10d}" for head in heads)) for kind, counts in outcomes.items()]
    lines = [
        f"{case['outcome']}, --seed {case['number']}: {case['damage']} in {case['file']}: {case['said'].strip()}"
        for case in result["wrong"]
    ]
    emit(result, as_json=json, text="\n".join([table(rows), *lines]))
    if result["wrong"]:
        raise typer.Exit(1)
