"""The root of every recipe: one table per stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from ropewalk.checkpoint.config import Checkpoints
from ropewalk.config.schema import Range
from ropewalk.evaluate.config import Evaluate
from ropewalk.load.config import Load
from ropewalk.model.config import Model
from ropewalk.plan.config import Layout
from ropewalk.prepare.config import Prepare
from ropewalk.train.config import Train
from ropewalk.train.phases import length_problems


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A complete run: raw files in, evaluated model and report out."""

    name: str
    """Name of the run; its files lie in `runs/NAME`."""
    seed: Annotated[int, Range(least=0)] = 0
    """Seed of every random choice: initial weights, order of the data, samples."""
    prepare: Prepare
    """Raw files -> token shards."""
    load: Load = field(default_factory=Load)
    """Token shards -> batches."""
    model: Model = field(default_factory=Model)
    """The model."""
    plan: Layout = field(default_factory=Layout)
    """How a step is laid out on the devices."""
    train: Train = field(default_factory=Train)
    """Batches -> weights."""
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    """When state is saved."""
    evaluate: Evaluate = field(default_factory=Evaluate)
    """What is measured at the end."""

    def check(self) -> Iterator[tuple[str, str]]:
        if not self.name or not self.name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            yield "name", f'"{self.name}" cannot name a folder; use letters, digits, -, _ and .'
        rows = self.plan.microbatch_rows
        for batch_rows in {self.train.batch_rows, *(phase.batch_rows or rows for phase in self.train.phases)}:
            if rows and batch_rows and batch_rows % rows:
                yield (
                    "plan.microbatch_rows",
                    f"{rows} does not divide `train.batch_rows` ({batch_rows}); choose a divisor",
                )
        for key, what in length_problems(self.train, sequence_length=self.load.sequence_length):
            yield f"train.{key}", what
        yield from self._unknown_sources()
        if self.evaluate.prompt_tokens >= self.load.sequence_length:
            yield (
                "evaluate.prompt_tokens",
                f"{self.evaluate.prompt_tokens} tokens leave no room in rows of {self.load.sequence_length}; "
                "lower it or raise `load.sequence_length`",
            )

    def _unknown_sources(self) -> Iterator[tuple[str, str]]:
        known = [source.name for source in self.prepare.sources]
        mixtures = {"train": self.train.mixture}
        mixtures |= {f"train.phases.{index}": phase.mixture for index, phase in enumerate(self.train.phases)}
        for table, mixture in mixtures.items():
            for index, share in enumerate(mixture):
                if share.source not in known:
                    yield f"{table}.mixture.{index}.source", f'no source "{share.source}"; there are {", ".join(known)}'
                if share.source in [other.source for other in mixture[:index]]:
                    yield f"{table}.mixture.{index}.source", f'"{share.source}" stands here twice; give it one weight'
