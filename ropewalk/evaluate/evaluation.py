"""Runs evaluation tasks: requests -> answers (evaluate/ask_model.py) -> metrics, samples, scored documents and items.

Metrics are functions of the answers alone. Where all answers are in the file (evaluate/answers.py), a metric or a task
is added without loading the model.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.base.errors import UserError
from ropewalk.base.metric import Metric, metrics_tree

from .answers import Answers, request_key
from .ask_model import Share, ask_model
from .config import TASK_FILE, TASKS
from .contamination import Contamination, find_contamination
from .harness.ability_profile import ability_profile
from .harness.named_tasks import NamedTasks, group_metrics
from .held_out import HeldOut
from .perturb.robustness import robustness_of
from .question_task import QuestionTask, ScoredItem
from .results import DOCUMENTS, ITEMS, SAMPLES, write_results
from .task import (
    Generate,
    LogLikelihood,
    Request,
    Rolling,
    Sample,
    ScoredDocument,
    Task,
    TaskModel,
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics by task; samples, scored documents and scored items."""

    tasks: dict[str, list[Metric]]
    samples: list[Sample]
    documents: list[ScoredDocument]
    items: list[ScoredItem]
    profile: dict[str, Any] = field(default_factory=dict)
    """Standardised scores by ability."""
    contamination: dict[str, Contamination] = field(default_factory=dict)
    """What of each task stands in the training corpus."""


def evaluate(model: TaskModel, held_out: HeldOut, *, answers: Answers | None = None) -> Evaluation:
    """Runs the tasks of `evaluate.tasks` with `model` in one process. Only what `answers` lacks is asked."""
    found = evaluate_on_ranks(model, held_out, answers=answers, share=lambda value: value)
    assert found is not None
    return found


def evaluate_on_ranks(
    model: TaskModel, held_out: HeldOut, *, answers: Answers | None, share: Share, rank: int = 0
) -> Evaluation | None:
    """The same on every rank of a launch: all ask the model; rank 0, which alone has a file of answers, measures."""
    tasks = open_tasks(held_out)
    answers = Answers(None, {}) if answers is None else answers
    found = evaluate_tasks(tasks, model, held_out, answers=answers, share=share, rank=rank)
    if found is not None:
        found.profile.update(ability_profile(tasks, found.tasks))
        found.tasks.update(group_metrics(tasks, found.tasks))
        found.contamination.update(_contamination(tasks, held_out, answers))
    return found


def evaluate_tasks(
    tasks: Sequence[Task],
    model: TaskModel,
    held_out: HeldOut,
    *,
    answers: Answers | None,
    share: Share,
    rank: int = 0,
) -> Evaluation | None:
    """Runs these tasks on every rank; the results are on rank 0."""
    answers = Answers(None, {}) if answers is None else answers
    keys = ask_tasks(tasks, model, held_out, answers=answers, share=share)
    return measure_tasks(tasks, answers, keys) if rank == 0 else None


def ask_tasks(
    tasks: Sequence[Task], model: TaskModel, held_out: HeldOut, *, answers: Answers, share: Share
) -> list[list[str]]:
    """Asks the model what `answers` lacks; the keys of each task's requests. All ranks must call."""
    requests = [[(request_key(request), request) for request in _requests(task)] for task in tasks]
    asked: dict[str, tuple[str, Request]] = {}
    for task, own in zip(tasks, requests, strict=True):
        for key, request in own:
            asked.setdefault(key, (task.name, request))
    ask_model(model, held_out, asked, answers, share=share)
    return [[key for key, _ in own] for own in requests]


def measure_tasks(tasks: Sequence[Task], answers: Answers, keys: Sequence[Sequence[str]]) -> Evaluation:
    """Metrics and records of the tasks from the answers to their requests."""
    found = Evaluation({}, [], [], [])
    for task, own in zip(tasks, keys, strict=True):
        theirs = [answers[key] for key in own]
        found.tasks[task.name] = _checked(task, task.metrics(theirs))
        for record in task.records(theirs):
            _list_of(found, record).append(record)
    return found


def open_tasks(held_out: HeldOut) -> list[Task]:
    """The configured tasks, in order."""
    tasks: list[Task] = []
    named: NamedTasks | None = None
    for name in held_out.settings.tasks:
        kind = TASKS[name]
        if kind is TASK_FILE:
            named = named or NamedTasks(held_out.settings, held_out)
            tasks += named.open(name)
            continue
        target = kind.load()
        if not (isinstance(target, type) and issubclass(target, Task)):
            raise UserError(f'evaluate.tasks: "{name}" is no task; derive the class from `ropewalk.evaluate.task.Task`')
        tasks.append(target(held_out))
        if not getattr(tasks[-1], "name", ""):
            raise UserError(f'evaluate.tasks: "{name}" has no name; write `name = "..."` in `class {target.__name__}`')
    tasks = [each for task in tasks for each in robustness_of(task)]
    names = [task.name for task in tasks]
    if len({*names}) < len(names):
        raise UserError(f"evaluate.tasks: two tasks have the same name ({', '.join(names)})")
    return tasks


def write_evaluation(run: Path, evaluation: Evaluation, **facts: Any) -> None:
    """Commits `evaluation/results.json`, `evaluation/documents.jsonl`, `evaluation/items.jsonl` and `samples.jsonl` in
    the run directory; `facts` of the model, such as its step, stand in the results."""
    tasks = {name: metrics_tree(metrics) for name, metrics in evaluation.tasks.items()}
    lines = (
        (SAMPLES, evaluation.samples),
        (DOCUMENTS, evaluation.documents),
        (ITEMS, evaluation.items),
    )
    beside: dict[str, Any] = {"profile": evaluation.profile} if evaluation.profile else {}
    if evaluation.contamination:
        beside["contamination"] = {task: found.tree() for task, found in evaluation.contamination.items()}
    rows = {file: map(dataclasses.asdict, records) for file, records in lines}
    write_results(run, {**facts, "tasks": tasks, **beside}, rows)


def _contamination(tasks: Sequence[Task], held_out: HeldOut, answers: Answers) -> dict[str, Contamination]:
    """What of the tasks stands in the run's training corpus, if there is one."""
    asked = [task for task in tasks if isinstance(task, QuestionTask) and task.questions]
    if held_out.folder is None or not asked or not held_out.settings.contamination:
        return {}
    items = {task.name: task.items([answers[request_key(each)] for each in task.requests()]) for task in asked}
    measures = {task.name: task.measure for task in asked}
    try:
        return find_contamination(
            held_out.folder, {name: (items[name], measures[name]) for name in items}, progress=held_out.progress
        )
    except UserError as error:
        held_out.progress.say(f"contamination is not checked: {error}")
        return {}


def _list_of(found: Evaluation, record: Any) -> list[Any]:
    lists: dict[type, list[Any]] = {Sample: found.samples, ScoredDocument: found.documents, ScoredItem: found.items}
    return lists[type(record)]


def _requests(task: Task) -> list[Request]:
    requests = list(task.requests())
    for request in requests:
        if not (isinstance(request, Rolling | LogLikelihood | Generate) and all(map(_is_text, _texts(request)))):
            wanted = (
                "must be `Rolling(text)`, `LogLikelihood(context, continuation)` or `Generate(prompt, Sampling(...))`"
            )
            raise UserError(f"task `{task.name}`: a request {wanted}, not {reprlib.repr(request)}")
    return requests


def _texts(request: Request) -> tuple[Any, ...]:
    match request:
        case Rolling():
            return (request.text,)
        case LogLikelihood():
            return request.context, request.continuation
        case Generate():
            return (request.prompt,)


def _is_text(value: Any) -> bool:
    return isinstance(value, str | np.ndarray)


def _checked(task: Task, metrics: list[Metric]) -> list[Metric]:
    """`metrics`; UserError unless they are finite and each overall metric precedes its groups."""
    if not (isinstance(metrics, list | tuple) and all(isinstance(metric, Metric) for metric in metrics)):
        raise UserError(f"task `{task.name}`: `metrics` must return a list of `Metric`, not {reprlib.repr(metrics)}")
    for index, metric in enumerate(metrics):
        where = f"task `{task.name}`: metric `{metric.name}`"
        if not math.isfinite(metric.value):
            raise UserError(f"{where} is {metric.value}; results must be finite")
        whole = [each for each in metrics[:index] if each.name == metric.name and not each.group]
        if bool(whole) != bool(metric.group):
            raise UserError(f"{where} must be returned once, before the same metric of its groups")
    return metrics
