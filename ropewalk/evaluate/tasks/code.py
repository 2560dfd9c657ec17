"""The tasks `humaneval` and `mbpp`: the model completes programs, which run in a sandbox against their tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError
from ropewalk.base.metric import Metric
from ropewalk.base.progress import counted
from ropewalk.config.cache import cache_folder
from ropewalk.config.ranks import ranks

from ..code_problems import CodeProblem, code_problems, read_code_problems
from ..harness.datasets import Missing, data_sets
from ..harness.table_files import read_rows
from ..held_out import HeldOut
from ..metrics.item_metric import ItemMetric
from ..metrics.pass_at_k import PassAtK, VerdictShare
from ..question_task import Item, Question, QuestionTask
from ..sandbox.judging import Judge
from ..sandbox.program import Verdict
from ..task import Request, Sampling

KS = (1, 5, 10, 50, 100)
"""pass@k is given for those of these that `evaluate.code_samples` allows."""


class CodeTask(QuestionTask):
    """Problems of `evaluate.code_problems`. Programs run on rank 0, once: verdicts are remembered by content."""

    ask = "generate_until"
    ability = "code"
    data_set: str
    """Its name on the hub, for `datasets.toml`."""
    max_new_tokens = 512
    """Long enough for every canonical solution of HumanEval in common tokenizers."""

    def __init__(self, held_out: HeldOut) -> None:
        super().__init__(held_out)
        settings = held_out.settings
        self.repeats = settings.code_samples
        # One completion: the most likely one. Several must differ; the paper's choice for large k.
        spread = {"temperature": 0.8, "top_p": 0.95} if self.repeats > 1 else {}
        self._problems = {problem.task_id: problem for problem in self._read(settings.code_problems)}
        stop = next(iter(self._problems.values())).stop
        self.sampling = Sampling(self.max_new_tokens, stop=stop, **spread)  # type: ignore[arg-type]
        self._judge = Judge(sandbox=settings.sandbox, memory=cache_folder() / "verdicts.jsonl")
        self._verdicts: dict[tuple[str, str], Verdict] = {}

    def _read(self, path: str) -> list[CodeProblem]:
        """The problems of the file, else of the data set as `datasets.toml` locates it."""
        if path:
            return read_code_problems(Path(path))
        settings = self.held_out.settings
        entry = data_sets(settings.datasets, settings.task_folders, Path.cwd() / self.name).find(self.data_set)
        if entry is None or "test" not in entry.splits:
            missing = Missing(self.data_set, "", "test")
            raise DataError(f'task `{self.name}`: set `evaluate.code_problems = "FILE.jsonl.gz"`; or {missing}')
        rows, _ = read_rows(entry.splits["test"])
        return code_problems(((row, f"{entry.place}: row {number}") for number, row in enumerate(rows, 1)), entry.place)

    def requests(self) -> list[Request]:
        if not ranks().rank:
            self._judge.check()  # before hours of generation, not after them
        return super().requests()

    def load_questions(self) -> list[Question]:
        return [
            Question(prompt=each.prompt, document={**each.row, "task_id": each.task_id}, references=(each.solution,))
            for each in self._problems.values()
        ]

    @property
    def item_metrics(self) -> Sequence[ItemMetric]:
        found = [PassAtK(k) for k in KS if k <= self.repeats]
        return [*found, VerdictShare("timeout", "timeouts"), VerdictShare("fault", "sandbox_failures")]

    def items(self, answers: Sequence[Any]) -> list[Item]:
        rest = iter(answers)
        items = [
            super(CodeTask, self).item(each, [next(rest) for _ in self.requests_of(each)]) for each in self.questions
        ]
        self._run([pair for item in items for pair in _completions(item)])
        return [self._judged(item) for item in items]

    def item(self, question: Question, answers: Sequence[Any]) -> Item:
        item = super().item(question, answers)
        self._run(_completions(item))
        return self._judged(item)

    def metrics(self, answers: Sequence[Any]) -> list[Metric]:
        if ranks().rank:
            return []
        found = super().metrics(answers)
        faults = [verdict.detail for verdict in self._verdicts.values() if verdict.kind == "fault"]
        if faults:
            told = f"{self.name}: {counted(len(faults), 'program')} could not be judged and are not scored: {faults[0]}"
            self.held_out.progress.say(told)
        return found

    def records(self, answers: Sequence[Any]) -> Sequence[Any]:
        return [] if ranks().rank else super().records(answers)

    def _run(self, completions: Sequence[tuple[str, str]]) -> None:
        """Makes sure that there is a verdict on each completion, given with its task_id."""
        missing = [pair for pair in dict.fromkeys(completions) if pair not in self._verdicts]
        if missing:
            programs = [self._problem(task).program(self._problem(task).cut(text)) for task, text in missing]
            self._verdicts.update(zip(missing, self._judge.verdicts(programs, self.held_out.progress), strict=True))

    def _problem(self, task_id: str) -> CodeProblem:
        return self._problems[task_id]

    def _judged(self, item: Item) -> Item:
        verdicts = tuple(self._verdicts[pair].kind for pair in _completions(item))
        return dataclasses.replace(item, verdicts=verdicts)


class HumanEval(CodeTask):
    """Functions to complete after their signature and docstring."""

    name = "humaneval"
    data_set = "openai/openai_humaneval"


class Mbpp(CodeTask):
    """Short programs to write from a sentence and its tests."""

    name = "mbpp"
    data_set = "google-research-datasets/mbpp"


def _completions(item: Item) -> list[tuple[str, str]]:
    return [(str(item.question.document["task_id"]), text) for text in item.predictions]
