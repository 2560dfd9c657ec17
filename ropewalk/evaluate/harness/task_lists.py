"""What `ropewalk evaluate tasks` and `ropewalk evaluate datasets` show. Imports little, to answer at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ropewalk.base.errors import DataError

from ..config import IN_PYTHON, TASKS, Evaluate
from .datasets import BUILDERS, Missing, data_sets
from .task_index import SUITES, TaskEntry, TaskIndex, suite_names

READY, MISSING, BUILT_IN = "ready", "missing", "built in"


@dataclass(frozen=True, slots=True)
class ListedTask:
    """A task in the list."""

    name: str
    kind: str
    """Its output type; `group`, `python`, or `built in`."""
    ability: str
    metrics: tuple[str, ...]
    data: str
    """`ready`, `missing`, or what is wrong with an entry; empty without data of its own."""
    data_set: str
    ours: bool
    """Whether it has ten items of our own: a smoke test, not a benchmark."""
    path: str
    doc: str = ""
    """What a built-in task measures."""


@dataclass(frozen=True, slots=True)
class TaskList:
    """Tasks by name, and files that cannot be read."""

    tasks: list[ListedTask]
    broken: dict[str, str]
    """File -> what is wrong with it."""
    suites: list[str] = field(default_factory=list)
    """Names of sets of tasks."""


def listed_tasks(settings: Evaluate, pattern: str = "") -> TaskList:
    """The tasks that `evaluate.tasks` may name, by name; with a pattern those whose name or ability matches."""
    where, index = _Where(settings), _index(settings)
    found = [
        ListedTask(
            name=entry.name,
            kind=entry.output_type if entry.kind == "task" else entry.kind,
            ability=entry.ability,
            metrics=entry.metrics,
            data=where.status(entry),
            data_set=f"{entry.data_set}:{entry.config}" if entry.config else entry.data_set,
            ours=entry.ours,
            path=entry.path,
        )
        for entry in index.matching(pattern)
    ]
    built_in = [name for name in TASKS if pattern.strip("*") in name]
    python = [ListedTask(name, BUILT_IN, "", (), "", "", False, "", TASKS[name].doc) for name in built_in]
    known = sorted({"suite:all", *IN_PYTHON, *(f"suite:{name}" for name in suite_names())})
    suites = [name for name in known if pattern.strip("*") in name]
    return TaskList(python + found, index.broken, suites)


def missing_data(settings: Evaluate, pattern: str = "") -> list[Missing]:
    """The data sets of tasks that are not on this machine, each once."""
    where = _Where(settings)
    found: dict[tuple[str, str], Missing] = {}
    for entry in _index(settings).matching(pattern):
        if entry.kind == "task" and where.status(entry) == MISSING:
            split = entry.splits[0] if entry.splits else "test"
            found.setdefault((entry.data_set, entry.config), Missing(entry.data_set, entry.config, split))
    return list(found.values())


def _index(settings: Evaluate) -> TaskIndex:
    return TaskIndex([*map(Path, settings.task_folders), SUITES])


class _Where:
    """Whether data are on this machine; looks at each place once."""

    def __init__(self, settings: Evaluate) -> None:
        @functools.cache
        def status(folder: Path, name: str, config: str, splits: Sequence[str]) -> str:
            try:
                found = data_sets(settings.datasets, settings.task_folders, folder / "task.yaml").find(name, config)
            except DataError as error:
                return str(error)
            return MISSING if found is None else READY

        self._status = status

    def status(self, entry: TaskEntry) -> str:
        """For the list."""
        if entry.kind != "task" or not entry.data_set:
            return ""
        if entry.own_files and entry.data_set in BUILDERS:
            return READY
        return self._status(Path(entry.path).parent, entry.data_set, entry.config, entry.splits)


def lines_of(listed: TaskList) -> Iterator[str]:
    """The list for people: task files in columns, tasks in Python with what they measure, suites."""
    rows = [("task", "kind", "ability", "metrics", "data")]
    for task in listed.tasks:
        if task.kind == BUILT_IN:
            continue
        data = f"{task.data} ({task.data_set})" if task.data else ""
        data = f"{task.data}, ten items of our own" if task.ours else data
        rows.append((task.name, task.kind, task.ability, " ".join(task.metrics[:3]), data))
    built_in = [(task.name, task.doc) for task in listed.tasks if task.kind == BUILT_IN]
    blocks = [_columns(rows)] if len(rows) > 1 else []
    blocks += [_columns([(BUILT_IN, "measures"), *built_in])] if built_in else []
    blocks += [[f"suites: {', '.join(listed.suites)}"]] if listed.suites else []
    for number, block in enumerate(blocks):
        yield from ["", *block] if number else block


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [min(44, max(len(row[column]) for row in rows)) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
