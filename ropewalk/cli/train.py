"""`ropewalk train`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropewalk import flow
from ropewalk.base.errors import UserError

from .console import Console, emit, table
from .options import Json, New, Nproc, Overrides, RecipeOrRun, Runs, verb
from .plan import plan_text
from .results import trained_text, verdict_text

app = verb()


@app.command()
def train(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    new: New = False,
    nproc: Nproc = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Resolve, check, print the plan and stop.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Train in a process of its own that outlives this one.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Tell where the time of a step goes: a table, and a trace in the run.")
    ] = False,
    profile_steps: Annotated[
        int | None,
        typer.Option(
            "--profile-steps",
            min=1,
            help="--profile of so many steps instead of five, after two of warm-up.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Do not train: compare three steps of the plan with one device in float64 (a part of a large model).",
        ),
    ] = False,
    timeline: Annotated[
        int, typer.Option("--timeline", min=0, help="Steps whose phases and collectives are drawn, for every rank.")
    ] = 0,
    json: Json = False,
) -> None:
    """Example: ropewalk train recipes/books.toml

    Prepares what is not yet prepared and trains to the last step, from the newest checkpoint. There is no resume:
    the same command continues, and a finished run continues with more steps: ropewalk train runs/books train.steps=800.
    With --nproc several processes share the work as the recipe's [parallel] says; started
    by torchrun, srun or mpirun, the processes that these start do.
    """
    settings = [*(overrides or ()), *([f"train.timeline_steps={timeline}"] if timeline else [])]
    profile = profile or profile_steps is not None
    if profile and detach:
        raise UserError("--profile prints a table at the end, which a detached process cannot; leave one of them out")
    if verify and (profile or detach):
        raise UserError("--verify trains nothing; leave out --profile and --detach")
    if dry_run:
        planned = flow.plan(recipe, settings, runs=runs, nproc=nproc)
        emit(planned, as_json=json, text=plan_text(planned))
    elif verify:
        verdict = flow.verify(recipe, settings, runs=runs, new=new, progress=Console(), nproc=nproc)
        emit(verdict, as_json=json, text=verdict_text(verdict))
        if not verdict["equal"]:
            raise typer.Exit(1)
    elif detach:
        started = flow.detach(recipe, settings, runs=runs, new=new, progress=Console(), nproc=nproc)
        emit(started, as_json=json, text=table([(key, str(value)) for key, value in started.items()]))
    else:
        wanted = profile_steps or 5 if profile else 0
        result = flow.train(recipe, settings, runs=runs, new=new, progress=Console(), profile=wanted, nproc=nproc)
        emit(result, as_json=json, text=trained_text(result) if result else "")
