"""KoLA: scores of tasks at four levels of knowledge, standardised over models (Yu et al. 2024, "KoLA: Carefully
Benchmarking World Knowledge of Large Language Models").

Tasks differ in difficulty and scale, so each score becomes a z-score over the models of its task, and all z-scores
together are stretched to 0 to 100. As in KoLA's own script, a missing score counts as 0, and tasks with the same metric
and alike data share one mean and deviation (`pooled`). A model has no standardised score of its own: it changes with
the models beside it.

A file of results has the shape

    {"levels": {"KM": ["facts"], "KU": ["events"]}, "pooled": [["facts", "rare-facts"]],
     "raw": {"facts": {"model-a": 24.2, "model-b": null}}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.files import read_regular

LEVELS = {"KM": "knowledge memorised", "KU": "understood", "KA": "applied", "KC": "created"}
"""The levels in order."""
_CREATED = ("c1_avg_rouge_l_f", "c2_rouge_l_f")
"""Parts of a score of a creating task in KoLA's results: similarity to the reference, similarity to each other."""

Scores = Mapping[str, Mapping[str, float | None]]
"""By task and model; in percent, as only scores of one scale can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Scores of several models before they are standardised."""

    levels: Mapping[str, Sequence[str]]
    """Tasks by level."""
    raw: Scores
    pooled: Sequence[Sequence[str]] = ()
    """Tasks that share one mean and deviation."""

    @property
    def models(self) -> list[str]:
        """The models, in the order of their first scores."""
        return list(dict.fromkeys(model for scores in self.raw.values() for model in scores))

    @property
    def missing(self) -> list[tuple[str, str]]:
        """Tasks and models without a score, which count as 0."""
        return [(task, model) for task in self.raw for model in self.models if self.raw[task].get(model) is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standardised:
    """Scores from 0, the worst of all cells, to 100, the best one."""

    tasks: dict[str, dict[str, float]]
    """By task and model."""
    levels: dict[str, dict[str, float]]
    """Means over the tasks of a level, by level and model."""
    overall: dict[str, float]
    """Mean over the levels of the mean z-score, by model: 0 is average. KoLA's column "Avg"."""


def standardise(results: Results) -> Standardised:
    """The standardised scores of all models; UserError if no task tells two models apart."""
    models = results.models
    raw = {task: np.array([scores.get(model) or 0.0 for model in models]) for task, scores in results.raw.items()}
    pools = {task: [other for other in pool if other in raw] for pool in results.pooled for task in pool}
    scores = {}
    for task, values in raw.items():
        pool = np.concatenate([raw[other] for other in pools.get(task, [task])])
        spread = pool.std()
        scores[task] = (values - pool.mean()) / spread if spread > 0 else np.zeros(len(models))
    cells = np.concatenate([*scores.values(), np.zeros(0)])
    if not len(cells) or cells.max() == cells.min():
        raise UserError(
            "KoLA standardises scores across models, and no task tells two models apart; name more runs, or results "
            "of other models with --kola-reference"
        )
    stretched = {task: 100 * (z - cells.min()) / (cells.max() - cells.min()) for task, z in scores.items()}
    levels = {level: [task for task in tasks if task in raw] for level, tasks in results.levels.items()}
    levels = {level: levels[level] for level in LEVELS if levels.get(level)}
    means = {level: np.mean([stretched[task] for task in tasks], axis=0) for level, tasks in levels.items()}
    overall = np.mean([np.mean([scores[task] for task in tasks], axis=0) for tasks in levels.values()], axis=0)
    return Standardised(
        tasks={task: _by_model(models, values) for task, values in stretched.items()},
        levels={level: _by_model(models, values) for level, values in means.items()},
        overall=_by_model(models, overall),
    )


def _by_model(models: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    return {model: float(value) for model, value in zip(models, values, strict=True)}


def read_reference(path: Path) -> Results:
    """Results of other models, from JSON."""
    try:
        tree = json.loads(read_regular(path))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file of results") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    levels, raw = (tree.get(key) if isinstance(tree, dict) else None for key in ("levels", "raw"))
    if not isinstance(levels, dict) or not isinstance(raw, dict):
        raise DataError(f"{path}: no results; write an object with `levels` (tasks by level) and `raw` (task -> model)")
    for level, tasks in levels.items():
        if level not in LEVELS or not isinstance(tasks, list):
            raise DataError(f"{path}: levels: `{level}`: use {', '.join(LEVELS)}, each with a list of tasks")
    placed = {task for tasks in levels.values() for task in tasks}
    for task, scores in raw.items():
        if task not in placed:
            raise DataError(f"{path}: task `{task}` has no level")
        if not isinstance(scores, dict):
            raise DataError(f"{path}: raw: `{task}` must give a score for each model")
    pooled = tree.get("pooled", [])
    if not isinstance(pooled, list) or not all(isinstance(pool, list) for pool in pooled):
        raise DataError(f'{path}: pooled: write lists of tasks, such as [["a", "b"]]')
    cells = {
        task: {model: _cell(score, f"{path}: raw: {task}: {model}") for model, score in scores.items()}
        for task, scores in raw.items()
    }
    return Results(levels=levels, raw=cells, pooled=pooled)


def _cell(score: Any, where: str) -> float | None:
    """A score. KoLA's creating tasks have two parts, which `self_contrast` puts together in the same way."""
    if score is None:
        return None
    if isinstance(score, dict) and all(_sound(score.get(part)) for part in _CREATED):
        return 2 * float(score[_CREATED[0]]) - float(score[_CREATED[1]])
    if not _sound(score):
        raise DataError(f"{where}: {score!r} is no score; write a number, or null if it is missing")
    return float(score)


def _sound(score: Any) -> bool:
    return isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
