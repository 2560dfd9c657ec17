"""`human.json`: what people said of each system, and how far that can be trusted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError
from ropewalk.base.seal import read_sealed, write_sealed

from .raters_needed import variance_components
from .rating_form import Level, RatingQuestion
from .rating_statistics import (
    agreement,
    differences,
    disagreements,
    position_bias,
    rater_rows,
    self_agreement,
    system_means,
)
from .rating_table import RatingTable, rating_table
from .ratings_log import Scores
from .sheet_key import SheetKey

FORMAT = 1
HUMAN_RESULTS = "human.json"
IN_RUN = f"evaluation/{HUMAN_RESULTS}"
RELIABLE, TENTATIVE = 0.8, 0.667
"""Krippendorff (2004): below the first only tentative conclusions, below the second none."""
_COUNTS = (1, 2, 3, 5, 10, 20)
"""Numbers of raters whose precision is told."""
_STEPS = 16
"""The half-width that is aimed at unless told: the scale divided by this, 0.25 on 1 to 5."""
_TOP = 1.0
Tree = dict[str, Any]


def human_results(key: SheetKey, scores: Scores, *, half_width: float | None) -> Tree:
    """What the ratings say, by question."""
    notes: list[str] = []
    questions = {}
    for question in key.form.questions:
        table = rating_table(key, scores, question.name)
        questions[question.name] = _question(key, question, table, half_width, notes)
    expected = sum(len(lines) for lines in key.sheets.values()) * len(key.form.questions)
    return {
        "export": key.export,
        "mode": key.mode,
        "task": key.task,
        "systems": key.systems,
        "items": len(key.items),
        "ratings": len(scores),
        "expected": expected,
        "sheets": {
            rater: {
                "ratings": sum(sheet == key.sheet_name(rater) for sheet, _, _ in scores),
                "expected": len(lines) * len(key.form.questions),
            }
            for rater, lines in key.sheets.items()
        },
        "questions": questions,
        "notes": notes,
    }


def write_human_results(folder: Path, results: Tree, *, run: Path | None) -> None:
    """Commits `human.json` in the folder and, with a run, in its `evaluation/`."""
    for path in (folder / HUMAN_RESULTS, *([run / IN_RUN] if run else [])):
        write_sealed(path, {"format": FORMAT, **results})


def read_human_results(folder: Path) -> Tree:
    """Reads `human.json` of a folder of sheets; DamagedFile if it is not what was written."""
    path = folder / HUMAN_RESULTS
    if not path.exists():
        raise DataError(f"{folder}: no {HUMAN_RESULTS}; `ropewalk human import` writes it from the sheets of raters")
    tree = read_sealed(
        path,
        what="file of human ratings",
        remedy="`ropewalk human import` writes it anew",
        current=FORMAT,
        sealed_since=1,
    )
    tree.pop("format")
    return tree


def _question(
    key: SheetKey, question: RatingQuestion, table: RatingTable, half_width: float | None, notes: list[str]
) -> Tree:
    share = key.mode != "score"
    level: Level = "nominal" if share else "ordinal"
    levels: tuple[Level, ...] = ("nominal",) if key.mode == "binary" else ("nominal", "ordinal")
    if not share:
        # A ratio needs a true zero and no value below it.
        levels = (*levels, "interval", *(("ratio",) if question.least >= 0 else ()))
    width = half_width or (_TOP if share else question.most - question.least) / _STEPS
    found = {
        "text": question.text,
        "scale": [0, 1] if share else [question.least, question.most],
        "unit": "share" if share else "",
        "level": level,
        "systems": system_means(table),
        "differences": differences(table) if key.mode != "pairwise" else [],
        "agreement": agreement(table, levels),
        "self_agreement": self_agreement(table, level),
        "position": position_bias(table) if key.mode == "pairwise" else None,
        "raters": rater_rows(table),
        "needed": _needed(table, width),
        "disagreements": [_shown(key, table, item, spread) for item, spread in disagreements(table)],
    }
    notes += _notes(question.name, found)
    return found


def _needed(table: RatingTable, half_width: float) -> Tree | None:
    """The variance components of a system's ratings, and what other numbers of raters and items would give."""
    parts = [table.first_RI[:, table.of(system)] for system in sorted(set(table.systems))]
    found = variance_components(parts)
    if found is None:
        return None
    items = round(sum(part.shape[1] for part in parts) / len(parts))
    raters = len(table.shared_RI)
    return {
        "variance": {"items": found.items, "raters": found.raters, "rest": found.rest},
        "items_per_system": items,
        "raters": raters,
        "half_width": found.half_width(items=items, raters=raters),
        "wanted": half_width,
        "raters_needed": found.raters_for(half_width, items=items),
        "items_needed": found.items_for(half_width, raters=raters),
        "half_widths": {str(count): found.half_width(items=items, raters=count) for count in _COUNTS},
    }


def _shown(key: SheetKey, table: RatingTable, item: int, spread: float) -> Tree:
    rated = key.items[item]
    column = table.first_RI[:, item]
    return {
        "item": item,
        "spread": spread,
        "systems": list(rated.systems),
        "scores": {
            rater: float(score) for rater, score in zip(table.raters, column, strict=True) if not math.isnan(score)
        },
        "prompt": key.prompts[rated.prompt].prompt,
        "texts": list(rated.texts),
    }


def _notes(name: str, found: Tree) -> list[str]:
    """What a reader of the means must know."""
    notes = []
    raters = found["raters"]
    if not raters:
        return [f"{name}: not rated yet"]
    if len(raters) == 1:
        notes.append(f"{name}: one rater, so the intervals cover other items and not other raters")
    alpha = found["agreement"]["krippendorff"][found["level"]]["value"]
    if alpha is not None and alpha < RELIABLE:
        much = "tentative conclusions only" if alpha >= TENTATIVE else "too little to rely on single items"
        notes.append(
            f"{name}: alpha {alpha:.2f}, {much} (Krippendorff: from {RELIABLE} reliable, from {TENTATIVE} tentative)"
        )
    elif alpha is None and len(raters) > 1:
        notes.append(f"{name}: agreement is not defined: no item with two ratings, or the same value everywhere")
    for row in raters:
        if row["spread"] == 0 and row["ratings"] > 2:
            notes.append(f"{name}: {row['rater']} gave the same answer everywhere")
        if row["correlation"] is not None and row["correlation"] < 0:
            notes.append(f"{name}: {row['rater']} answers against the others (correlation {row['correlation']:.2f})")
    for each in found["differences"]:
        against = len(each["by_rater"]) - each["raters_agreeing"]
        if against and each["difference"]:
            pair = " and ".join(each["systems"])
            notes.append(f"{name}: {against} of {len(each['by_rater'])} raters do not see the order of {pair}")
    if found["position"]:
        low, high = found["position"]["interval"]
        if not low <= 0.5 <= high:
            notes.append(f"{name}: raters prefer one side ({100 * found['position']['first_shown']:.0f} % chose A)")
    return notes
