"""The tasks that `evaluate.tasks` names and that are written as YAML: by name, pattern, tag, group, suite or file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.metric import Metric

from ..config import TASK_FILE, TASKS, Evaluate
from ..held_out import HeldOut
from ..task import Task
from .datasets import data_sets
from .groups import aggregated, check_group, members
from .prompts import ChatTemplate
from .task_file import TaskFile, read_task_file
from .task_index import SUITES, TaskEntry, TaskIndex, suite_names
from .yaml_task import TaskSettings, YamlTask

SUITE = "suite:"


def check_named(settings: Evaluate) -> list[str]:
    """What is wrong with the tasks written as YAML that `evaluate.tasks` names; reads no data."""
    named = NamedTasks(settings)
    problems = []
    for name in settings.tasks:
        try:
            if TASKS[name] is TASK_FILE:
                for task in named.open(name):
                    task.check_metrics()
        except UserError as error:
            problems.append(str(error))
    return problems


def named_digests(settings: Evaluate) -> dict[str, str]:
    """What results of the tasks written as YAML depend on besides the settings: a hash of files and data by task."""
    named = NamedTasks(settings)
    names = [name for name in settings.tasks if TASKS[name] is TASK_FILE]
    return {task.name: task.digest() for name in names for task in named.open(name)}


def group_metrics(tasks: Sequence[Task], measured: Mapping[str, Sequence[Metric]]) -> dict[str, list[Metric]]:
    """The metrics of the groups through which tasks were chosen, by the groups' names."""
    groups: dict[str, tuple[TaskFile, dict[str, Sequence[Metric]]]] = {}
    for task in tasks:
        for group in task.groups if isinstance(task, YamlTask) else ():
            groups.setdefault(str(group.get("group")), (group, {}))[1][task.name] = measured.get(task.name, ())
    found = {name: aggregated(group, own) for name, (group, own) in groups.items()}
    return {name: metrics for name, metrics in found.items() if metrics and name not in measured}


class NamedTasks:
    """Opens the tasks that names of `evaluate.tasks` stand for, each task once."""

    def __init__(self, settings: Evaluate, held_out: HeldOut | None = None) -> None:
        """Without `held_out` the tasks can be checked, not run."""
        self._held_out, self._settings = held_out, settings
        self._index = TaskIndex([*map(Path, settings.task_folders), SUITES])
        self._chat = None if held_out is None else _chat_template(held_out)
        self._tasks: list[YamlTask] = []

    def open(self, name: str) -> list[YamlTask]:
        """The tasks of `name` that no earlier name stood for. Raises UserError if there are none by this name,
        DataError if their data are not on this machine."""
        before = len(self._tasks)
        if name.startswith(SUITE):
            self._open_suite(name.removeprefix(SUITE))
        elif name.endswith((".yaml", ".yml")):
            self._add_file(read_task_file(Path(name)))
        elif any(mark in name for mark in "*?["):
            entries = [entry for entry in self._index.matching(name) if entry.kind == "task"]
            if not entries:
                raise UserError(f'evaluate.tasks: no task matches "{name}"')
            for entry in entries:
                self._add(entry)
        else:
            self._open_one(name, {}, ())
        for task in self._tasks[before:]:
            for warning in task.warnings:
                self._say(warning)
            task.check_data()
        return self._tasks[before:]

    def _say(self, text: str) -> None:
        if self._held_out is not None:
            self._held_out.progress.say(text)

    def _open_suite(self, name: str) -> None:
        entries = self._index.suite(name)
        if not entries:
            raise UserError(f'evaluate.tasks: no suite "{name}"; there are all, {", ".join(suite_names())}')
        before, absent = len(self._tasks), []
        for entry in entries:
            self._add(entry)
        for task in self._tasks[before:]:
            try:
                task.check_data()
            except DataError:
                self._tasks.remove(task)
                absent.append(task.name)
        if absent:
            self._say(
                f"{SUITE}{name}: not measured, as their data are not here: {', '.join(absent)}; "
                "`ropewalk evaluate datasets` says how to get them"
            )

    def _open_one(self, name: str, values: Mapping[str, Any], groups: Sequence[TaskFile], by: str = "") -> None:
        if name in self._index:
            self._add(self._index[name], values, groups)
            return
        tagged = self._index.tagged(name)
        if not tagged:
            raise UserError(f"{by or 'evaluate.tasks'}: {_unknown(name, self._index)}")
        for entry in tagged:
            self._add(entry, values, groups)

    def _add(self, entry: TaskEntry, values: Mapping[str, Any] = {}, groups: Sequence[TaskFile] = ()) -> None:
        if entry.kind == "python":
            raise UserError(
                f"{entry.path}: `{entry.name}` is a task written as a Python class, which runs in lm-eval only; "
                "ropewalk's bridge lends lm-eval the model"
            )
        self._add_file(read_task_file(Path(entry.path)), values, groups)

    def _add_file(self, file: TaskFile, values: Mapping[str, Any] = {}, groups: Sequence[TaskFile] = ()) -> None:
        if file.get("group") and not isinstance(file.get("task"), str):
            self._add_group(file, values, groups)
            return
        file = file.changed(values) if values else file
        name = str(file.get("task", file.path.stem))
        known = next((task for task in self._tasks if task.name == name), None)
        if known is None:
            known = YamlTask(file, self._held_out, self._task_settings(file))
            self._tasks.append(known)
        elif known.file.path.absolute() != file.path.absolute():
            raise UserError(f'evaluate.tasks: two tasks have the name "{name}": {known.file.path} and {file.path}')
        known.groups += [group for group in groups if group.get("group") not in [g.get("group") for g in known.groups]]

    def _add_group(self, group: TaskFile, values: Mapping[str, Any], around: Sequence[TaskFile]) -> None:
        check_group(group)
        if any(group.path == each.path and group.get("group") == each.get("group") for each in around):
            raise group.wrong("group", "contains itself")
        for name, own, inner in members(group):
            self._open_one(name, {**own, **values}, (*around, group, *inner), by=group.where("task"))

    def _task_settings(self, file: TaskFile) -> TaskSettings:
        settings = self._settings
        return TaskSettings(
            data=data_sets(settings.datasets, settings.task_folders, file.path),
            trusted=tuple(map(Path, settings.trusted_folders)),
            shots=settings.fewshot,
            chat=self._chat,
        )


def _unknown(name: str, index: TaskIndex) -> str:
    near = difflib.get_close_matches(name, [*TASKS, *index.names], n=1)
    remedy = (
        f'did you mean "{near[0]}"?' if near else "`ropewalk evaluate tasks` lists them; see `evaluate.task_folders`"
    )
    return f'no task "{name}"; {remedy}'


def _chat_template(held_out: HeldOut) -> ChatTemplate | None:
    style = held_out.settings.chat_template
    if style == "none":
        return None
    if not held_out.chat_template:
        raise DataError(
            f'evaluate.chat_template is "{style}", but the model has no chat template: it was not trained on dialogues'
        )
    return ChatTemplate(held_out.chat_template, held_out.detokenizer.text([held_out.end_of_text]), style)
