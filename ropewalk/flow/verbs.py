"""One function per verb. A recipe is a path to a TOML file, a run directory for that run and its settings, or a
`Resolved[Recipe]` made in Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.base.metric import flat_results
from ropewalk.base.progress import Progress
from ropewalk.config.read import Resolved, parse, parse_saved
from ropewalk.config.write import plain
from ropewalk.launch.team import start_team_detached
from ropewalk.launch.worker import start_detached
from ropewalk.plan.machine import this_machine
from ropewalk.plan.speed import Speed

from .evaluate_run import measure_run
from .expected_time import expected_time
from .generation import checked_text, draw_text, open_conversation
from .plan_recipe import plan_recipe
from .recipe import Recipe
from .run_or_recipe import RecipeLike, given
from .run_recipe import Stage, advance, is_trained, planned_processes, team_of
from .run_stages import Result
from .start_from.start_from import RUNS

if TYPE_CHECKING:
    from ropewalk.evaluate.conversation import Conversation

QUICKSTART = "quickstart.toml"


def run(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    new: bool = False,
    progress: Progress | None = None,
    until: Stage = "report",
    nproc: int | None = None,
) -> Result:
    """Raw files to report, or as far as stage `until`; the result of the last stage. The same call continues a run.

    `nproc` processes of this machine train; None: as many as `[parallel]` asks for.
    """
    meant = given(recipe, overrides, runs=runs, new=new)
    return advance(meant, until=until, new=new, progress=progress, processes=nproc)


def quickstart(
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    new: bool = False,
    progress: Progress | None = None,
    nproc: int | None = None,
) -> Result:
    """`run` on the built-in recipe, whose corpus is the Python of this machine; the run's summary."""
    return run(quickstart_recipe(overrides), runs=runs, new=new, progress=progress, nproc=nproc)


def quickstart_recipe(overrides: Sequence[str] = ()) -> Resolved[Recipe]:
    """The built-in recipe, changed by `overrides`."""
    text = resources.files(__package__).joinpath(QUICKSTART).read_text(encoding="utf-8")
    return parse(Recipe, text, f"built-in {QUICKSTART}", overrides)


def prepare(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    new: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Raw files to token shards; where they are and how many tokens they hold."""
    return run(recipe, overrides, runs=runs, new=new, progress=progress, until="prepare")


def plan(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    nproc: int | None = None,
    speed: Speed | None = None,
) -> dict[str, Any]:
    """What the recipe's run will need on this machine, with `nproc` processes or as many as `[parallel]` asks for; also
    checks that its input files exist. The time is estimated from the `speed` of the machine (None: it is measured, in
    0.2 s) and from the finished runs in `runs`."""
    meant = given(recipe, overrides, runs=runs)
    meant.check_inputs()
    planned = plan_recipe(meant.resolved.value, vocabulary=meant.vocabulary(), processes=nproc)
    machine = this_machine()
    expected = expected_time(planned, machine, runs=runs, speed=speed)
    return {**planned.tree(), "machine": str(machine), "time": dataclasses.asdict(expected) if expected else None}


def train(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    new: bool = False,
    progress: Progress | None = None,
    profile: int = 0,
    nproc: int | None = None,
) -> Result:
    """As far as the trained model; steps, tokens and last losses.

    `nproc` processes of this machine train, one of which may die: all then go on from the newest checkpoint. None: as
    many as `[parallel]` asks for.

    `profile` says how many steps to profile: the result then has their table as `profile`, and the run a folder
    `profile/` with the trace. The weights are the same.
    """
    meant = given(recipe, overrides, runs=runs, new=new)
    return advance(meant, until="train", new=new, progress=progress, profile_steps=profile, processes=nproc)


def verify(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    new: bool = False,
    progress: Progress | None = None,
    nproc: int | None = None,
) -> Result:
    """Whether the recipe's model under the recipe's plan computes what one device does: three steps in float64 on a few
    short rows of its data, without training. The verdict has `equal`, the largest differences and, where there is one,
    the first parameter that differs (docs/formats.md)."""
    meant = given(recipe, overrides, runs=runs, new=new)
    return advance(meant, until="plan", new=new, progress=progress, processes=nproc, verify=True)


def detach(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    new: bool = False,
    progress: Progress | None = None,
    nproc: int | None = None,
) -> Result:
    """As far as the plan here, then training in a process of its own: its number, its log and how to watch it."""
    meant = given(recipe, overrides, runs=runs, new=new)
    advance(meant, until="plan", new=new, progress=progress, begin_training=True, processes=nproc)
    folder = meant.folder
    processes = planned_processes(folder)
    team = team_of(meant.resolved.value, processes)
    started = start_team_detached(folder, team) if processes > 1 else start_detached(folder)
    return {"pid": started.pid, "log": str(started.log), "watch": f"ropewalk monitor {folder}"}


def evaluate(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    progress: Progress | None = None,
    nproc: int | None = None,
) -> Result:
    """What was measured of the recipe's model, which is trained first where that is not done; of a run that is given,
    its newest checkpoint as it is. `nproc` processes of this machine measure it under the run's plan; None: as many as
    `[parallel]` asks for.

    Of the settings, those of `evaluate`, `plan` and `parallel` are used; the others are the run's.
    """
    meant = given(recipe, overrides, runs=runs)
    if meant.is_run or is_trained(meant.folder):
        found = measure_run(meant, progress=progress, processes=nproc)
    else:
        found = advance(meant, until="evaluate", progress=progress, processes=nproc)
    return flat_results(found)


def generate(
    checkpoint: Path,
    *,
    prompt: str,
    tokens: int = 120,
    temperature: float = 0.7,
    top_k: int = 50,
    seed: int = 0,
    nproc: int | None = None,
) -> Iterator[str]:
    """Pieces of text as they are drawn; `checkpoint` is a checkpoint or a run directory. `nproc` processes of this
    machine share the model (flow/generation.py); where a launcher started several, all must call."""
    settings = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    return draw_text(checkpoint, {"prompt": checked_text(prompt), **settings}, nproc=nproc)


def answer(
    checkpoint: Path,
    *,
    question: str,
    template: str = "",
    tokens: int = 120,
    temperature: float = 0.7,
    top_k: int = 50,
    seed: int = 0,
    nproc: int | None = None,
) -> Iterator[str]:
    """Pieces of the answer of a chat model as they are drawn; `template` names its chat template when it has none.
    `nproc` as in `generate`."""
    settings = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    asked = {"question": checked_text(question), "template": template, **settings}
    return draw_text(checkpoint, asked, nproc=nproc)


def chat(
    checkpoint: Path,
    *,
    system: str = "",
    template: str = "",
    tokens: int = 200,
    temperature: float = 0.7,
    top_k: int = 50,
    seed: int = 0,
) -> Conversation:
    """A conversation with the model of a checkpoint or a run directory. Its first answer is the one of `answer`."""
    settings: dict[str, Any] = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    return open_conversation(checkpoint, template=template, system=system, **settings)


def recipe_from(value: Recipe) -> Resolved[Recipe]:
    """A recipe built in Python, checked as one from a file would be."""
    return parse_saved(Recipe, _given(plain(value)), "recipe", origins={})


def _given(tree: Any) -> Any:
    """Plain values without those that are not set."""
    if isinstance(tree, dict):
        return {key: _given(value) for key, value in tree.items() if value is not None}
    return [_given(item) for item in tree] if isinstance(tree, list) else tree
