"""Runs evaluation tasks and writes their metrics, samples and scored documents."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ropewalk.base.errors import UserError
from ropewalk.base.metric import Metric, metrics_tree

from .config import TASKS
from .decode.stop_strings import cut
from .decode.token_choice import prompt_seed
from .held_out import HeldOut
from .results import write_results
from .task import (
    Answer,
    Generate,
    Generation,
    Likelihood,
    Request,
    Rolling,
    Sample,
    Sampling,
    ScoredDocument,
    Task,
    TaskModel,
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics by task, samples and scored documents."""

    tasks: dict[str, list[Metric]]
    samples: list[Sample]
    documents: list[ScoredDocument]


def evaluate(model: TaskModel, held_out: HeldOut) -> Evaluation:
    """Runs the tasks of `evaluate.tasks` with `model`. All ranks must call."""
    tasks = open_tasks(held_out)
    requests = [_requests(task) for task in tasks]
    # Likelihoods of all tasks first: generation may load the model in another precision.
    likelihoods = [_likelihoods(model, held_out, asked) for asked in requests]
    completions = [_completions(model, held_out, asked) for asked in requests]
    found = Evaluation({}, [], [])
    for task, asked, likely, drawn in zip(tasks, requests, likelihoods, completions, strict=True):
        by_number: dict[int, Answer] = {**likely, **drawn}
        answers = [by_number[number] for number in range(len(asked))]
        found.tasks[task.name] = _checked(task, task.metrics(answers))
        records = task.records(answers)
        found.samples.extend(record for record in records if isinstance(record, Sample))
        found.documents.extend(record for record in records if isinstance(record, ScoredDocument))
    return found


def open_tasks(held_out: HeldOut) -> list[Task]:
    """The configured tasks, in order."""
    tasks: list[Task] = []
    for name in held_out.settings.tasks:
        target = TASKS[name].load()
        if not (isinstance(target, type) and issubclass(target, Task)):
            raise UserError(f'evaluate.tasks: "{name}" is no task; derive the class from `ropewalk.evaluate.task.Task`')
        tasks.append(target(held_out))
        if not getattr(tasks[-1], "name", ""):
            raise UserError(f'evaluate.tasks: "{name}" has no name; write `name = "..."` in `class {target.__name__}`')
    names = [task.name for task in tasks]
    if len({*names}) < len(names):
        raise UserError(f"evaluate.tasks: two tasks have the same name ({', '.join(names)})")
    return tasks


def write_evaluation(run: Path, evaluation: Evaluation, *, step: int) -> None:
    """Commits `evaluation/results.json`, `evaluation/documents.jsonl` and `samples.jsonl` in the run directory."""
    tasks = {name: metrics_tree(metrics) for name, metrics in evaluation.tasks.items()}
    samples, documents = (map(dataclasses.asdict, records) for records in (evaluation.samples, evaluation.documents))
    write_results(run, {"step": step, "tasks": tasks}, samples, documents)


def _requests(task: Task) -> list[Request]:
    requests = list(task.requests())
    for request in requests:
        text = request.text if isinstance(request, Rolling) else getattr(request, "prompt", None)
        if not (isinstance(request, Rolling | Generate) and isinstance(text, str | np.ndarray)):
            wanted = "must be `Rolling(text)` or `Generate(prompt, Sampling(...))`"
            raise UserError(f"task `{task.name}`: a request {wanted}, not {reprlib.repr(request)}")
    return requests


def _likelihoods(model: TaskModel, held_out: HeldOut, requests: Sequence[Request]) -> dict[int, Likelihood]:
    """Likelihoods by request index."""
    asked = {index: request.text for index, request in enumerate(requests) if isinstance(request, Rolling)}
    documents = [
        np.array([*held_out.detokenizer.encode(text), held_out.end_of_text]) if isinstance(text, str) else text
        for text in asked.values()
    ]
    return dict(zip(asked, model.rolling(documents), strict=True)) if asked else {}


def _completions(model: TaskModel, held_out: HeldOut, requests: Sequence[Request]) -> dict[int, Generation]:
    by_sampling: dict[Sampling, dict[int, list[int]]] = {}
    repeats = {}
    for index, request in enumerate(requests):
        if isinstance(request, Generate):
            text = request.prompt
            tokens = held_out.detokenizer.encode(text) if isinstance(text, str) else text.tolist()
            # Prompts follow an end-of-text token, like every training document.
            by_sampling.setdefault(request.sampling, {})[index] = [held_out.end_of_text, *tokens]
            repeats[index] = request.repeat
    found = {}
    for sampling, prompts in by_sampling.items():
        held_out.progress.begin("sample", len(prompts), "completions")
        seeds = [prompt_seed(held_out.seed, prompt, repeats[index]) for index, prompt in prompts.items()]
        drawn = model.generate([*prompts.values()], sampling, seeds=seeds)
        held_out.progress.end()
        for (index, prompt), completion in zip(prompts.items(), drawn, strict=True):
            data = held_out.detokenizer.continuation(prompt[1:], completion)
            found[index] = Generation(completion, cut(data.decode(errors="replace"), sampling.stop))
    return found


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
