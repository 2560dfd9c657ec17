"""What a worker reads from its run directory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.errors import DataError
from ropewalk.checkpoint.config import Checkpoints
from ropewalk.config.resolved import load_section, load_value
from ropewalk.config.stages import read_stage
from ropewalk.load.config import Load
from ropewalk.model.spec import Spec
from ropewalk.plan.plan import Planned, load_plan

from .config import Train
from .phase_spec import PhaseSpec, phases_of

VERDICT = "verify.json"
"""What `--verify` found, in the run directory."""
REQUEST = "request.json"
"""What a worker of `ropewalk generate` is asked for, in its folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The part of the resolved config that training needs, with the plan and the place of the data."""

    seed: int
    """Of training."""
    load: Load
    train: Train
    checkpoint: Checkpoints
    planned: Planned
    data: Path
    """Folder of the prepared data."""

    @property
    def phases(self) -> tuple[PhaseSpec, ...]:
        """The phases of the run, as many as there are plans."""
        return phases_of(self.train, sequence_length=self.load.sequence_length)

    def model(self, phase: int) -> Spec:
        """The model of a phase; its longest row is that of the run, so that learned positions keep their shape."""
        specs = [planned.spec for planned in self.planned.phases]
        return dataclasses.replace(specs[phase], sequence_length=max(spec.sequence_length for spec in specs))


def training_seed(train: Train, recipe_seed: int) -> int:
    """Its own, or that of the recipe."""
    return recipe_seed if train.seed is None else train.seed


def read_settings(run: Path) -> Settings:
    """The settings in a run directory that has been prepared and planned."""
    prepared = read_stage(run, "prepare")["result"]
    if prepared is None:
        raise DataError(f"{run}: its data are not prepared; run `ropewalk run` with the recipe first")
    train = load_section(run, "train", Train)
    return Settings(
        seed=training_seed(train, load_value(run, "seed")),
        load=load_section(run, "load", Load),
        train=train,
        checkpoint=load_section(run, "checkpoint", Checkpoints),
        planned=load_plan(run),
        data=Path(prepared["folder"]),
    )
