"""Settings of evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ropewalk.config.registry import Kind, Registry
from ropewalk.config.schema import Range

from .perturb.config import PERTURBATIONS

TASKS = Registry(
    "task",
    {
        "held-out": Kind(
            target="ropewalk.evaluate.tasks.likelihood:HeldOutText",
            doc="Bits per byte beside zlib and xz, loss, perplexity and token accuracy of held-out documents.",
        ),
        "completions": Kind(
            target="ropewalk.evaluate.tasks.completions:Completions",
            doc="Completions of held-out documents; how many of those in domain `code` parse as Python.",
        ),
        "crows-pairs": Kind(
            target="ropewalk.evaluate.tasks.crows_pairs:CrowsPairs",
            doc="CrowS-Pairs: how often the stereotyping sentence is the more likely one, by kind of bias.",
        ),
        "winobias": Kind(
            target="ropewalk.evaluate.tasks.winobias:WinoBias",
            doc="WinoBias: accuracy on pronouns with a stereotype of gender less that against it.",
        ),
    },
)
"""Evaluation tasks: each target makes a `Task` (evaluate/task.py) from the held-out text of the run."""

METRICS = Registry(
    "metric",
    {
        "exact_match": Kind(
            target="ropewalk.evaluate.metrics.exact:ExactMatch",
            doc="Share of completions that equal a reference.",
        ),
        "gender_representation": Kind(
            target="ropewalk.evaluate.metrics.bias:GenderRepresentation",
            doc="How unequally completions mention women and men.",
        ),
        "race_representation": Kind(
            target="ropewalk.evaluate.metrics.bias:RaceRepresentation",
            doc="How unequally completions mention surnames of three groups.",
        ),
        "race_representation_zh": Kind(
            target="ropewalk.evaluate.metrics.bias:ChineseRaceRepresentation",
            doc="How unequally Chinese completions mention origins.",
        ),
        "gender_professions": Kind(
            target="ropewalk.evaluate.metrics.bias:GenderProfessions",
            doc="How unequally professions stand beside women and men.",
        ),
        "gender_adjectives": Kind(
            target="ropewalk.evaluate.metrics.bias:GenderAdjectives",
            doc="How unequally traits stand beside women and men.",
        ),
        "race_professions": Kind(
            target="ropewalk.evaluate.metrics.bias:RaceProfessions",
            doc="How unequally professions stand beside surnames of three groups.",
        ),
        "race_adjectives": Kind(
            target="ropewalk.evaluate.metrics.bias:RaceAdjectives",
            doc="How unequally traits stand beside surnames of three groups.",
        ),
    },
)
"""Metrics of the items of a task: each target is an `ItemMetric` (evaluate/metrics/item_metric.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """Checkpoint -> metrics of the tasks: held-out loss, accuracy, compression beside zlib and xz, samples."""

    tasks: Annotated[tuple[str, ...], TASKS] = ("held-out", "completions")
    """Tasks to run, by name; your own as `module:attr`. The first metric of the first task is the headline."""
    max_bytes: Annotated[int, Range(least=1000)] = 400_000
    """Maximum UTF-8 bytes of held-out text to score: whole documents in a seeded order."""
    samples: Annotated[int, Range(least=0, most=1_000_000)] = 24
    """Completions of the beginnings of held-out documents; those in domain `code` are parsed as Python."""
    prompt_tokens: Annotated[int, Range(least=1)] = 48
    """Tokens of the document in the prompt of a completion, at most half of the document."""
    max_new_tokens: Annotated[int, Range(least=1, most=1 << 20)] = 96
    """Maximum tokens per completion; the end of text ends it earlier."""
    temperature: Annotated[float, Range(least=0)] = 0.7
    """Sampling temperature; 0 takes the most likely token."""
    top_k: Annotated[int, Range(least=0)] = 50
    """Draw from the k most likely tokens; 0 draws from all."""
    perturbations: Annotated[tuple[str, ...], PERTURBATIONS] = ()
    """Ask each task made of questions again under these changes of its prompts, beside the task itself: `all`, `en`,
    `zh`, or names; your own as `module:attr`."""
    perturbation_strength: Annotated[float, Range(above=0, most=10)] = 1.0
    """Multiplies the share of letters or words that a perturbation changes."""
    bias_folder: str = ""
    """Folder with `crows_pairs_anonymized.csv` of CrowS-Pairs or the files of WinoBias, for these tasks."""
