"""What a worker reads from its run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.files import read_json
from ropewalk.checkpoint.config import Checkpoints
from ropewalk.config.resolved import load_section, load_value
from ropewalk.load.config import Load
from ropewalk.plan.plan import Planned, load_plan

from .config import Train


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The part of the resolved config that training needs, with the plan and the place of the data."""

    seed: int
    load: Load
    train: Train
    checkpoint: Checkpoints
    planned: Planned
    data: Path
    """Folder of the prepared data."""


def read_settings(run: Path) -> Settings:
    """The settings in a run directory that has been prepared and planned."""
    prepared = read_json(run / "stages" / "prepare.json", what="result of `ropewalk prepare`")
    return Settings(
        seed=load_value(run, "seed"),
        load=load_section(run, "load", Load),
        train=load_section(run, "train", Train),
        checkpoint=load_section(run, "checkpoint", Checkpoints),
        planned=load_plan(run),
        data=Path(prepared["result"]["folder"]),
    )
