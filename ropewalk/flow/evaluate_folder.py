"""`evaluate` of a model folder: a checkpoint or a Hugging Face directory, without run and corpus.

Several processes of this machine share the model; they get the request in the folder of results.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.base.errors import MissingPackage, UserError
from ropewalk.base.files import locked, write_json
from ropewalk.base.progress import Progress, Silent
from ropewalk.checkpoint.format import is_checkpoint
from ropewalk.config.ranks import ranks
from ropewalk.config.read import read
from ropewalk.config.write import plain
from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.results import read_results
from ropewalk.launch.worker import command
from ropewalk.launch.worker_group import WorkerGroup, run_workers
from ropewalk.monitor.report.evaluation.evaluation_page import write_evaluation_report
from ropewalk.train.failures import meet
from ropewalk.train.settings import REQUEST

from .plan_recipe import needs_torch
from .run_or_recipe import is_run
from .run_stages import Result

RESULTS = "evaluation"
"""Results of model folders lie here, below the folder of runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderSettings:
    """Settings for a model without a recipe."""

    evaluate: Evaluate = field(default_factory=Evaluate)
    seed: int = 0
    """Seed of generation and of samples."""


def is_model_folder(path: Path) -> bool:
    """Whether `path` is a checkpoint or a Hugging Face directory."""
    return not is_run(path) and (is_checkpoint(path) or (path / "config.json").is_file())


def measure_folder(
    path: Path,
    overrides: Sequence[str],
    *,
    runs: Path,
    out: Path | None = None,
    progress: Progress | None = None,
    processes: int | None = None,
) -> Result:
    """Evaluates the model in `path`; results are in `out`, by default `evaluation/NAME` in the folder of runs. Under a
    launcher with several processes all must call."""
    settings, place = read(FolderSettings, None, overrides).value, ranks()
    if place.world > 1 and processes not in (None, place.world):
        raise UserError(f"{place.launcher} started {place.world} processes; leave out --nproc")
    folder = out or runs / RESULTS / name_of(path)
    request = {"path": path, "out": folder, "settings": settings.evaluate, "seed": settings.seed}
    folder.mkdir(parents=True, exist_ok=True)
    if place.world > 1:
        with meet(folder, place):  # where one rank fails, the others end too
            found = dict(_module().evaluate_folder(**request, progress=progress if place.rank == 0 else None))
            return _reported(found, folder) if place.rank == 0 else found
    with locked(folder):
        if processes is None or processes == 1:
            return _reported(dict(_module().evaluate_folder(**request, progress=progress)), folder)
        if importlib.util.find_spec("torch") is None:
            raise MissingPackage("torch", "evaluation", "train")
        named = {"path": str(path.resolve()), "settings": plain(settings.evaluate), "seed": settings.seed}
        write_json(folder / REQUEST, named)
        team = WorkerGroup(processes=processes, max_restarts=0, worker=[*command(folder), "--evaluate-folder"])
        run_workers(folder, team, progress=progress or Silent())
        return _reported(dict(read_results(folder)), folder)


def _reported(results: Result, folder: Path) -> Result:
    return {**results, "report": str(write_evaluation_report(folder))}


def name_of(path: Path) -> str:
    """A name for the results of the model in `path`: of a run's checkpoint with the name of the run."""
    whole = path.resolve()
    return f"{whole.parent.parent.name}-{whole.name}" if whole.parent.name == "checkpoints" else whole.name


def _module() -> Any:
    return needs_torch("ropewalk.evaluate.model_folder", "evaluation")
