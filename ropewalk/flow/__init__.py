"""The verbs as functions: `from ropewalk.flow import train`. Each is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .authoring import check as check
    from .authoring import describe as describe
    from .authoring import diff as diff
    from .authoring import show as show
    from .authoring import upgrade as upgrade
    from .bench import bench_train as bench_train
    from .checkpoints import prune_checkpoints as prune_checkpoints
    from .checkpoints import reshard_checkpoint as reshard_checkpoint
    from .cluster import launch_kubernetes as launch_kubernetes
    from .cluster import launch_slurm as launch_slurm
    from .cluster_check import doctor_cluster as doctor_cluster
    from .damage import damage_run as damage_run
    from .doctor import doctor_data as doctor_data
    from .drawing import draw_plan as draw_plan
    from .looking import compare as compare
    from .looking import monitor as monitor
    from .looking import report as report
    from .looking import watch as watch
    from .models import export_model as export_model
    from .models import grow_model as grow_model
    from .models import import_model as import_model
    from .prepared import explain as explain
    from .prepared import prepare_report as prepare_report
    from .prepared import prune_stages as prune_stages
    from .prepared import what_if as what_if
    from .profiling import profile as profile
    from .recipe import Recipe as Recipe
    from .trials import chaos as chaos
    from .tuning import tune_data as tune_data
    from .verbs import answer as answer
    from .verbs import chat as chat
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
    from .writing import new_recipe as new_recipe

_HOMES = {
    "authoring": ("check", "describe", "diff", "show", "upgrade"),
    "bench": ("bench_train",),
    "checkpoints": ("prune_checkpoints", "reshard_checkpoint"),
    "cluster": ("launch_kubernetes", "launch_slurm"),
    "cluster_check": ("doctor_cluster",),
    "damage": ("damage_run",),
    "doctor": ("doctor_data",),
    "drawing": ("draw_plan",),
    "looking": ("compare", "monitor", "report", "watch"),
    "models": ("export_model", "grow_model", "import_model"),
    "prepared": ("explain", "prepare_report", "prune_stages", "what_if"),
    "profiling": ("profile",),
    "recipe": ("Recipe",),
    "trials": ("chaos",),
    "tuning": ("tune_data",),
    "verbs": (
        *("answer", "chat", "detach", "evaluate", "generate", "plan", "prepare"),
        *("quickstart", "recipe_from", "run", "train", "verify"),
    ),
    "writing": ("new_recipe",),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
