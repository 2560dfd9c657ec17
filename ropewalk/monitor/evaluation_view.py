"""What an evaluation left in its folder, as one value for pages: metrics, items, contamination, the ability profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DamagedFile
from ropewalk.base.files import read_regular
from ropewalk.base.metric import Metric, PairedDifference, Tasks, read_tasks
from ropewalk.base.seal import parse_sealed_lines

from .values import finite, mapping, text

Json = Mapping[str, Any]
ITEMS = "evaluation/items.jsonl"
RELIABILITY = "reliability"
"""The metric whose groups are bins of confidence, each with the mean confidence as a reference."""


@dataclass(frozen=True, slots=True)
class AnsweredItem:
    """One item of a task."""

    task: str
    group: str
    prompt: str
    prediction: str
    reference: str
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Ability:
    """How much of an ability the model has: its tasks on a scale from chance (0) to all right (1)."""

    name: str
    value: float
    interval: tuple[float, float] | None
    items: int | None
    tasks: Sequence[str]
    ours: bool
    """Measured on a few items of our own: a smoke test, no benchmark."""


@dataclass(frozen=True, slots=True)
class EvaluationView:
    """Everything is empty where a file is absent or unreadable."""

    results: Json
    tasks: Tasks
    items: Sequence[AnsweredItem]

    @property
    def step(self) -> float | None:
        return finite(self.results.get("step"))

    @property
    def contamination(self) -> Json:
        """By task."""
        return mapping(self.results.get("contamination"))

    @property
    def abilities(self) -> list[Ability]:
        rows = mapping(self.results.get("profile"))
        return [found for name, row in rows.items() if (found := _ability(name, mapping(row)))]

    def levels(self) -> dict[str, list[tuple[str, Metric]]]:
        """The headline metrics of tasks that have a level of KoLA, by level."""
        found: dict[str, list[tuple[str, Metric]]] = {}
        for task, metrics in self.tasks.items():
            if metrics and metrics[0].level:
                found.setdefault(metrics[0].level, []).append((task, metrics[0]))
        return dict(sorted(found.items(), key=lambda pair: _LEVELS.find(pair[0])))

    def worst(self, task: str, metric: Metric, most: int) -> list[AnsweredItem]:
        """The items of a task with the worst scores, in their order; those that are as good as the best one are left
        out, unless no item scored anything."""
        scored = [item for item in self.items if item.task == task and metric.name in item.scores]
        if not scored or metric.better == "neither":
            return []
        sign = 1 if metric.better == "higher" else -1
        best = max(sign * item.scores[metric.name] for item in scored)
        nothing = metric.better == "higher" and best <= 0
        ordered = sorted(scored, key=lambda item: sign * item.scores[metric.name])
        return [item for item in ordered[:most] if nothing or sign * item.scores[metric.name] < best]


_LEVELS = "KM KU KA KC"


@dataclass(frozen=True, slots=True)
class Change:
    """What differs from a run that was evaluated earlier, on the items that both have scored."""

    run: str
    step: float | None
    differences: Mapping[tuple[str, str], PairedDifference]
    """By task and metric."""


def read_evaluation(folder: Path, results: Json, missing: list[str]) -> EvaluationView:
    """The evaluation in `folder`, whose results were read; what cannot be read is named in `missing`."""
    return EvaluationView(results, read_tasks(results), tuple(_items(folder / ITEMS, missing)))


def _items(path: Path, missing: list[str]) -> Iterator[AnsweredItem]:
    try:
        rows = parse_sealed_lines(read_regular(path), path=path, what=path.name, remedy="")
    except FileNotFoundError:
        return  # no task made of questions
    except (OSError, DamagedFile) as error:
        missing.append(f"evaluation/{path.name}: cannot be read: {error}")
        return
    for row in map(mapping, rows):
        scores = {
            name: value for name, found in mapping(row.get("scores")).items() if (value := finite(found)) is not None
        }
        task, group, prompt, prediction, reference = (
            text(row.get(key)) for key in ("task", "group", "prompt", "prediction", "reference")
        )
        yield AnsweredItem(task, group, prompt, prediction, reference, scores)


def _ability(name: str, row: Json) -> Ability | None:
    value, interval, items, tasks = (row.get(key) for key in ("value", "interval", "n", "tasks"))
    if (found := finite(value)) is None:
        return None
    ends = [finite(end) for end in interval] if isinstance(interval, list) else []
    return Ability(
        name=name,
        value=found,
        interval=(ends[0], ends[1]) if len(ends) == 2 and ends[0] is not None and ends[1] is not None else None,
        items=items if isinstance(items, int) else None,
        tasks=[text(task) for task in tasks] if isinstance(tasks, list) else [],
        ours=row.get("ours") is True,
    )
