"""Texts that people may rate: completions in `samples.jsonl` of runs, and answers in `evaluation/items.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.files import read_regular, storage
from ropewalk.base.seal import parse_sealed_lines

from ..results import read_samples

HUMAN = "human"
"""The system of texts written by people."""
COMPLETIONS = "completions"
"""The task whose answers are in `samples.jsonl`."""
ITEMS = "evaluation/items.jsonl"
_MEASURE = "`ropewalk evaluate` with the run measures again"
_NEWER = (
    "completions of earlier versions have no `reference`; evaluate again with another number of `evaluate.samples`, or "
    "leave the human text out with --no-human"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTexts:
    """A prompt and what follows it, by system."""

    prompt: str
    domain: str
    source: str
    texts: dict[str, str]


def candidates(runs: Sequence[Path], *, task: str, human: Literal["auto", "yes", "no"]) -> list[PromptTexts]:
    """The prompts that the runs have completed, each with the texts of the runs and of the human author.

    `task` is `completions`, or a task of `evaluation/items.jsonl`. Human texts are the documents' true continuations
    and the references of items; `auto` takes them where there are some.
    """
    names = _names(runs)
    found: dict[str, PromptTexts] = {}
    for run, name in zip(runs, names, strict=True):
        for row in _rows(run, task):
            prompt, text, reference = (_whole(row[part]) for part in ("prompt", "text", "reference"))
            new = PromptTexts(prompt=prompt, domain=row.get("domain", ""), source=row.get("source", ""), texts={})
            entry = found.setdefault(prompt, new)
            # A short domain is gone through again: the first completion counts.
            entry.texts.setdefault(name, text)
            if human != "no" and reference:
                entry.texts.setdefault(HUMAN, reference)
    if human == "yes" and not any(HUMAN in entry.texts for entry in found.values()):
        raise DataError(f"{runs[0]}: no text by people; {_NEWER}")
    return list(found.values())


def _whole(text: str) -> str:
    """Without characters at its ends of which a token boundary left a part: only the human author completes those of
    the prompt."""
    return text.strip("\ufffd")


def _names(runs: Sequence[Path]) -> list[str]:
    """Names of systems: the folder's, or the whole path where two are the same."""
    names = [run.resolve().name for run in runs]
    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError("a run is named twice; name each once")
    names = [str(run) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]
    if HUMAN in names:
        raise UserError(f"a run is called `{HUMAN}`, which is the name of texts by people; rename its folder")
    return names


def _rows(run: Path, task: str) -> list[dict[str, Any]]:
    if not run.is_dir():
        raise DataError(f"{run}: there is no such run; name a run directory, such as runs/quickstart")
    if task == COMPLETIONS:
        rows = [
            {**row, "text": row["completion"], "reference": row.get("reference") or ""} for row in read_samples(run)
        ]
    else:
        items = _items(run)
        tasks = sorted({item["task"] for item in items})
        rows = [{**item, "text": item["prediction"]} for item in items if item["task"] == task]
        if not rows:
            raise UserError(f"{run}: no answers to a task `{task}`; it has {', '.join([COMPLETIONS, *tasks])}")
    if not rows:
        raise DataError(f"{run}: no completions; set `evaluate.samples` above 0, then {_MEASURE}")
    return rows


def _items(run: Path) -> list[dict[str, Any]]:
    path = run / ITEMS
    try:
        with storage(f"reading {path}"):
            data = read_regular(path)
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file of answers; {_MEASURE}. Without --task the completions in samples.jsonl are rated"
        ) from None
    items: list[dict[str, Any]] = parse_sealed_lines(data, path=path, what="file of answers", remedy=_MEASURE)
    return items
