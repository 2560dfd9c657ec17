"""A task written as YAML, in the dialect of lm-evaluation-harness."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import xxhash

from ropewalk.base.errors import DataError
from ropewalk.base.metric import Metric

from ..held_out import HeldOut
from ..metrics.calibration import Calibration, Reliability
from ..metrics.item_metric import ItemMetric
from ..metrics.resampling import measured
from ..question_task import Item, Question, QuestionTask
from ..task import Sampling
from .datasets import BUILDERS, DataEntry, DataSets, Missing, files_named_by
from .doc_fields import DocFields
from .fewshot import FewShotSampler
from .filters import FilterPipeline, pipelines
from .functions import ProcessedRows
from .metric_entries import metrics_of
from .prompts import ChatTemplate, Prompt, PromptWriter
from .table_files import Row, read_rows
from .task_file import FunctionName, TaskFile, check_task
from .template import render

OURS = "items of our own: a smoke test, not a benchmark"
MAX_NEW_TOKENS = 256
"""Of tasks that do not say, as in lm-eval."""
DIAGRAM_FROM, DIAGRAM_BINS = 100, 10
"""Questions from which a task with choices gets a reliability diagram without asking for one, and its bins."""


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """What a recipe says about all tasks written as YAML."""

    data: DataSets
    trusted: tuple[Path, ...] = ()
    shots: int = -1
    """Few-shot examples; -1 keeps each task's own number."""
    chat: ChatTemplate | None = None


class YamlTask(QuestionTask):
    """Questions, prompts, filters and metrics as a task file says."""

    def __init__(self, file: TaskFile, held_out: HeldOut | None, settings: TaskSettings) -> None:
        """Without `held_out` the task can be checked, not run."""
        if held_out is not None:
            super().__init__(held_out)
        self.warnings = check_task(file)
        """What is odd about the file."""
        self.file, self._settings = file, settings
        self.name = str(file.get("task", file.path.stem))
        self.ask = file.get("output_type", "generate_until")
        self.repeats = file.get("repeats", 1)
        self.metadata: Mapping[str, Any] = file.get("metadata", {})
        self.ability = str(self.metadata.get("ability", ""))
        self.level = str(self.metadata.get("level", ""))
        self.groups: list[TaskFile] = []
        """Files of groups through which it was chosen."""
        self.sampling = _sampling(file)
        self.shots = _shots(file, settings.shots)
        self._fields = DocFields(file, trusted=settings.trusted)
        self.pipelines: list[FilterPipeline] = pipelines(file, self._fields)
        self._digests: dict[str, str] = {}
        self._tables: dict[str, list[Row]] = {}

    @functools.cached_property
    def item_metrics(self) -> Sequence[ItemMetric]:
        return metrics_of(self.file, self._fields, delimiter=self._writer_of(None).choice_delimiter)

    def check_data(self) -> None:
        """DataError, with the remedy, unless the data are on this machine; reads none of them."""
        if self._split not in self._entry(self._split).splits:
            self._split_rows(self._split)

    def check_metrics(self) -> None:
        """UserError where a metric is unknown or does not take its settings."""
        _ = self.item_metrics

    def digest(self) -> str:
        """A hash of the task's files, of its data, and of the functions beside it where the file names any."""
        files = [*self.file.files]
        if any(isinstance(value, FunctionName) for value in _leaves(self.file.values)):
            files += sorted({path for file in self.file.files for path in file.parent.glob("*.py")})
        named = {"test_split", "validation_split", "training_split", "fewshot_split"}
        for split in sorted({str(self.file.get(key)) for key in named if self.file.get(key) is not None}):
            files += self._entry(split).splits.get(split, ())
        total = xxhash.xxh3_64(orjson.dumps(self.file.values, default=str))
        for file in files:
            total.update(file.read_bytes())
        return total.hexdigest()

    def load_questions(self) -> list[Question]:
        documents = self._documents(self._split)
        if not documents:
            raise DataError(f"{self.file.where('dataset_path')}: task `{self.name}`: split `{self._split}` is empty")
        self._fields.features = list(documents[0])
        writer = self._writer_of(self._sampler() if self.shots else None)
        if self.file.get("doc_to_choice") is not None and self.ask != "loglikelihood_rolling":
            first = self._fields.text(documents[0])
            writer.several_contexts = isinstance(first, int) and not isinstance(first, bool)
        return [self._question(document, writer) for document in documents]

    def item(self, question: Question, answers: Sequence[Any]) -> Item:
        return self._filtered(super().item(question, answers), self.pipelines[0])

    def metrics(self, answers: Sequence[Any]) -> list[Metric]:
        found = super().metrics(answers)
        for pipeline in self.pipelines[1:]:
            whole = zip(self.questions, self._by_question(answers), strict=True)
            items = [self._filtered(super(YamlTask, self).item(q, part), pipeline) for q, part in whole]
            found += self._described(super().measure(items), pipeline)
        if self.ask == "multiple_choice" and len(self.questions) >= DIAGRAM_FROM and not self._drawn:
            diagram = Reliability(bins=DIAGRAM_BINS, delimiter=self._writer_of(None).choice_delimiter)
            found += self._described(measured(diagram, self.items(answers)), self.pipelines[0])
        if found:
            found[0] = dataclasses.replace(found[0], note=self._note, references=self._references)
        return found

    def measure(self, items: Sequence[Item]) -> list[Metric]:
        return self._described(super().measure(items), self.pipelines[0])

    @property
    def _drawn(self) -> bool:
        """Whether the task itself asks for the reliability diagram."""
        return any(metric.name in (Reliability.name, Calibration.name) for metric in self.item_metrics)

    @property
    def chance(self) -> float | None:
        """The share of right choices of a guess; None where there is nothing to choose from."""
        if self.ask != "multiple_choice":
            return None
        return sum(max(1, len(each.gold)) / len(each.choices) for each in self.questions) / len(self.questions)

    def _by_question(self, answers: Sequence[Any]) -> list[list[Any]]:
        rest = iter(answers)
        return [[next(rest) for _ in self.requests_of(question)] for question in self.questions]

    def _filtered(self, item: Item, pipeline: FilterPipeline) -> Item:
        if not item.predictions:
            return item
        return dataclasses.replace(item, predictions=pipeline.apply(item.predictions, item.question.document))

    def _described(self, metrics: list[Metric], pipeline: FilterPipeline) -> list[Metric]:
        """The metrics with the pipeline in their names where there are several, and what they were measured on."""
        parts = [f"task:{self.name}", f"version:{self.metadata.get('version', 0)}", f"shots:{self.shots}"]
        parts += [f"split:{self._split}"] if self._split != self.file.get("test_split", self._split) else []
        parts += [f"chat:{self._settings.chat.style}"] if self._settings.chat else []
        parts += [f"filter:{pipeline.name}"] if pipeline.name != "none" else []
        parts += [f"data:{digest}" for _, digest in sorted(self._digests.items())]
        ending = f",{pipeline.name}" if len(self.pipelines) > 1 else ""
        return [
            dataclasses.replace(
                metric, name=metric.name + ending, signature="|".join(filter(None, [metric.signature, *parts]))
            )
            for metric in metrics
        ]

    @property
    def _note(self) -> str:
        return f"{len(self.questions)} {OURS}" if self.metadata.get("ours") else ""

    @property
    def _references(self) -> dict[str, float]:
        first = self.item_metrics[0].name
        chance = self.chance if first.startswith("acc") else None
        return {} if chance is None else {"chance": chance}

    # Documents and few-shot examples

    @property
    def _split(self) -> str:
        """The split that is evaluated: of test and validation the first that the task names and that is here."""
        named = [str(split) for key in ("test_split", "validation_split") if (split := self.file.get(key)) is not None]
        return next((split for split in named if split in self._entry(split).splits), named[0])

    def _documents(self, split: str, processed: Any = None) -> list[Row]:
        rows = self._split_rows(split)
        processed = processed or self.file.get("process_docs")
        if processed is None:
            return rows
        made = self._fields.function(processed, "process_docs")(ProcessedRows(map(dict, rows)))
        return [dict(row) for row in made]

    def _split_rows(self, split: str) -> list[Row]:
        if split in self._tables:
            return self._tables[split]
        entry = self._entry(split)
        if split not in entry.splits:
            there = ", ".join(entry.splits)
            raise DataError(f"{entry.place}: task `{self.name}` reads split `{split}`, and there are {there}")
        rows, self._digests[split] = read_rows(entry.splits[split])
        rows = [row for row in rows if all(str(row.get(key)) == str(value) for key, value in entry.where.items())]
        for name, said in entry.columns.items():
            for row in rows:
                row[name] = row[said] if said in row else render(said, row, where=entry.place)
        self._tables[split] = rows
        return rows

    def _entry(self, split: str) -> DataEntry:
        name, config = str(self.file.get("dataset_path")), str(self.file.get("dataset_name", ""))
        settings = self.file.get("dataset_kwargs", {})
        beside = self.file.places.get("dataset_kwargs", (self.file.path.absolute(), 0))[0].parent
        if name in BUILDERS and settings.get("data_files"):
            return files_named_by(settings["data_files"], beside=beside, where=self.file.where("dataset_kwargs"))
        found = self._settings.data.find(name, config)
        if found is None:
            missing = Missing(name, config, split)
            raise DataError(f"{self.file.where('dataset_path')}: task `{self.name}`: {missing}")
        return found

    def _sampler(self) -> FewShotSampler:
        config: dict[str, Any] = self.file.get("fewshot_config", {})
        return FewShotSampler(
            self._pool(config),
            first=config.get("sampler") == "first_n",
            where=f"{self.file.where('num_fewshot')}: task `{self.name}`",
        )

    def _pool(self, config: Mapping[str, Any]) -> list[Row]:
        """Few-shot examples to draw from: as the file says, else of training, else validation, else test."""
        if split := config.get("split", self.file.get("fewshot_split")):
            return self._documents(str(split), config.get("process_docs"))
        samples = config.get("samples")
        if isinstance(samples, list):
            return samples
        if samples is not None:
            return [dict(row) for row in self._fields.function(samples, "fewshot_config")()]
        splits = (self.file.get(f"{name}_split") for name in ("training", "validation", "test"))
        return self._documents(next(split for split in splits if split is not None))

    # Questions

    def _writer_of(self, sampler: FewShotSampler | None) -> PromptWriter:
        return PromptWriter(self.file, self._fields, shots=self.shots, sampler=sampler, chat=self._settings.chat)

    def _question(self, document: Row, writer: PromptWriter) -> Question:
        by = self.metadata.get("group_by")
        shared: dict[str, Any] = {
            "document": document,
            "group": str(document.get(by, "")) if by else "",
            "query": self._fields.query(document),
        }
        if self.ask == "loglikelihood_rolling":
            return Question(prompt=str(self._fields.target(document)), **shared)
        prompts = writer.write(document)
        shared |= {"preamble": prompts[0].preamble, "prompt": prompts[0].question, "closing": prompts[0].closing}
        if self.ask == "multiple_choice":
            return self._choosing(document, writer, prompts, shared)
        target = self._fields.target(document)
        if self.ask == "loglikelihood":
            return Question(choices=(str(target),), references=(str(target),), gold=(0,), **shared)
        if self.file.get("doc_to_choice") is not None and isinstance(target, int):
            target = self._fields.choices(document)[target]
        references = target if isinstance(target, list | tuple) else [target]
        return Question(references=tuple(map(str, references)), **shared)

    def _choosing(
        self, document: Row, writer: PromptWriter, prompts: Sequence[Prompt], shared: Mapping[str, Any]
    ) -> Question:
        choices, delimiter = self._fields.choices(document), writer.choice_delimiter
        target = self._fields.target(document)
        if writer.several_contexts:
            gold, shown = self._fields.text(document), choices
            choices = [f"{delimiter}{target}"] * len(shown)
            contexts = tuple(prompt.text for prompt in prompts)
        else:
            gold, shown, contexts = target, choices, ()
            choices = [f"{delimiter}{choice}" for choice in shown]
        right = self._gold(gold, shown, document)
        return Question(
            choices=tuple(choices),
            contexts=contexts,
            gold=right,
            references=tuple(shown[index] for index in right),
            **shared,
        )

    def _gold(self, gold: Any, choices: Sequence[str], document: Row) -> tuple[int, ...]:
        found = [self._index(each, choices) for each in (gold if isinstance(gold, list | tuple) else [gold])]
        right = tuple(index for index in found if index is not None)
        if not right:
            raise self.file.wrong(
                "doc_to_target",
                f"gives {gold!r}, which is none of the {len(choices)} choices of this document: {str(document)[:200]}",
                "a split without labels cannot be scored",
            )
        return right

    def _index(self, gold: Any, choices: Sequence[str]) -> int | None:
        if isinstance(gold, str):
            return choices.index(gold) if gold in choices else None
        return int(gold) if isinstance(gold, int) and 0 <= gold < len(choices) else None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list):
        yield value
        return
    for each in value:
        yield from _leaves(each)


def _shots(file: TaskFile, wanted: int) -> int:
    """Few-shot examples of a task: a task that says 0 keeps it, as in lm-eval."""
    own = file.get("num_fewshot")
    return int(own or 0) if wanted < 0 or own == 0 else wanted


def _sampling(file: TaskFile) -> Sampling:
    """`generation_kwargs`; completions are greedy unless they say otherwise."""
    given: dict[str, Any] = file.get("generation_kwargs", {})
    until = given.get("until", file.get("fewshot_delimiter", "\n\n"))
    stop = tuple(str(text) for text in (until if isinstance(until, list) else [until]) if text)
    lengths = (given.get(key) for key in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"))
    try:
        temperature = float(given.get("temperature", 1.0 if given.get("do_sample") else 0.0))
        return Sampling(
            max_new_tokens=int(next((n for n in lengths if n is not None), MAX_NEW_TOKENS)),
            temperature=0.0 if given.get("do_sample") is False else temperature,
            top_k=int(given.get("top_k", 0)),
            top_p=float(given.get("top_p", 1.0)),
            min_p=float(given.get("min_p", 0.0)),
            repetition_penalty=float(given.get("repetition_penalty", 1.0)),
            stop=stop,
        )
    except (TypeError, ValueError) as error:
        raise file.wrong("generation_kwargs", f"has a value that is no number: {error}") from None
