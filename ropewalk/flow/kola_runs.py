"""KoLA's standardised scores of runs, beside results of other models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ropewalk.base.errors import UserError
from ropewalk.base.metric import SHARE, ScoreTable, Tasks
from ropewalk.evaluate.kola import LEVELS, Results, read_reference, standardise

_NOTE = (
    "KoLA: z-scores over these models by task, then 0 to 100 over all cells; levels are means over their tasks, "
    "overall is the mean z-score of the levels. Scores change with the models beside them."
)


def kola_table(runs: Sequence[tuple[str, Tasks]], *, reference: Path | None = None) -> ScoreTable | None:
    """The standardised scores of runs, by label, whose tasks have a level of KoLA; None if there are none.

    With a `reference`, the tasks that it and a run have in common; else all tasks of the runs.
    """
    notes = [_NOTE]
    runs, without = (
        [run for run in runs if _has_levels(run[1])],
        [label for label, tasks in runs if not _has_levels(tasks)],
    )
    if without:
        notes.append(f"left out, without any of these tasks: {', '.join(without)}")
    if reference is None and len(runs) < 2:
        return None  # nothing to standardise over
    others = read_reference(reference) if reference else None
    known = others.models if others else []
    found = _of_runs([(f"{label} (run)" if label in known else label, tasks) for label, tasks in runs], notes)
    if reference and others:
        found = _beside(found, others, notes, path=reference)
    elif not any(len({score or 0.0 for score in scores.values()}) > 1 for scores in found.raw.values()):
        return None  # no levels, or nothing to standardise
    missing = found.missing
    if missing:
        named = "; ".join(f"{task} of {model}" for task, model in missing[:8]) + ("; ..." if missing[8:] else "")
        notes.append(f"{len(missing)} missing scores count as 0, as in KoLA: {named}")
    scores = standardise(found)
    columns = {**scores.levels, "overall": scores.overall}
    rows = {model: {name: column[model] for name, column in columns.items()} for model in found.models}
    details = {model: {task: cells[model] for task, cells in scores.tasks.items()} for model in found.models}
    order = sorted(rows, key=lambda model: -rows[model]["overall"])
    return ScoreTable(
        title="Levels of knowledge",
        rows={model: rows[model] for model in order},
        details={model: details[model] for model in order},
        notes=tuple(notes),
    )


def _has_levels(tasks: Tasks) -> bool:
    return any(metric.level in LEVELS for metrics in tasks.values() for metric in metrics)


def _of_runs(runs: Sequence[tuple[str, Tasks]], notes: list[str]) -> Results:
    levels: dict[str, list[str]] = {level: [] for level in LEVELS}
    raw: dict[str, dict[str, float | None]] = {}
    for label, tasks in runs:
        for task, metrics in tasks.items():
            scored = next((metric for metric in metrics if metric.level in LEVELS and not metric.group), None)
            if scored is None:
                continue
            if scored.better != "higher":
                notes.append(f"{task} is left out: less {scored.label} is better, and KoLA's scores rise")
                continue
            if task not in levels[scored.level]:
                levels[scored.level].append(task)
            # Results of others are in percent.
            value = 100 * scored.value if scored.unit == SHARE else scored.value
            raw.setdefault(task, dict.fromkeys((each for each, _ in runs), None))[label] = value
    return Results(levels=levels, raw=raw)


def _beside(ours: Results, others: Results, notes: list[str], *, path: Path) -> Results:
    """The results of all models for the tasks that both have."""
    shared = [task for task in others.raw if task in ours.raw]
    if not shared:
        mine = ", ".join(ours.raw) or "none with a level"
        raise UserError(f"{path}: no task in common: it has {', '.join(others.raw)}; the runs have {mine}")
    left_out = [task for task in (*others.raw, *ours.raw) if task not in shared]
    if left_out:
        notes.append(f"tasks without results on one side are left out: {', '.join(dict.fromkeys(left_out))}")
    return Results(
        levels=others.levels,
        raw={task: {**others.raw[task], **ours.raw[task]} for task in shared},
        pooled=others.pooled,
    )
