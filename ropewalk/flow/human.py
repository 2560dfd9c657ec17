"""`human export | import | show | huse`: sheets for raters, their ratings, and what these say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.files import locked
from ropewalk.base.progress import Progress, Silent
from ropewalk.checkpoint.format import read_checkpoint_manifest, resolve_checkpoint
from ropewalk.checkpoint.policy.lease import leased
from ropewalk.checkpoint.read.model_check import advise_on_damage
from ropewalk.config.resolved import load_section
from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.human.assignment import MOST_REPEATED, assign, choose_items
from ropewalk.evaluate.human.candidates import COMPLETIONS, HUMAN, candidates
from ropewalk.evaluate.human.filled_sheets import read_sheets
from ropewalk.evaluate.human.human_results import (
    HUMAN_RESULTS,
    human_results,
    read_human_results,
    write_human_results,
)
from ropewalk.evaluate.human.huse import huse
from ropewalk.evaluate.human.rating_form import Mode, read_form
from ropewalk.evaluate.human.rating_table import rating_table
from ropewalk.evaluate.human.ratings_log import RATINGS, Scores, append_ratings, ratings_checksum, read_ratings
from ropewalk.evaluate.human.sheet_files import write_sheets
from ropewalk.evaluate.human.sheet_key import KEY, SheetKey, read_key, write_key
from ropewalk.evaluate.results import read_results

from .plan_recipe import needs_torch

_Tree = dict[str, Any]


def export_sheets(
    runs: Sequence[Path],
    folder: Path,
    *,
    items: int = 40,
    raters: int = 3,
    repeat: float = 0.1,
    seed: int = 0,
    task: str = COMPLETIONS,
    questions: Path | None = None,
    mode: Mode = "score",
    human: Literal["auto", "yes", "no"] = "auto",
) -> _Tree:
    """Writes sheets for `raters` people about texts of the runs into `folder`, and the key to them.

    `items` is the most that a rater sees once; a share `repeat` of them returns. `human` says whether texts by people
    are among them: where the runs have some (`auto`), for certain, or not.
    """
    if not runs:
        raise UserError("name a run whose texts are rated")
    if not 0 <= repeat <= MOST_REPEATED:
        raise UserError(f"--repeat is {repeat:g}; give a share from 0 to {MOST_REPEATED:g}")
    if (folder / KEY).exists():
        raise UserError(f"{folder} has sheets already; name another folder, or move this one away")
    form = read_form(questions, mode)
    found = candidates(runs, task=task, human=human)
    prompts, chosen = choose_items(found, mode=mode, count=items, seed=seed)
    key = SheetKey(
        mode=mode,
        seed=seed,
        task=task,
        runs=tuple(map(str, runs)),
        form=form,
        prompts=tuple(prompts),
        items=tuple(chosen),
        sheets=assign(chosen, raters=raters, repeat=repeat, seed=seed),
    )
    folder.mkdir(parents=True, exist_ok=True)
    files = write_sheets(folder, key)
    write_key(folder, key)  # last: a folder with a key is complete
    lines = len(next(iter(key.sheets.values())))
    return {
        "folder": str(folder),
        "export": key.export,
        "mode": mode,
        "systems": key.systems,
        "prompts": len(prompts),
        "items": len(chosen),
        "repeated": lines - len(chosen),
        "raters": list(key.sheets),
        "questions": [question.name for question in form.questions],
        "files": [str(path) for path in files],
    }


def import_ratings(
    folder: Path, files: Sequence[Path], *, run: Path | None = None, half_width: float | None = None
) -> _Tree:
    """Adds the ratings of filled sheets to those of the folder and computes the results; with a run, also into its
    `evaluation/human.json`.

    The same file twice changes nothing; a corrected one replaces its ratings. `half_width` is the precision of means
    for which raters are counted (None: a sixteenth of the scale).
    """
    if half_width is not None and not (math.isfinite(half_width) and half_width > 0):
        raise UserError(f"--half-width is {half_width:g}; give a number above 0")
    (key, _), also = _opened(folder), _run_folder(run)
    with locked(folder):
        sheets = read_sheets(files, key)
        added, changed = append_ratings(folder, sheets)
        results = human_results(key, read_ratings(folder), half_width=half_width)
        results["ratings_checksum"] = ratings_checksum(folder)
        results |= _earlier_huse(folder, results["ratings_checksum"])
        write_human_results(folder, results, run=also)
    read = [
        {"file": sheet.file, "sheet": sheet.sheet, "ratings": len(sheet.ratings), "missing": sheet.missing}
        for sheet in sheets
    ]
    return {**results, "added": added, "changed": changed, "files": read}


def show_ratings(folder: Path) -> _Tree:
    """The results of the last import."""
    return _results(folder)


def measure_huse(
    folder: Path, run: Path, *, question: str = "", system: str = "", progress: Progress | None = None
) -> _Tree:
    """HUSE of the run's model from the ratings in the folder; adds it to both `human.json`.

    `question` is the rating of typicality (empty: the first question); `system` the name of the run in the sheets
    (empty: that of its folder).
    """
    (key, ratings), also = _opened(folder), _run_folder(run)
    _results(folder)
    if key.mode != "score":
        raise UserError(f"{folder}: HUSE needs scores of single texts; these sheets are of mode `{key.mode}`")
    names = [each.name for each in key.form.questions]
    if question and question not in names:
        raise UserError(f"{folder}: no question `{question}`; there are {', '.join(names)}")
    question, system = question or names[0], system or _system(key, run)
    for needed in (system, HUMAN):
        if needed not in key.systems:
            raise UserError(f"{folder}: no texts by `{needed}` in these sheets, only by {', '.join(key.systems)}")
    scores = rating_table(key, ratings, question)
    rated = [
        number
        for number, item in enumerate(key.items)
        if item.systems[0] in (system, HUMAN) and not np.isnan(scores.first_RI[:, number]).all()
    ]
    texts = [(key.prompts[key.items[number].prompt].prompt, key.items[number].texts[0]) for number in rated]
    likelihoods = log_probabilities(run, texts, progress=progress)
    # A text without a token has no log-probability per token.
    kept = [(number, *found) for number, found in zip(rated, likelihoods, strict=True) if found[1] > 0]
    if not kept:
        raise DataError(f"{folder}: no rated text by `{system}` or `{HUMAN}`; import filled sheets first")
    numbers = np.array([number for number, _, _ in kept])
    worst = min(kept, key=lambda each: each[1])
    if not math.isfinite(worst[1]):
        raise UserError(f"{run}: the model gives a text the log-probability {worst[1]}: it has diverged")
    measured = huse(
        np.nanmean(scores.first_RI[:, numbers], axis=0),
        np.array([value for _, value, _ in kept]),
        np.array([tokens for _, _, tokens in kept]),
        np.array([key.items[number].systems[0] == system for number in numbers]),
        prompts_N=scores.prompts_I[numbers],
    )
    found = {**dataclasses.asdict(measured), "question": question, "left_out": len(rated) - len(kept)}
    found["notes"] = _sampling_notes(run) if key.task == COMPLETIONS else []
    with locked(folder):
        results = read_human_results(folder)
        results["huse"] = {**results.get("huse", {}), system: found}
        write_human_results(folder, results, run=also)
    return {"system": system, **found}


def log_probabilities(
    run: Path, texts: Sequence[tuple[str, str]], *, progress: Progress | None = None
) -> list[tuple[float, int]]:
    """(log-probability in nats, tokens) of each continuation after its context, under the newest checkpoint."""
    with leased(run) as path, advise_on_damage(path):
        model, held_out = needs_torch("ropewalk.evaluate.model_folder", "HUSE").open_model(path)
        told = progress or Silent()
        told.begin("score", len(texts), "texts")
        asked = [number for number, (_, after) in enumerate(texts) if after]
        found = dict.fromkeys(range(len(texts)), (0.0, 0))
        for number, each in zip(
            asked, model.loglikelihood(held_out.texts.pairs([texts[n] for n in asked])), strict=True
        ):
            found[number] = each.log_probability, each.tokens
        told.end()
    return [*found.values()]


def _opened(folder: Path) -> tuple[SheetKey, Scores]:
    """The key and the ratings of a folder; DataError if they do not belong together."""
    key, scores = read_key(folder), read_ratings(folder)
    strange = {sheet for sheet, _, _ in scores} - {key.sheet_name(rater) for rater in key.sheets}
    if strange:
        raise DataError(
            f"{folder / KEY}: not the key of the ratings in {RATINGS}, which are of sheet {min(strange)}; restore the "
            "key that was exported with it"
        )
    return key, scores


def _results(folder: Path) -> _Tree:
    """The results; DataError if they are not of the key and the ratings beside them."""
    _opened(folder)
    results = read_human_results(folder)
    if results["ratings_checksum"] != ratings_checksum(folder):
        raise DataError(
            f"{folder / HUMAN_RESULTS}: not the results of {RATINGS} beside it; `ropewalk human import` the sheets "
            "again"
        )
    return results


def _system(key: SheetKey, run: Path) -> str:
    """The name of a run in the sheets."""
    return str(run) if str(run) in key.systems else run.resolve().name


def _sampling_notes(run: Path) -> list[str]:
    """How the run's completions were drawn, where that is not the distribution whose log-probabilities are used."""
    settings, notes = load_section(run, "evaluate", Evaluate), []
    if (settings.temperature, settings.top_k) != (1.0, 0):
        notes.append(
            f"completions were drawn at temperature {settings.temperature:g} and top-k {settings.top_k}, "
            "log-probabilities are those of the model itself; for HUSE by its definition set evaluate.temperature=1 "
            "evaluate.top_k=0"
        )
    measured, newest = read_results(run)["step"], read_checkpoint_manifest(resolve_checkpoint(run)).step
    if measured != newest:
        notes.append(f"completions are of step {measured}, log-probabilities of step {newest}; evaluate and rate again")
    return notes


def _earlier_huse(folder: Path, checksum: str) -> _Tree:
    """HUSE of an earlier command, if it is of the same ratings."""
    try:
        before = read_human_results(folder)
    except DataError:
        return {}
    return {"huse": before["huse"]} if "huse" in before and before.get("ratings_checksum") == checksum else {}


def _run_folder(run: Path | None) -> Path | None:
    if run is not None and not run.is_dir():
        raise DataError(f"{run}: there is no such run; name a run directory, such as runs/quickstart")
    return run
