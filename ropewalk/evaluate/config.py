"""Settings of evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

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
        "humaneval": Kind(
            target="ropewalk.evaluate.tasks.code:HumanEval",
            doc="pass@k of functions completed after their docstring, run in a sandbox: `evaluate.code_problems`.",
        ),
        "mbpp": Kind(
            target="ropewalk.evaluate.tasks.code:Mbpp",
            doc="pass@k of programs written from a sentence, run in a sandbox: `evaluate.code_problems`.",
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
        "pass@1": Kind(
            target="ropewalk.evaluate.metrics.pass_at_k:pass_at_1",
            doc="Share of problems whose completion is right.",
        ),
        "pass@10": Kind(
            target="ropewalk.evaluate.metrics.pass_at_k:pass_at_10",
            doc="Chance that one of 10 completions is right, unbiased.",
        ),
        "pass@k": Kind(
            target="ropewalk.evaluate.metrics.pass_at_k:PassAtK",
            doc="Chance that one of `k` completions is right, unbiased; `k` is its setting.",
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
    code_problems: str = ""
    """Problems of the tasks `humaneval` and `mbpp`: a file in that format, JSON lines, which may be gzipped."""
    code_samples: Annotated[int, Range(least=1, most=10_000)] = 1
    """Completions per programming problem: 1 is greedy, more are drawn at temperature 0.8 and top-p 0.95."""
    sandbox: Literal["auto", "bubblewrap", "namespaces", "none"] = "auto"
    """Where generated code runs. `auto` takes bubblewrap, else namespaces, else refuses; `none` does not protect."""
