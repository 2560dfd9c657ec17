"""Settings of evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ropewalk.base.errors import ConfigError
from ropewalk.config.registry import Kind, Registry
from ropewalk.config.schema import Range

TASK_FILE = Kind(target="ropewalk.evaluate.harness.yaml_task:YamlTask", doc="A task written as YAML.")
"""The kind of every name that is not in the table; `NamedTasks` (evaluate/harness/named_tasks.py) opens it."""


IN_PYTHON = {"suite:code": "humaneval"}
"""Suites that are tasks of the table."""


class TaskTable(Registry[Kind]):
    """Tasks written in Python by name. Any other name may be that of a task file, which is looked up later."""

    def find(self, name: str, folders: Sequence[Path] | None = None) -> Kind:
        name = IN_PYTHON.get(name, name)
        try:
            return TASK_FILE if name.startswith("suite:") else super().find(name, folders)
        except ConfigError:
            if ":" in name:
                raise
            return TASK_FILE


TASKS = TaskTable(
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
    },
)
"""Metrics of the items of a task: each target is an `ItemMetric` (evaluate/metrics/item_metric.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """Checkpoint -> metrics of the tasks: held-out loss, accuracy, compression beside zlib and xz, samples."""

    tasks: Annotated[tuple[str, ...], TASKS] = ("held-out", "completions")
    """Tasks to run: names of this table, your own as `module:attr`, tasks written as YAML by name, pattern, tag, group
    or file, and ready-made suites such as `suite:reasoning` or `suite:all` (`ropewalk evaluate tasks` lists them). The
    first metric of the first task is the headline."""
    task_folders: tuple[str, ...] = ()
    """Folders of tasks written as YAML for lm-evaluation-harness; their names come before those of the suites."""
    datasets: str = ""
    """A `datasets.toml` that says where data sets lie on this machine. One beside the tasks or in the working folder is
    read too. Nothing is ever fetched."""
    trusted_folders: tuple[str, ...] = ()
    """Folders whose Python the tasks in them may run (`!function`), with all your rights. Empty: none."""
    fewshot: Annotated[int, Range(least=-1, most=1000)] = -1
    """Few-shot examples of every task written as YAML, except of tasks that fix 0; -1 keeps each task's own number."""
    chat_template: Literal["none", "single-turn", "multi-turn"] = "none"
    """Put prompts of tasks written as YAML into the model's own chat template: few-shot examples and question as one
    turn, or each as turns of their own."""
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
