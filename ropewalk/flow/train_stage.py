"""The run stage `train`: continues from the newest checkpoint to the last step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ropewalk.base.errors import DamagedCheckpoint, UserError
from ropewalk.base.events import events_path, read_events
from ropewalk.checkpoint.format import list_checkpoints, read_checkpoint_manifest
from ropewalk.config.renames import old_names
from ropewalk.config.write import plain
from ropewalk.train.phase_spec import phases_of
from ropewalk.train.settings import training_seed

from .recipe import Recipe
from .run_processes import train_run
from .run_stages import OpenRun, Result, read_record
from .start_from.base_model import identity_of

_COSMETIC = {
    *("faults", "log_every_steps", "layer_stats_every_steps", "validate_every_steps", "validation_sequences"),
    *("timeline_steps", "seed"),
}
"""Settings of `[train]` that do not affect weights; the seed is compared separately."""


def train_stage(run: OpenRun, *, again: bool = False) -> Result:
    """Trains to the last step; with `again` even if the run is trained."""
    checkpoints = run.folder / "checkpoints"

    def work() -> Result:
        run.has_trained = True
        if not list_checkpoints(checkpoints):
            for place in base_models(run.recipe):
                run.events.write("base", place=place, identity=identity_of(place))
        return train_run(run)

    has_checkpoints = bool(list_checkpoints(checkpoints))
    if has_checkpoints:
        _warn_of_changed_bases(run)
    result = run.stages.do(
        "train",
        training_inputs(run),
        work,
        whole=lambda result: not again and _ends_with(run.folder, result["step"]),
        precious=has_checkpoints,
    )
    if run.profile_steps and run.profile is None:
        raise UserError(
            f"{run.folder}: this run is trained, no step is left to profile; start anew with --new (the old run "
            "is kept beside it), or give the recipe another `name`"
        )
    return result


def training_inputs(run: OpenRun) -> dict[str, Any]:
    """The inputs that determine the weights."""
    recipe = run.recipe
    train = {key: value for key, value in plain(recipe.train).items() if key not in _COSMETIC}
    return {
        "data": run.prepared_result("hash"),
        "seed": training_seed(recipe.train, recipe.seed),
        "sequence_length": recipe.load.sequence_length,
        "model": old_names(plain(recipe.model), "model"),
        "train": old_names(train, "train"),
    }


def is_trained(folder: Path) -> bool:
    """Whether the run in `folder` has been trained to its last step."""
    if not (folder / "stages" / "train.json").exists():
        return False
    record = read_record(folder, "train")
    return bool(record and record.result and _ends_with(folder, record.result["step"]))


def base_models(recipe: Recipe) -> list[str]:
    """The base models of the phases, as named in the recipe."""
    phases = phases_of(recipe.train, sequence_length=recipe.load.sequence_length)
    return [phase.start_from for phase in phases if phase.start_from]


def _warn_of_changed_bases(run: OpenRun) -> None:
    """Names base models that have changed since this run started from them; the run no longer needs them."""
    noted = {e["place"]: e["identity"] for e in read_events(events_path(run.folder)) if e["kind"] == "base"}
    for place in base_models(run.recipe):
        now = identity_of(place)
        if now and noted.get(place, now) != now:
            run.progress.say(
                f"warning: {place} has changed since this run started from it; the run keeps what it has, --new "
                "starts anew from what is there now"
            )


def _ends_with(folder: Path, step: int) -> bool:
    """Whether the newest checkpoint of the run in `folder` is that of `step`."""
    found = list_checkpoints(folder / "checkpoints")
    try:
        return bool(found) and read_checkpoint_manifest(found[-1]).step == step
    except DamagedCheckpoint:
        return False  # training continues from an older checkpoint and says so
