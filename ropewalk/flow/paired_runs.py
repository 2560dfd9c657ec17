"""Compares runs on the items and documents that both have scored, which lie in `evaluation/`."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DamagedFile
from ropewalk.base.files import read_regular
from ropewalk.base.metric import Metric, PairedDifference, Tasks
from ropewalk.base.seal import parse_sealed_lines
from ropewalk.evaluate.results import DOCUMENTS, ITEMS

_HELD_OUT = ("held-out", "bits_per_byte")
"""Task and metric of scored documents."""

_Name = tuple[str, str]
"""Task and metric."""
_Scores = dict[_Name, dict[Any, tuple[float, float]]]
"""Score and size of each item, by task and metric and by the key of the item."""


@dataclass(frozen=True, slots=True)
class PairedRuns:
    """What runs differ by on shared items, and why some of their figures are not compared."""

    differences: tuple[PairedDifference, ...] = ()
    notes: list[str] = field(default_factory=list)


def compare_items(runs: Sequence[tuple[Path, Tasks]]) -> PairedRuns:
    """Compares each run with the first one, under every metric with item scores in both."""
    found = PairedRuns(notes=[])
    scores = [_scores(run, found.notes) for run, _ in runs]
    described = [{(task, each.name): each for task, metrics in tasks.items() for each in metrics} for _, tasks in runs]
    differences: list[PairedDifference] = []
    for other in range(1, len(runs)):
        for name in scores[0]:
            if name not in scores[other]:
                continue
            ours, theirs = described[0].get(name), described[other].get(name)
            if ours and theirs and ours.signature != theirs.signature:
                found.notes.append(f"{' '.join(name)} was computed in two ways: {ours.signature}; {theirs.signature}")
                continue
            difference = _difference(name, ours or theirs, scores[0][name], scores[other][name], run=other)
            if difference:
                differences.append(difference)
            else:
                found.notes.append(f"{' '.join(name)}: {runs[other][0]} and {runs[0][0]} scored no common items")
    if not differences:
        return found
    from ropewalk.evaluate.metrics.paired import holm

    adjusted = holm([each.p_value for each in differences])
    corrected = [dataclasses.replace(one, p_adjusted=p) for one, p in zip(differences, adjusted, strict=True)]
    return PairedRuns(tuple(corrected), found.notes)


def _difference(
    name: _Name, metric: Metric | None, first: Mapping[Any, Any], second: Mapping[Any, Any], *, run: int
) -> PairedDifference | None:
    shared = [key for key in first if key in second]
    if not shared:
        return None
    from ropewalk.evaluate.metrics.paired import paired  # numpy, only where there is something to compare

    sizes = [first[key][1] for key in shared]
    result = paired([first[key][0] for key in shared], [second[key][0] for key in shared], sizes=sizes)
    return PairedDifference(
        task=name[0],
        metric=name[1],
        runs=(0, run),
        value=result.difference,
        interval=result.interval,
        p_value=result.p_value,
        p_adjusted=result.p_value,
        test=result.test,
        n=result.n,
        of=metric.of if metric else "item",
        unit=metric.unit if metric else "",
        better=metric.better if metric else "neither",
    )


def _scores(run: Path, notes: list[str]) -> _Scores:
    found: _Scores = {}
    documents = {row.get("key"): row for row in _rows(run / DOCUMENTS, notes)}
    bits = {key: _bits(row) for key, row in documents.items() if _number(row.get("bytes")) and _number(row.get("nats"))}
    if bits:
        found[_HELD_OUT] = bits
    seen: Counter[tuple[str, str]] = Counter()
    for row in _rows(run / ITEMS, notes):
        task, key, scores = str(row.get("task")), str(row.get("key")), row.get("scores")
        seen[task, key] += 1  # a question may be asked twice
        for metric, score in scores.items() if isinstance(scores, dict) else ():
            if _number(score) is not None:
                found.setdefault((task, metric), {})[key, seen[task, key]] = (float(score), 1.0)
    return found


def _bits(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["nats"] / math.log(2), float(row["bytes"])


def _number(value: Any) -> float | None:
    sound = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if sound else None


def _rows(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The lines of `path`; none without the file, and a note if it is damaged."""
    try:
        rows = parse_sealed_lines(read_regular(path), path=path, what=path.name, remedy="`ropewalk evaluate` writes it")
    except FileNotFoundError:
        return []
    except (OSError, DamagedFile) as error:
        notes.append(str(error))
        return []
    return [row for row in rows if isinstance(row, dict)]
