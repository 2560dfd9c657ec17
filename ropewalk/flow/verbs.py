"""One function per verb. A recipe is a path to a TOML file, a run directory (for that run and its settings), or a
`Resolved[Recipe]` made in Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ropewalk.base.errors import UserError
from ropewalk.base.metric import flat_results
from ropewalk.base.progress import Progress
from ropewalk.config.read import Resolved, parse, parse_saved
from ropewalk.config.write import plain
from ropewalk.launch.worker import start_detached
from ropewalk.launch.worker_group import start_group_detached
from ropewalk.plan.machine import this_machine
from ropewalk.plan.speed import Speed
from ropewalk.train.hooks.hook import Hook

from .evaluate_folder import is_model_folder, measure_folder
from .evaluate_run import measure_run
from .expected_time import expected_time
from .generation import checked_text, draw_text, open_conversation
from .plan_recipe import plan_recipe
from .recipe import Recipe
from .run_or_recipe import RecipeLike, given
from .run_processes import planned_processes, worker_group_of
from .run_recipe import advance
from .run_stages import Result, RunStage
from .start_from.start_from import RUNS
from .train_stage import is_trained

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
    until: RunStage = "report",
    nproc: int | None = None,
) -> Result:
    """Runs a recipe from raw files to report, or up to the stage `until`; returns the last stage's result.

    The same call continues a run. `nproc` processes of this machine train (None: as `[parallel]` asks).
    """
    return advance(recipe, overrides, runs=runs, until=until, new=new, progress=progress, nproc=nproc)


def quickstart(
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    new: bool = False,
    progress: Progress | None = None,
    nproc: int | None = None,
) -> Result:
    """Runs the built-in recipe, whose corpus is this machine's Python code; returns the run's summary."""
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
    """Prepares raw files as token shards; returns their folder and token count."""
    return advance(recipe, overrides, runs=runs, until="prepare", new=new, progress=progress)


def plan(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    nproc: int | None = None,
    speed: Speed | None = None,
) -> dict[str, Any]:
    """Forecasts a run's memory and time on this machine with `nproc` processes (None: as `[parallel]` asks); checks
    that its input files exist. Time is estimated from the machine's `speed` (None: measured, in 0.2 s) and the
    finished runs in `runs`."""
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
    hooks: Sequence[Hook] = (),
) -> Result:
    """Trains the recipe's model; returns steps, tokens and last losses.

    `nproc` processes of this machine train (None: as `[parallel]` asks); if one dies, all restart from the newest
    checkpoint.

    `profile` is a number of steps to profile: the result gets their table as `profile`, and the run a folder `profile/`
    with the trace. The weights are the same.

    `hooks` observe training in this process, or intervene (`ropewalk/train/hooks/hook.py`); worker processes import
    those that the recipe names in `train.hooks`.
    """
    settings: dict[str, Any] = {"new": new, "progress": progress, "nproc": nproc}
    return advance(recipe, overrides, runs=runs, until="train", profile_steps=profile, hooks=hooks, **settings)


def verify(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    new: bool = False,
    progress: Progress | None = None,
    nproc: int | None = None,
) -> Result:
    """Checks that the recipe's model computes the same under its plan as on a single device: three steps in float64 on
    a few short sequences of its data, without training. The verdict has `equal`, the largest differences and the first
    parameter that differs, if one does (docs/formats.md)."""
    return advance(recipe, overrides, runs=runs, until="plan", new=new, progress=progress, nproc=nproc, verify=True)


def detach(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    new: bool = False,
    progress: Progress | None = None,
    nproc: int | None = None,
) -> Result:
    """Prepares and plans here, then starts a training process that outlives this one; returns its pid, log and the
    command that monitors it."""
    meant = given(recipe, overrides, runs=runs, new=new)
    advance(meant, until="plan", new=new, progress=progress, begin_training=True, nproc=nproc)
    folder = meant.folder
    processes = planned_processes(folder)
    group = worker_group_of(meant.resolved.value, processes)
    started = start_group_detached(folder, group) if processes > 1 else start_detached(folder)
    return {"pid": started.pid, "log": str(started.log), "watch": f"ropewalk monitor {folder}"}


def evaluate(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    progress: Progress | None = None,
    nproc: int | None = None,
    out: Path | None = None,
) -> Result:
    """Evaluates the recipe's model, training it first if needed; of a given run, its newest checkpoint as it is.
    `nproc` processes of this machine evaluate under the run's plan; None: as many as `[parallel]` asks for.

    Only settings of `evaluate`, `plan` and `parallel` are used; the others are the run's. A checkpoint or a Hugging
    Face directory is evaluated without run and corpus; its results go to `out` (flow/evaluate_folder.py).
    """
    if isinstance(recipe, Path | str) and is_model_folder(Path(recipe)):
        found = measure_folder(Path(recipe), overrides, runs=runs, out=out, progress=progress, processes=nproc)
        return flat_results(found)
    if out is not None:
        raise UserError("results of a run are in the run; --out is for checkpoints and Hugging Face directories")
    meant = given(recipe, overrides, runs=runs)
    if meant.is_run or is_trained(meant.folder):
        found = measure_run(meant, progress=progress, processes=nproc)
    else:
        found = advance(meant, until="evaluate", progress=progress, nproc=nproc)
    return flat_results(found) if found else found


def generate(
    checkpoint: Path,
    *,
    prompt: str,
    tokens: int = 120,
    temperature: float = 0.7,
    top_k: int = 50,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    precision: Literal["fp32", "bf16"] = "fp32",
    nproc: int | None = None,
) -> Iterator[str]:
    """Yields text as it is sampled, up to the first of the texts `stop`; `checkpoint` is a checkpoint or a run
    directory. `nproc` processes of this machine share the model (flow/generation.py); under a launcher with several
    processes all must call."""
    sampling = _sampling(tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop)
    return draw_text(
        checkpoint,
        {"prompt": checked_text(prompt), "sampling": sampling, "seed": seed, "precision": precision},
        nproc=nproc,
    )


def complete(
    checkpoint: Path,
    prompts: Sequence[str],
    *,
    tokens: int = 120,
    temperature: float = 0.7,
    top_k: int = 50,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    precision: Literal["fp32", "bf16"] = "fp32",
    nproc: int | None = None,
) -> list[str]:
    """The texts after many prompts, which share forward passes; `nproc` as in `generate`. A text does not depend on the
    other prompts; equal prompts get different texts if they are sampled."""
    sampling = _sampling(tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop)
    request = {"prompts": [*map(checked_text, prompts)], "sampling": sampling, "seed": seed, "precision": precision}
    return [*draw_text(checkpoint, request, nproc=nproc)]


def answer(
    checkpoint: Path,
    *,
    question: str,
    template: str = "",
    tokens: int = 120,
    temperature: float = 0.7,
    top_k: int = 50,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    precision: Literal["fp32", "bf16"] = "fp32",
    nproc: int | None = None,
) -> Iterator[str]:
    """Yields the answer of a chat model as it is sampled; `template` names its chat template if it has none. `nproc` as
    in `generate`."""
    sampling = _sampling(tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop)
    asked = {
        "question": checked_text(question),
        "template": template,
        "sampling": sampling,
        "seed": seed,
        "precision": precision,
    }
    return draw_text(checkpoint, asked, nproc=nproc)


def chat(
    checkpoint: Path,
    *,
    system: str = "",
    template: str = "",
    tokens: int = 200,
    temperature: float = 0.7,
    top_k: int = 50,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
) -> Conversation:
    """A conversation with the model of a checkpoint or run directory. Its first answer is that of `answer`."""
    sampling = _sampling(tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop)
    return open_conversation(checkpoint, template=template, system=system, sampling=sampling, seed=seed)


def _sampling(
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    stop: Sequence[str],
) -> dict[str, Any]:
    """Fields of `Sampling` (evaluate/task.py), as plain values."""
    return {
        "max_new_tokens": tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": [checked_text(each) for each in stop],
    }


def recipe_from(value: Recipe) -> Resolved[Recipe]:
    """Checks a recipe built in Python like one from a file."""
    return parse_saved(Recipe, _without_none(plain(value)), "recipe", origins={})


def _without_none(tree: Any) -> Any:
    """Plain values without unset ones."""
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    return [_without_none(item) for item in tree] if isinstance(tree, list) else tree
