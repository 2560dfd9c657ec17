"""The verbs as functions: `from ropewalk.flow import train`. Each is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chaos_trials.damage import damage_run as damage_run
    from .chaos_trials.trials import chaos as chaos
    from .checkpoints import prune_checkpoints as prune_checkpoints
    from .checkpoints import reshard_checkpoint as reshard_checkpoint
    from .cluster_doctor.cluster_check import doctor_cluster as doctor_cluster
    from .code_samples import check_sandbox as check_sandbox
    from .code_samples import run_code as run_code
    from .data_doctor.data_doctor import doctor_data as doctor_data
    from .data_doctor.loader_tuning import tune_data as tune_data
    from .file_scores import FileScore as FileScore
    from .file_scores import score_annotations as score_annotations
    from .file_scores import score_files as score_files
    from .human import export_sheets as export_sheets
    from .human import import_ratings as import_ratings
    from .human import measure_huse as measure_huse
    from .human import show_ratings as show_ratings
    from .job_files import launch_kubernetes as launch_kubernetes
    from .job_files import launch_slurm as launch_slurm
    from .models import export_model as export_model
    from .models import grow_model as grow_model
    from .models import import_model as import_model
    from .new.new_recipe import new_recipe as new_recipe
    from .plan_drawing import draw_plan as draw_plan
    from .prepared import explain as explain
    from .prepared import prepare_report as prepare_report
    from .prepared import prune_stages as prune_stages
    from .prepared import what_if as what_if
    from .profile_step import profile as profile
    from .recipe import Recipe as Recipe
    from .recipes import check as check
    from .recipes import describe as describe
    from .recipes import diff as diff
    from .recipes import show as show
    from .recipes import upgrade as upgrade
    from .training_bench import bench_train as bench_train
    from .verbs import answer as answer
    from .verbs import chat as chat
    from .verbs import complete as complete
    from .verbs import detach as detach
    from .verbs import evaluate as evaluate
    from .verbs import generate as generate
    from .verbs import plan as plan
    from .verbs import prepare as prepare
    from .verbs import quickstart as quickstart
    from .verbs import recipe_from as recipe_from
    from .verbs import run as run
    from .verbs import train as train
    from .verbs import verify as verify
    from .view_runs import compare as compare
    from .view_runs import monitor as monitor
    from .view_runs import report as report
    from .view_runs import watch as watch

_HOMES = {
    "recipes": ("check", "describe", "diff", "show", "upgrade"),
    "training_bench": ("bench_train",),
    "code_samples": ("check_sandbox", "run_code"),
    "checkpoints": ("prune_checkpoints", "reshard_checkpoint"),
    "human": ("export_sheets", "import_ratings", "measure_huse", "show_ratings"),
    "job_files": ("launch_kubernetes", "launch_slurm"),
    "cluster_doctor.cluster_check": ("doctor_cluster",),
    "chaos_trials.damage": ("damage_run",),
    "data_doctor.data_doctor": ("doctor_data",),
    "plan_drawing": ("draw_plan",),
    "view_runs": ("compare", "monitor", "report", "watch"),
    "models": ("export_model", "grow_model", "import_model"),
    "prepared": ("explain", "prepare_report", "prune_stages", "what_if"),
    "profile_step": ("profile",),
    "file_scores": ("FileScore", "score_annotations", "score_files"),
    "recipe": ("Recipe",),
    "chaos_trials.trials": ("chaos",),
    "known_tasks": ("list_missing_data", "list_tasks"),
    "data_doctor.loader_tuning": ("tune_data",),
    "verbs": (
        *("answer", "chat", "complete", "detach", "evaluate", "generate", "plan", "prepare"),
        *("quickstart", "recipe_from", "run", "train", "verify"),
    ),
    "new.new_recipe": ("new_recipe",),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
