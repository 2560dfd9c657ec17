"""Runs the stages of a run: prepare, plan, train, evaluate, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from ropewalk.base.blame import traceback_in
from ropewalk.base.errors import RunConflict, UserError
from ropewalk.base.events import EventLog
from ropewalk.base.files import locked
from ropewalk.base.progress import Progress, Silent
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.config.ranks import ranks
from ropewalk.config.resolved import FILE as CONFIG
from ropewalk.train.failures import meet
from ropewalk.train.hooks.hook import Hook

from .continue_run import continuation
from .evaluate_run import evaluate_stage
from .plan_recipe import check_plan, plan_stage
from .preflight import check_contents, check_outputs, check_trainable
from .prepare_stage import prepare_stage
from .report_stage import report_stage
from .run_dir import open_run, set_aside
from .run_or_recipe import Given, RecipeLike, given, narrowed, recipe_words
from .run_processes import ONE_PROFILED, assist, leave_world, verify_run
from .run_stages import OpenRun, Result, RunStage
from .start_from.base_model import kept
from .start_from.start_from import RUNS
from .train_stage import base_models, train_stage, training_inputs

STAGES: tuple[RunStage, ...] = get_args(RunStage)
USED_BY_PREPARE = ("seed", "prepare", "load.corpus", "load.tokenizer")
"""Keys and tables that `prepare` reads; other settings do not invalidate a trained run."""


def advance(
    recipe: RecipeLike | Given,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    until: RunStage = "report",
    new: bool = False,
    progress: Progress | None = None,
    nproc: int | None = None,
    profile_steps: int = 0,
    hooks: Sequence[Hook] = (),
    begin_training: bool = False,
    verify: bool = False,
) -> Result:
    """Runs the stages of a run up to `until`, from its current state; returns the result of the last one.

    Killed at any instant, the same call continues. `new` sets an existing run aside first. `nproc` processes of this
    machine train (None: as `[parallel]` asks). `profile_steps` steps are profiled, and their table is added to the
    result. `hooks` observe training in this process. `begin_training` prepares the run for a manually started worker,
    without training. `verify` then compares the plan with a single device, and returns the verdict.

    If a launcher (torchrun, srun, mpirun) started several processes, all must call: rank 0 runs all stages, the others
    train and evaluate with it.
    """
    meant = recipe if isinstance(recipe, Given) else given(recipe, overrides, runs=runs, new=new)
    resolved, folder, place, say = meant.resolved, meant.folder, ranks(), progress or Silent()
    with traceback_in(folder), meet(folder, place) as rendezvous:
        meant.check_inputs()
        if place.world > 1 and (begin_training or nproc not in (None, place.world)):
            raise UserError(f"{place.launcher} started {place.world} processes; leave out --nproc and --detach")
        if profile_steps and (nproc or 1) > 1:
            raise UserError(ONE_PROFILED)
        if place.rank > 0:
            return assist(folder, rendezvous, hooks=hooks)
        for remark in [] if meant.prepared else check_contents(resolved):
            say.say(str(remark))
        processes = place.world if place.world > 1 else nproc
        planned = None
        if until != "prepare":
            check_trainable(resolved)
            planned = check_plan(resolved, processes=processes)
        check_outputs(resolved, run=folder)
        if new:
            _refuse_if_running(folder)
            set_aside(folder)
        with locked(folder), EventLog(folder) as events:
            had_config = (folder / CONFIG).exists()
            if until == "prepare" and had_config and list_checkpoints(folder / "checkpoints"):
                resolved, _ = narrowed(folder, resolved, keys=USED_BY_PREPARE)
            found = continuation(folder, resolved)
            open_run(folder, found, events)
            if found.message:
                say.say(found.message)
            run = OpenRun(
                folder=folder,
                recipe=found.resolved.value,
                events=events,
                progress=say,
                rendezvous=rendezvous,
                processes=processes,
                until=until,
                prepared=meant.prepared,
                recipe_words=recipe_words(resolved),
                expected_plan=planned if found.resolved.value == meant.resolved.value else None,
                hooks=hooks,
                profile_steps=profile_steps,
            )
            try:
                with kept(base_models(run.recipe)):
                    result = _run_stages(run)
            except RunConflict:
                if not had_config:
                    (folder / CONFIG).unlink()  # a refused run is left unchanged
                raise
            if verify:
                result = verify_run(run)
            rendezvous.announce("nothing")
            leave_world(place)
            if begin_training:
                run.stages.begin("train", training_inputs(run))
            return {**result, "profile": run.profile} if profile_steps else result


def _run_stages(run: OpenRun) -> Result:
    start = time.perf_counter()
    work: dict[RunStage, Callable[[OpenRun], Result]] = {
        "prepare": prepare_stage,
        "plan": plan_stage,
        "train": train_stage,
        "evaluate": evaluate_stage,
        "report": report_stage,
    }
    result: Result = {}
    for stage in STAGES[: STAGES.index(run.until) + 1]:
        if stage == "report":
            run.events.write("run_finished", seconds=time.perf_counter() - start)
        result = work[stage](run)
    return result


def _refuse_if_running(folder: Path) -> None:
    if folder.exists():
        try:
            with locked(folder):
                pass
        except RunConflict as error:
            raise RunConflict(f"{error}; --new would move a running run") from None
