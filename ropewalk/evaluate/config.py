"""Settings of evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from ropewalk.base.errors import ConfigError
from ropewalk.config.registry import Kind, Registry
from ropewalk.config.schema import CONTINUES, Range

from .judges.judge_table import JUDGES
from .perturb.config import PERTURBATIONS

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
        "knowledge-creation": Kind(
            target="ropewalk.evaluate.tasks.knowledge_creation:KnowledgeCreation",
            doc="KoLA's creating task with ten stories of our own (English, Chinese), scored by self-contrast.",
        ),
        "humaneval": Kind(
            target="ropewalk.evaluate.tasks.code:HumanEval",
            doc="pass@k of functions completed after their docstring, run in a sandbox: `evaluate.code_problems`.",
        ),
        "mbpp": Kind(
            target="ropewalk.evaluate.tasks.code:Mbpp",
            doc="pass@k of programs written from a sentence, run in a sandbox: `evaluate.code_problems`.",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class During:
    """Evaluation of the model in training: the same tasks on fewer items, again and again."""

    every_steps: Annotated[int, Range(least=0), CONTINUES] = 0
    """Steps between evaluations, with one more at the end of each phase; 0: none."""
    tasks: Annotated[tuple[str, ...], TASKS, CONTINUES] = ("held-out",)
    """Tasks to run, by name, as in `evaluate.tasks`."""
    limit: Annotated[int, Range(least=1), CONTINUES] = 100
    """Ask the first so many questions of each task: the same ones every time, so that the curve can be compared."""
    max_bytes: Annotated[int, Range(least=1000), CONTINUES] = 50_000
    """Maximum UTF-8 bytes of held-out text to score."""
    budget_s: Annotated[float, Range(above=0), CONTINUES] = 60.0
    """Seconds per evaluation. When they are spent, the tasks that are not complete are left out this time; put the
    important ones first."""


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
    during: During = field(default_factory=During)
    """Evaluation during training."""
    limit: Annotated[int, Range(least=0)] = 0
    """Ask the first so many questions of each task; 0 asks all."""
    contamination: bool = True
    """Search the training corpus for the questions of each task; the score on those that do not stand in it is told
    beside the score on all."""
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
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Draw from the fewest tokens whose probabilities sum to at least this."""
    min_p: Annotated[float, Range(least=0, most=1)] = 0.0
    """Leave out tokens whose probability is below this share of the largest one."""
    repetition_penalty: Annotated[float, Range(above=0)] = 1.0
    """Divide positive logits of tokens in prompt and completion by this, and multiply negative ones."""
    code_problems: str = ""
    """Problems of the tasks `humaneval` and `mbpp`: a file in that format, JSON lines, which may be gzipped. Empty: as
    `datasets.toml` locates openai/openai_humaneval and google-research-datasets/mbpp."""
    code_samples: Annotated[int, Range(least=1, most=10_000)] = 1
    """Completions per programming problem: 1 is greedy, more are drawn at temperature 0.8 and top-p 0.95."""
    sandbox: Literal["auto", "bubblewrap", "namespaces", "none"] = "auto"
    """Where generated code runs. `auto` takes bubblewrap, else namespaces, else refuses; `none` does not protect."""
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
