"""One function per verb. A recipe is a path to a TOML file, or a `Resolved[Recipe]` made in Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ropewalk.base.errors import UserError
from ropewalk.base.progress import Progress
from ropewalk.checkpoint.format import read_checkpoint_manifest, resolve_checkpoint
from ropewalk.checkpoint.instead import advising
from ropewalk.config.read import Resolved, parse, parse_tree
from ropewalk.config.write import plain
from ropewalk.launch.local import start_detached
from ropewalk.launch.team import start_team_detached
from ropewalk.monitor.console import status_lines
from ropewalk.monitor.report import write_report
from ropewalk.monitor.run import read_run
from ropewalk.plan.machine import this_machine
from ropewalk.prepare.chat import TEMPLATES

from .opening import check_inputs, read_recipe
from .pipeline import Stage, advance, expected_vocabulary, needs_torch, plan_recipe, planned_processes, team_of
from .recipe import Recipe
from .stages import Result

RecipeLike = Path | str | Resolved[Recipe]
RUNS = Path("runs")
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
    resolved = resolve_recipe(recipe, overrides)
    return advance(resolved, runs=runs, until=until, new=new, progress=progress, processes=nproc)


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


def plan(recipe: RecipeLike, overrides: Sequence[str] = (), *, nproc: int | None = None) -> dict[str, Any]:
    """What the recipe's run will need on this machine, with `nproc` processes or as many as `[parallel]` asks for; also
    checks that its input files exist."""
    resolved = resolve_recipe(recipe, overrides)
    check_inputs(resolved)
    planned = plan_recipe(resolved.value, vocabulary=expected_vocabulary(resolved.value), processes=nproc)
    return {**planned.tree(), "machine": str(this_machine())}


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
    resolved = resolve_recipe(recipe, overrides)
    return advance(
        resolved, runs=runs, until="train", new=new, progress=progress, profile_steps=profile, processes=nproc
    )


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
    resolved = resolve_recipe(recipe, overrides)
    return advance(resolved, runs=runs, until="plan", new=new, progress=progress, processes=nproc, verify=True)


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
    resolved = resolve_recipe(recipe, overrides)
    advance(resolved, runs=runs, until="plan", new=new, progress=progress, begin_training=True, processes=nproc)
    folder = runs / resolved.value.name
    processes = planned_processes(folder)
    team = team_of(resolved.value, processes)
    started = start_team_detached(folder, team) if processes > 1 else start_detached(folder)
    return {"pid": started.pid, "log": str(started.log), "watch": f"ropewalk monitor {folder}"}


def evaluate(
    recipe: RecipeLike, overrides: Sequence[str] = (), *, runs: Path = RUNS, progress: Progress | None = None
) -> Result:
    """As far as the measured model; what was measured."""
    return run(recipe, overrides, runs=runs, progress=progress, until="evaluate")


def generate(
    checkpoint: Path,
    *,
    prompt: str,
    tokens: int = 120,
    temperature: float = 0.7,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[str]:
    """Pieces of text as they are drawn; `checkpoint` is a checkpoint or a run directory."""
    resolve_checkpoint(checkpoint)
    _check_text(prompt)
    module = needs_torch("ropewalk.evaluate.checkpoint", "generation")
    path = resolve_checkpoint(checkpoint)  # once more: to load torch takes seconds, in which a run may prune
    pieces: Iterator[str] = module.continue_text(
        path, prompt=prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    return pieces


def answer(
    checkpoint: Path,
    *,
    question: str,
    template: str = "",
    tokens: int = 120,
    temperature: float = 0.7,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[str]:
    """Pieces of the answer of a chat model as they are drawn; `template` names its chat template when it has none."""
    resolve_checkpoint(checkpoint)
    _check_text(question)
    module = needs_torch("ropewalk.evaluate.checkpoint", "generation")
    path = resolve_checkpoint(checkpoint)  # as in `generate`
    with advising(path):
        chosen = template or read_checkpoint_manifest(path).chat
    if not chosen:
        raise UserError(
            f"{path}: this model was trained without dialogues, so its chat template is not known; name one with "
            f"--template ({', '.join(TEMPLATES)})"
        )
    pieces: Iterator[str] = module.answer_text(
        path, question=question, template=chosen, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    return pieces


def monitor(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Where the run in `folder` stands: as values and as lines."""
    view = read_run(folder)
    last = view.steps[-1] if view.steps else None
    value = {
        "run": str(folder),
        "name": view.name,
        "finished": view.finished,
        "process": view.process,
        "stages": {stage.name: {"state": stage.state, "seconds": stage.seconds} for stage in view.stages},
        "step": dataclasses.asdict(last) if last else None,
        "saved_step": view.saved_step,
        "missing": list(view.missing),
    }
    return value, status_lines(view)


def report(folder: Path) -> Path:
    """Draws `report.html` of the run in `folder` from its files."""
    return write_report(folder)


def resolve_recipe(recipe: RecipeLike, overrides: Sequence[str] = ()) -> Resolved[Recipe]:
    """The checked recipe with its origins."""
    if isinstance(recipe, Resolved):
        if overrides:
            raise ValueError("overrides belong to a recipe file; change the dataclass instead")
        return recipe
    return read_recipe(Path(recipe), overrides)


def recipe_from(value: Recipe) -> Resolved[Recipe]:
    """A recipe built in Python, checked as one from a file would be."""
    return Resolved(parse_tree(Recipe, _given(plain(value)), "recipe"), {})


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("the prompt is not UTF-8 text; give it in that encoding") from None


def _given(tree: Any) -> Any:
    """Plain values without those that are not set."""
    if isinstance(tree, dict):
        return {key: _given(value) for key, value in tree.items() if value is not None}
    return [_given(item) for item in tree] if isinstance(tree, list) else tree
