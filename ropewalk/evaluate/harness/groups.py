"""Groups: files that name tasks, and metrics to aggregate over them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ropewalk.base.metric import Metric

from .task_file import GROUP_KEYS, TaskFile

Member = tuple[str, Mapping[str, Any], tuple[TaskFile, ...]]
"""Name of a task, values that replace those of its file, and the inline groups around it."""


def members(group: TaskFile) -> Iterator[Member]:
    """The tasks, groups and tags that a group names, with the settings that it gives to them."""
    named = group.get("task", [])
    shared = {key: value for key, value in group.values.items() if key not in GROUP_KEYS}
    for each in named if isinstance(named, list) else [named]:
        if isinstance(each, str):
            yield each, shared, ()
        elif isinstance(each, dict) and isinstance(each.get("task"), str):
            yield each["task"], {**shared, **{key: value for key, value in each.items() if key != "task"}}, ()
        elif isinstance(each, dict) and isinstance(each.get("group"), str):
            inner = TaskFile(group.path, each, dict.fromkeys(each, (group.path, 0)), group.files)
            if each.get("task") is None:
                yield each["group"], {**shared, **{key: value for key, value in each.items() if key != "group"}}, ()
                continue
            for name, values, around in members(inner):
                yield name, {**shared, **values}, (inner, *around)
        else:
            raise group.wrong("task", f"lists {each!r}", "name a task, or write `task:` or `group:`")


def check_group(group: TaskFile) -> None:
    """DataError for what is wrong with a group's `aggregate_metric_list`."""
    for entry in _entries(group):
        if not isinstance(entry, dict) or "metric" not in entry:
            raise group.wrong("aggregate_metric_list", f"has an entry without `metric`: {entry!r}")
        if entry.get("aggregation", "mean") != "mean":
            raise group.wrong("aggregate_metric_list", f'aggregates by "{entry["aggregation"]}"', "it must be mean")


def aggregated(group: TaskFile, tasks: Mapping[str, Sequence[Metric]]) -> list[Metric]:
    """The group's metrics over its tasks: their mean, weighted by the number of items unless the file says otherwise.

    The interval takes the tasks as independent.
    """
    found = []
    for entry in _entries(group):
        for name in _names(entry, tasks):
            parts = [
                metric for metrics in tasks.values() for metric in metrics if metric.name == name and not metric.group
            ]
            if parts:
                found.append(_mean(name, parts, weighted=entry.get("weight_by_size", True), of_all=len(tasks)))
    return found


def _entries(group: TaskFile) -> list[Any]:
    given = group.get("aggregate_metric_list", [])
    return given if isinstance(given, list) else [given]


def _names(entry: Mapping[str, Any], tasks: Mapping[str, Sequence[Metric]]) -> list[str]:
    """The metric's names in the results, with each filter that the entry asks for, or all."""
    name, filters = str(entry["metric"]), entry.get("filter_list")
    there = dict.fromkeys(metric.name for metrics in tasks.values() for metric in metrics)
    if filters is None:
        return [each for each in there if each == name or each.startswith(f"{name},")]
    wanted = filters if isinstance(filters, list) else [filters]
    return [each for each in there if each in {name, *(f"{name},{filter}" for filter in wanted)}]


def _mean(name: str, parts: Sequence[Metric], *, weighted: bool, of_all: int) -> Metric:
    sizes = [float(part.n or 0) if weighted else 1.0 for part in parts]
    weights = [size / sum(sizes) for size in sizes] if sum(sizes) else [1 / len(parts)] * len(parts)
    value = sum(weight * part.value for weight, part in zip(weights, parts, strict=True))
    first = parts[0]
    return Metric(
        name,
        value,
        interval=combined(value, parts, weights),
        n=sum(part.n or 0 for part in parts),
        of=first.of,
        unit=first.unit,
        better=first.better,
        signature=f"mean of {len(parts)} of {of_all} tasks|{'by items' if weighted else 'by task'}",
    )


def combined(value: float, parts: Sequence[Metric], weights: Sequence[float]) -> tuple[float, float] | None:
    """The interval of a weighted mean of independent metrics; None if one of them has none."""
    if any(part.interval is None for part in parts):
        return None
    pairs = [(part.value, part.interval, weight) for part, weight in zip(parts, weights, strict=True)]
    below, above = (
        math.sqrt(sum((weight * (interval[side] - own)) ** 2 for own, interval, weight in pairs if interval))
        for side in (0, 1)
    )
    return value - below, value + above
