"""The processes that train, verify and evaluate a run: this one, a local worker group, or the ranks of a launch.

Rank 0 of a launch calls these functions as it goes through the run stages; the other ranks call `assist`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DamagedCheckpoint, MissingPackage, UserError
from ropewalk.base.files import read_json
from ropewalk.base.rendezvous import Rendezvous
from ropewalk.config.ranks import Ranks, ranks
from ropewalk.evaluate.results import RESULTS, read_results
from ropewalk.launch.worker import command
from ropewalk.launch.worker_group import WorkerGroup, run_workers
from ropewalk.plan.plan import load_plan
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.settings import VERDICT

from .plan_recipe import needs_torch
from .recipe import Recipe
from .run_stages import OpenRun, Result
from .summary import trained_figures

WORKERS_HOOKED = (
    "`hooks=[...]` works in this process, and the plan trains in several; name the hooks in `train.hooks`, which every "
    "worker process imports"
)
ONE_PROFILED = "--profile supports a single process; drop it, or run with --nproc 1"


def train_run(run: OpenRun) -> Result:
    """Trains to the last step; returns the last figures."""
    wanted, place = planned_processes(run.folder), ranks()
    if wanted > 1 and place.world == 1:
        if run.profile_steps:
            raise UserError(ONE_PROFILED)
        if run.hooks:
            raise UserError(WORKERS_HOOKED)
        if importlib.util.find_spec("torch") is None:
            raise MissingPackage("torch", "training", "train")
        run_workers(run.folder, worker_group_of(run.recipe, wanted), progress=run.progress)
        return trained_figures(run.folder)
    run.rendezvous.announce("train")
    loop = needs_torch("ropewalk.train.loop", "training")
    settings: dict[str, Any] = {"progress": run.progress, "rendezvous": run.rendezvous, "stays": place.world > 1}
    if not run.profile_steps:
        return dict(loop.train(run.folder, hooks=run.hooks, **settings))
    profiler = needs_torch("ropewalk.train.hooks.profiler", "training").Profiler(run.profile_steps)
    figures = loop.train(run.folder, hooks=[*run.hooks, profiler], **settings)
    run.profile = profiler.table
    return dict(figures)


def verify_run(run: OpenRun) -> Result:
    """Compares the plan with a single device, without changing the run."""
    processes = planned_processes(run.folder)
    if processes == 1 or ranks().world > 1:
        run.rendezvous.announce("verify")
        module = needs_torch("ropewalk.train.verify", "verification")
        return dict(module.verify(run.folder, progress=run.progress))
    (run.folder / VERDICT).unlink(missing_ok=True)
    _start_team(run, processes, "--verify")
    return dict(read_json(run.folder / VERDICT, what="verdict"))


def evaluate_run(run: OpenRun, checkpoint: Path) -> Result:
    """Evaluates `checkpoint`, the newest of the run, under the run's plan."""
    processes = planned_processes(run.folder)
    if processes == 1:
        module = needs_torch("ropewalk.evaluate.from_checkpoint", "evaluation")
        data, settings = Path(run.prepared_result("folder")), run.recipe.evaluate
        named = {"run": run.folder, "data": data, "settings": settings, "seed": run.recipe.seed}
        return dict(module.evaluate_checkpoint(checkpoint, **named, progress=run.progress))
    if ranks().world > 1:
        run.rendezvous.announce("evaluate")
        module = needs_torch("ropewalk.evaluate.sharded_model", "evaluation")
        return dict(module.evaluate_run(run.folder, progress=run.progress))
    if importlib.util.find_spec("torch") is None:
        raise MissingPackage("torch", "evaluation", "train")
    (run.folder / RESULTS).unlink(missing_ok=True)
    _start_team(run, processes, "--evaluate")
    return dict(read_results(run.folder))


def _start_team(run: OpenRun, processes: int, option: str) -> None:
    """Runs the worker command with `option` in `processes` processes; none is restarted."""
    group = WorkerGroup(processes=processes, max_restarts=0, worker=[*command(run.folder), option])
    run_workers(run.folder, group, progress=run.progress)


def assist(folder: Path, rendezvous: Rendezvous, *, hooks: Sequence[Hook] = ()) -> Result:
    """Runs ranks other than 0: trains, verifies and evaluates when rank 0 does. Returns the verdict of a verification;
    other results are on rank 0 only."""
    verdict: Result = {}
    while (what := rendezvous.wait()) != "nothing":
        if what == "train":
            needs_torch("ropewalk.train.loop", "training").train(folder, hooks=hooks, rendezvous=rendezvous, stays=True)
        elif what == "verify":
            verdict = dict(needs_torch("ropewalk.train.verify", "verification").verify(folder))
        elif what == "evaluate":
            module = needs_torch("ropewalk.evaluate.sharded_model", "evaluation")
            # All ranks find a damaged checkpoint; rank 0 decides how to handle it.
            with contextlib.suppress(DamagedCheckpoint):
                module.evaluate_run(folder)
    leave_world(ranks())
    return verdict


def leave_world(place: Ranks) -> None:
    """Leaves the process group of a launch. All ranks must call."""
    mesh = sys.modules.get("ropewalk.parallel.mesh")  # imported by processes that joined
    if place.world > 1 and mesh:
        mesh.leave()


def worker_group_of(recipe: Recipe, processes: int) -> WorkerGroup:
    """A group of `processes` workers, restarted according to `train.faults`."""
    faults = recipe.train.faults
    return WorkerGroup(processes=processes, max_restarts=faults.max_restarts, grace_s=faults.grace_s)


def planned_processes(folder: Path) -> int:
    """Number of processes in the run's plan."""
    return load_plan(folder).phases[0].plan.world
