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
        "open-prompts": Kind(
            target="ropewalk.evaluate.tasks.open_prompts:OpenPrompts",
            doc="Free continuations of thirty beginnings: bias of gender and origin by counts, repetition.",
        ),
        "toxicity": Kind(
            target="ropewalk.evaluate.tasks.open_prompts:Toxicity",
            doc="How toxic a small model finds the same continuations (`evaluate.toxicity_judge`).",
        ),
        "dialogue": Kind(
            target="ropewalk.evaluate.tasks.dialogues:Dialogue",
            doc="Replies in dialogues: relevance, consistency, repetition, distinct words.",
        ),
        "dialogue-selection": Kind(
            target="ropewalk.evaluate.tasks.dialogues:ResponseSelection",
            doc="The true reply among candidates: recall@k.",
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
        "mean_toxicity": Kind(
            target="ropewalk.evaluate.metrics.judged:MeanToxicity",
            doc="The mean toxicity of completions.",
        ),
        "expected_maximum_toxicity": Kind(
            target="ropewalk.evaluate.metrics.judged:ExpectedMaximumToxicity",
            doc="The toxicity of the most toxic completion per prompt.",
        ),
        "toxic_fraction": Kind(
            target="ropewalk.evaluate.metrics.judged:ToxicFraction",
            doc="Share of completions that are toxic.",
        ),
        "toxicity_probability": Kind(
            target="ropewalk.evaluate.metrics.judged:ToxicityProbability",
            doc="Share of prompts with a toxic completion.",
        ),
        "repetition": Kind(
            target="ropewalk.evaluate.metrics.dialogue:Repetition",
            doc="Share of 4-grams of a completion that it has had before.",
        ),
        "recall_at_1": Kind(
            target="ropewalk.evaluate.metrics.dialogue:RecallAt",
            doc="How often the right choice is the most likely one.",
        ),
        "mean_reciprocal_rank": Kind(
            target="ropewalk.evaluate.metrics.dialogue:ReciprocalRank",
            doc="The mean of 1 / rank of the right choice.",
        ),
        "stereotype_preference": Kind(
            target="ropewalk.evaluate.metrics.pair_bias:StereotypePreference",
            doc="How often the first of two sentences is the more likely one.",
        ),
        "likelihood_difference": Kind(
            target="ropewalk.evaluate.metrics.pair_bias:LikelihoodDifference",
            doc="How far the log-likelihoods of two sentences differ.",
        ),
    },
)
"""Metrics of the items of a task: each target is an `ItemMetric` (evaluate/metrics/item_metric.py)."""


JUDGES = Registry(
    "judge",
    {
        "profanity": Kind(
            target="ropewalk.evaluate.judges.profanity:Profanity",
            doc="A linear model of insulting words in the package alt-profanity-check; English.",
        ),
        "perspective": Kind(
            target="ropewalk.evaluate.judges.perspective:Perspective",
            doc="The Perspective API: sends completions over the network; key in PERSPECTIVE_API_KEY.",
        ),
        "lexical_relevance": Kind(
            target="ropewalk.evaluate.judges.lexical:LexicalRelevance",
            doc="Content words that a reply shares with the turn before it.",
        ),
        "lexical_consistency": Kind(
            target="ropewalk.evaluate.judges.lexical:LexicalConsistency",
            doc="Sentences that repeat an earlier one without its negation or with another number.",
        ),
    },
    methods=("scores",),
)
"""Small models that score texts: each target makes a `TextJudge` (evaluate/judges/judge.py)."""


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
    toxicity_judge: Annotated[str, JUDGES] = "profanity"
    """The judge of the task `toxicity`; your own as `module:attr`."""
    relevance_judge: Annotated[str, JUDGES] = "lexical_relevance"
    """The judge of how well a reply of the task `dialogue` fits the turn before it."""
    consistency_judge: Annotated[str, JUDGES] = "lexical_consistency"
    """The judge of how well a reply of the task `dialogue` agrees with what the same speaker said before."""
    judge_sheet: str = ""
    """CSV file of human scores (columns `text`, `score`, perhaps `context`, `judge`): the agreement of each judge with
    it stands beside its scores."""
    dialogues: str = ""
    """JSON lines of dialogues for `dialogue` and `dialogue-selection`; empty takes ten of our own."""
