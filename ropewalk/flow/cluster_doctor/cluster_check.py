"""`doctor cluster`: checks ranks, devices, network and storage before a launch."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import MissingPackage, UserError
from ropewalk.base.files import read_json, write_json
from ropewalk.base.progress import Progress, Silent
from ropewalk.config.ranks import Ranks, ranks
from ropewalk.launch.processes import RankFailure, run_ranks
from ropewalk.plan.machine import this_machine
from ropewalk.train.cluster.brief import FILE, PLAN_FIELDS, TABLE, Brief
from ropewalk.train.optim.table import OPTIMIZERS

from ..plan_recipe import needs_torch, plan_recipe
from ..preflight import located
from ..run_or_recipe import Given, RecipeLike, given
from ..start_from.start_from import RUNS
from .verdict import judge

FORMAT = 1


def doctor_cluster(
    recipe: RecipeLike | None = None,
    overrides: Sequence[str] = (),
    *,
    runs: Path = RUNS,
    nproc: int | None = None,
    seconds: float = 0.5,
    timeout_s: float = 60.0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Checks ranks, devices, versions, clocks, network and storage of a launch. Returns `findings`, one per check, and
    the table `measured`; `ok` is False if something is wrong or missing.

    Starts `nproc` processes on this machine, or as many as the recipe's `[parallel]` asks for. Under a launcher
    (torchrun, srun, mpirun) all of its processes must call; rank 0 gets the result, the others only `stuck`: whether a
    measurement of this process never returned, so that it must end by `os._exit`.

    Without a recipe the ranks form one axis, `world`. Each measurement takes about `seconds`; a rank that has not
    finished a step after `timeout_s` is reported.
    """
    place, progress = ranks(), progress or Silent()
    if importlib.util.find_spec("torch") is None:
        raise MissingPackage("torch", "checking a cluster", "train")
    times = {"seconds": seconds, "timeout_s": timeout_s}
    if not place.launcher:
        meant = given(recipe, overrides, runs=runs) if recipe is not None else None
        brief = make_brief(meant, processes=nproc, **times)
        table, failed = _on_this_machine(brief, meant.folder if meant else runs, progress)
        return _result(table, failed, stuck=False)
    if nproc not in (None, place.world):
        raise UserError(f"{place.launcher} started {place.world} processes; leave out --nproc")
    return _launched(place, recipe, overrides, runs=runs, times=times, progress=progress)


def make_brief(meant: Given | None, *, processes: int | None, seconds: float, timeout_s: float) -> Brief:
    """What to check for `processes` ranks, with or without a recipe."""
    if meant is None:
        gpus = bool(this_machine().gpus)
        return Brief(
            device="cuda" if gpus else "cpu",
            replicate=processes or 1,
            recipe=False,
            seconds=seconds,
            timeout_s=timeout_s,
        )
    recipe = meant.resolved.value
    try:
        planned = plan_recipe(recipe, vocabulary=meant.vocabulary(), processes=processes)
    except UserError as error:
        raise located(error, meant.resolved) from None
    phase = planned.fullest
    plan, state_bytes = phase.plan, OPTIMIZERS[recipe.train.optimizer.kind].state_bytes
    return Brief(
        **{field: getattr(plan, field) for field in PLAN_FIELDS},
        memory_bytes=phase.memory.total,
        checkpoint_bytes=phase.spec.weight_bytes() + phase.spec.optimizer_bytes(state_bytes, trained=phase.trained),
        # One more than is kept: the oldest is deleted when the newest is complete.
        checkpoints=recipe.checkpoint.keep_last + 1,
        seconds=seconds,
        timeout_s=timeout_s,
    )


def _launched(
    place: Ranks,
    recipe: RecipeLike | None,
    overrides: Sequence[str],
    *,
    runs: Path,
    times: dict[str, float],
    progress: Progress,
) -> dict[str, Any]:
    """One process of a launcher."""
    module = needs_torch("ropewalk.train.cluster.examine", "checking a cluster")
    examination = module.Examination(place, timeout_s=times["timeout_s"], progress=progress)

    def resolve() -> Given | None:
        return given(recipe, overrides, runs=runs) if recipe is not None else None

    def folder() -> Path:
        meant = resolve()
        return meant.folder if meant else runs

    table = examination.run(folder, lambda: make_brief(resolve(), processes=place.world, **times))
    if place.rank > 0:
        return {"stuck": examination.stuck}
    return _result(table, {}, stuck=examination.stuck)


def _on_this_machine(brief: Brief, run: Path, progress: Progress) -> tuple[dict[str, Any], dict[int, RankFailure]]:
    with tempfile.TemporaryDirectory(prefix="ropewalk-doctor-") as made:
        folder = Path(made)
        write_json(folder / FILE, brief.tree())
        command = [sys.executable, "-m", "ropewalk.train.cluster", str(folder), str(run)]
        failed = run_ranks(command, processes=brief.plan.world, folder=folder, progress=progress)
        if (folder / TABLE).exists():
            return read_json(folder / TABLE, what="table"), {rank: end for rank, end in failed.items() if rank > 0}
    nothing = {"world": brief.plan.world, "timeout_s": brief.timeout_s, "brief": brief.tree(), "steps": {}}
    return nothing, failed


def _result(table: dict[str, Any], failed: dict[int, RankFailure], *, stuck: bool) -> dict[str, Any]:
    findings = judge(table, failed={rank: str(end) for rank, end in failed.items()})
    return {
        "format": FORMAT,
        "ok": not any(finding.is_fatal for finding in findings),
        "findings": [finding.tree() for finding in findings],
        "measured": table,
        "stuck": stuck,
    }
