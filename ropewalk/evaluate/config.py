"""Settings of evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ropewalk.config.registry import Kind, Registry
from ropewalk.config.schema import Range

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
        "bleu": Kind(
            target="ropewalk.evaluate.metrics.translation:Bleu",
            doc="BLEU through sacrebleu, 0 to 100; the tokenizer follows the language of the references.",
        ),
        "chrf": Kind(
            target="ropewalk.evaluate.metrics.translation:ChrF",
            doc="F-score of character n-grams through sacrebleu, 0 to 100.",
        ),
        "chrf++": Kind(
            target="ropewalk.evaluate.metrics.translation:ChrFPlusPlus",
            doc="chrF with word unigrams and bigrams.",
        ),
        "ter": Kind(
            target="ropewalk.evaluate.metrics.translation:Ter",
            doc="Translation edit rate through sacrebleu, in percent of the reference length.",
        ),
        "rouge1": Kind(
            target="ropewalk.evaluate.metrics.rouge:Rouge1",
            doc="F1 of unigrams through rouge-score; Chinese characters are words.",
        ),
        "rouge2": Kind(
            target="ropewalk.evaluate.metrics.rouge:Rouge2",
            doc="F1 of bigrams.",
        ),
        "rouge3": Kind(
            target="ropewalk.evaluate.metrics.rouge:Rouge3",
            doc="F1 of trigrams.",
        ),
        "rougeL": Kind(
            target="ropewalk.evaluate.metrics.rouge:RougeL",
            doc="F1 of the longest common subsequence.",
        ),
        "rougeLsum": Kind(
            target="ropewalk.evaluate.metrics.rouge:RougeLsum",
            doc="F1 of longest common subsequences of sentences, one per line.",
        ),
        "meteor": Kind(
            target="ropewalk.evaluate.metrics.meteor:Meteor",
            doc="METEOR as NLTK computes it, with synonyms where a WordNet database is found.",
        ),
        "meteor_1.5": Kind(
            target="ropewalk.evaluate.metrics.meteor:Meteor15",
            doc="METEOR 1.5 without paraphrases: a corpus score with tuned parameters.",
        ),
        "meteor_1.5_jar": Kind(
            target="ropewalk.evaluate.metrics.meteor_program:MeteorProgram",
            doc="METEOR 1.5 with the files of the Java program, paraphrases included.",
        ),
        "pyramid": Kind(
            target="ropewalk.evaluate.metrics.pyramid:AutomaticPyramid",
            doc="Automatic PYRAMID score against the .pyr file that a question's document names.",
        ),
        "token_f1": Kind(
            target="ropewalk.evaluate.metrics.token_f1:TokenF1",
            doc="F1 over tokens as in SQuAD; Chinese characters are tokens.",
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
