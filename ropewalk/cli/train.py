"""`ropewalk train`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropewalk import flow
from ropewalk.base.errors import UserError

from .options import Json, New, Nproc, Overrides, RecipeOrRun, Runs, verb
from .plan import plan_text
from .progress_lines import Console, emit, table
from .run_results import trained_text, verdict_text

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
        bool, typer.Option("--detach", help="Train in a separate process that outlives this one.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile the step: print a table and write a trace into the run.")
    ] = False,
    profile_steps: Annotated[
        int | None,
        typer.Option(
            "--profile-steps",
            min=1,
            help="Profile this many steps instead of five, after two warm-up steps.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Do not train; compare three float64 steps of the plan (of part of a large model) with one device.",
        ),
    ] = False,
    timeline: Annotated[
        int, typer.Option("--timeline", min=0, help="Record a per-rank timeline (Perfetto) of this many steps.")
    ] = 0,
    json: Json = False,
) -> None:
    """Train a recipe to its last step, preparing data first where needed.

    Example: ropewalk train recipes/books.toml

    Continues from the newest checkpoint: there is no resume, the same command continues. A finished run continues
    with more steps: ropewalk train runs/books train.steps=800. With --nproc several processes share the work as
    configured in [parallel]; under torchrun, srun or mpirun it uses the processes they launched.
    """
    settings = [*(overrides or ()), *([f"train.timeline_steps={timeline}"] if timeline else [])]
    profile = profile or profile_steps is not None
    if profile and detach:
        raise UserError("--profile prints a table at the end, which a detached process cannot do; drop one of them")
    if verify and (profile or detach):
        raise UserError("--verify does not train; leave out --profile and --detach")
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
