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
from ropewalk.plan.config import Layout, Parallel
from ropewalk.prepare.config import Prepare
from ropewalk.train.config import Phase, Train
from ropewalk.train.phase_spec import length_problems

MOST_NAME_BYTES = 200
"""Of a run: file systems take 255, and we add to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A complete run: raw files in, evaluated model and report out."""

    name: str
    """Name of the run; its files lie in `runs/NAME`."""
    seed: Annotated[int, Range(least=0)] = 0
    """Seed of every random choice: held-out documents, initial weights, order of the data, samples. `train.seed`
    changes those of training alone."""
    prepare: Prepare = field(default_factory=Prepare)
    """Raw files -> token shards."""
    load: Load = field(default_factory=Load)
    """Token shards -> batches."""
    model: Model = field(default_factory=Model)
    """The model."""
    plan: Layout = field(default_factory=Layout)
    """How a step is laid out on the devices."""
    parallel: Parallel = field(default_factory=Parallel)
    """How several processes share a run."""
    train: Train = field(default_factory=Train)
    """Batches -> weights."""
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    """When state is saved."""
    evaluate: Evaluate = field(default_factory=Evaluate)
    """What is measured at the end."""

    def check(self) -> Iterator[tuple[str, str]]:
        if not self.name or not self.name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            yield "name", f'"{self.name}" cannot name a folder; use letters, digits, -, _ and .'
        elif len(self.name.encode()) > MOST_NAME_BYTES:
            yield (
                "name",
                f"{len(self.name.encode())} bytes are too many to name a folder; use at most {MOST_NAME_BYTES}",
            )
        rows = self.plan.microbatch_size
        for batch_size in {self.train.batch_size, *(phase.batch_size or rows for phase in self.train.phases)}:
            if rows and batch_size and batch_size % rows:
                yield (
                    "plan.microbatch_size",
                    f"{rows} does not divide `train.batch_size` ({batch_size}); choose a divisor",
                )
        yield from self._data_problems()
        yield from self._too_long_rows()
        yield from self._importance_problems()
        for key, what in length_problems(self.train, sequence_length=self.load.sequence_length):
            yield f"train.{key}", what
        yield from self._unknown_sources()
        if self.evaluate.prompt_tokens >= self.load.sequence_length:
            yield (
                "evaluate.prompt_tokens",
                f"{self.evaluate.prompt_tokens} tokens leave no room in sequences of {self.load.sequence_length}; "
                "lower it or raise `load.sequence_length`",
            )

    def _importance_problems(self) -> Iterator[tuple[str, str]]:
        """Settings that contradict `load.importance`, which decides which sequences are drawn and how often."""
        if self.load.importance is None:
            return
        alike = "`load.importance` draws all sequences with equal probability at first, then by their loss"
        tables: dict[str, Train | Phase] = {"train": self.train}
        tables |= {f"train.phases.{index}": phase for index, phase in enumerate(self.train.phases)}
        for table, phase in tables.items():
            if phase.mixture:
                yield f"{table}.mixture", f"{alike}; remove the mixture"
            for ramp in ("batch_ramp", "length_ramp"):
                if getattr(phase, ramp):
                    yield (
                        f"{table}.{ramp}",
                        "`load.importance` needs batches of one shape per phase; remove the ramp",
                    )
        weighted = [f"prepare.sources.{i}.weight" for i, source in enumerate(self.prepare.sources) if source.weight]
        weighted += [f"load.corpus.{i}.weight" for i, corpus in enumerate(self.load.corpus) if corpus.weight]
        for key in weighted:
            yield key, f"{alike}; remove the weights of sources"
        if self.load.shuffle == "blocks":
            yield "load.shuffle", '`load.importance` draws from the whole corpus; set `shuffle = "all"`'
        if self.load.cache and self.load.cache.staging:
            yield (
                "load.cache.staging",
                "`load.importance` reads in its own order; remove one of the two",
            )

    def _too_long_rows(self) -> Iterator[tuple[str, str]]:
        most = self.model.positions
        rows: dict[str, int | None] = {"load.sequence_length": self.load.sequence_length}
        rows |= {
            f"train.phases.{i}.sequence_length": phase.sequence_length for i, phase in enumerate(self.train.phases)
        }
        for key, length in rows.items():
            if most and length and length > most:
                yield key, f"{length} tokens per sequence exceed the model's {most} learned positions; lower it"

    def _data_problems(self) -> Iterator[tuple[str, str]]:
        corpora = self.load.corpus
        if not corpora and not self.prepare.sources:
            yield (
                "prepare.sources",
                "there is none; add a [[prepare.sources]] table with `name` and `paths`, or name an existing corpus of "
                "tokens in [[load.corpus]]",
            )
        if corpora and self.prepare.sources:
            yield "load.corpus", "[[prepare.sources]] and an existing corpus are given; train on one of the two"
        for index, corpus in enumerate(corpora):
            if corpus.name in [other.name for other in corpora[:index]]:
                yield f"load.corpus.{index}.name", f'two corpora are named "{corpus.name}"; give each its own name'
            if not corpus.name.replace("-", "").replace("_", "").isalnum():
                yield f"load.corpus.{index}.name", f'"{corpus.name}" names files; use letters, digits, - and _'
            if corpus.format not in ("auto", "ropewalk") and not self.load.tokenizer:
                yield "load.tokenizer", f"{corpus.format} has no tokenizer of its own; name its tokenizer.json"
        weighted = [corpus.weight is not None for corpus in corpora]
        if any(weighted) and not all(weighted):
            yield "load.corpus", "some corpora have a `weight` and some have none; give all of them one, or none"

    def _unknown_sources(self) -> Iterator[tuple[str, str]]:
        known = [source.name for source in self.prepare.sources] or [corpus.name for corpus in self.load.corpus]
        # A folder that prepare made names its sources itself: they are known when it has been opened.
        own_names = any(corpus.format in ("auto", "ropewalk") for corpus in self.load.corpus)
        mixtures = {"train": self.train.mixture}
        mixtures |= {f"train.phases.{index}": phase.mixture for index, phase in enumerate(self.train.phases)}
        for table, mixture in mixtures.items():
            for index, share in enumerate(mixture):
                if share.source not in known and not own_names:
                    yield f"{table}.mixture.{index}.source", f'no source "{share.source}"; there are {", ".join(known)}'
                if share.source in [other.source for other in mixture[:index]]:
                    yield f"{table}.mixture.{index}.source", f'"{share.source}" stands here twice; give it one weight'
