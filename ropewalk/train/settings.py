"""Reads a worker's settings from its run directory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.errors import DataError
from ropewalk.checkpoint.config import Checkpoints
from ropewalk.config.resolved import load_section, load_value
from ropewalk.config.stages import read_stage
from ropewalk.evaluate.config import Evaluate
from ropewalk.load.config import Load
from ropewalk.model.spec import Spec
from ropewalk.plan.plan import Planned, load_plan

from .config import Train
from .phase_spec import PhaseSpec, phases_of

VERDICT = "verify.json"
"""Result of `--verify`, in the run directory."""
REQUEST = "request.json"
"""Request of `ropewalk generate` to its workers, in their folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The parts of the resolved config that training needs, the plan and the data path."""

    seed: int
    """The training seed."""
    recipe_seed: int
    """The seed of evaluation, whatever `train.seed` says."""
    load: Load
    train: Train
    checkpoint: Checkpoints
    evaluate: Evaluate
    planned: Planned
    data: Path
    """Folder of the prepared data."""

    @property
    def phases(self) -> tuple[PhaseSpec, ...]:
        """The phases of the run, one per plan."""
        return phases_of(self.train, sequence_length=self.load.sequence_length)

    def model(self, phase: int) -> Spec:
        """The model of a phase, with the run's maximum sequence length: learned positions keep their shape."""
        specs = [planned.spec for planned in self.planned.phases]
        return dataclasses.replace(specs[phase], sequence_length=max(spec.sequence_length for spec in specs))


def training_seed(train: Train, recipe_seed: int) -> int:
    """`train.seed`, or the recipe's seed."""
    return recipe_seed if train.seed is None else train.seed


def read_settings(run: Path) -> Settings:
    """Reads the settings of a prepared and planned run directory."""
    prepared = read_stage(run, "prepare")["result"]
    if prepared is None:
        raise DataError(f"{run}: its data are not prepared; run `ropewalk run` with the recipe first")
    train, seed = load_section(run, "train", Train), load_value(run, "seed")
    return Settings(
        seed=training_seed(train, seed),
        recipe_seed=seed,
        load=load_section(run, "load", Load),
        train=train,
        checkpoint=load_section(run, "checkpoint", Checkpoints),
        evaluate=load_section(run, "evaluate", Evaluate),
        planned=load_plan(run),
        data=Path(prepared["folder"]),
    )
