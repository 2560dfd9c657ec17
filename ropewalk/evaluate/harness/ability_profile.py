"""The ability profile: each ability's headline metrics, standardised so that chance is 0 and a perfect score is 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.base.metric import SHARE, Metric

from ..task import Task
from .groups import combined
from .yaml_task import YamlTask

HUNDREDS = ("bleu", "chrf", "chrf++")
"""Metrics whose best value is 100, as in sacrebleu."""


def ability_profile(tasks: Sequence[Task], measured: Mapping[str, Sequence[Metric]]) -> dict[str, Any]:
    """For each ability: the mean of its tasks' standardised headlines with an interval, the items, and the tasks. The
    public data sets alone count where there are any; items of our own are a smoke test."""
    by_ability: dict[str, list[tuple[Task, Metric]]] = {}
    for task in tasks:
        if task.ability and measured.get(task.name):
            found = _standardised(measured[task.name][0])
            if found:
                by_ability.setdefault(task.ability, []).append((task, found))
    return {ability: _combined(pairs) for ability, pairs in by_ability.items()}


def _combined(pairs: Sequence[tuple[Task, Metric]]) -> dict[str, Any]:
    public = [
        (task, metric) for task, metric in pairs if not (isinstance(task, YamlTask) and task.metadata.get("ours"))
    ]
    counted = public or pairs
    metrics = [metric for _, metric in counted]
    weights = [1 / len(metrics)] * len(metrics)
    value = sum(metric.value for metric in metrics) / len(metrics)
    interval = combined(value, metrics, weights)
    return {
        "value": value,
        "interval": None if interval is None else [max(-1.0, interval[0]), min(1.0, interval[1])],
        "n": sum(metric.n or 0 for metric in metrics),
        "tasks": [task.name for task, _ in counted],
        "ours": not public,
    }


def _standardised(metric: Metric) -> Metric | None:
    """The metric with chance at 0 and its best value at 1; None for metrics without a best value."""
    if metric.better != "higher" or (metric.unit != SHARE and metric.name not in HUNDREDS):
        return None
    best = 1.0 if metric.unit == SHARE else 100.0
    chance = metric.references.get("chance", 0.0)

    def scaled(value: float) -> float:
        return (value - chance) / (best - chance)

    interval = metric.interval and (scaled(metric.interval[0]), scaled(metric.interval[1]))
    return Metric(metric.name, scaled(metric.value), interval, n=metric.n)
