"""`key.json`: what every line of every sheet is. It stays with whoever runs the study; raters never see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import xxhash

from ropewalk.base.errors import DataError
from ropewalk.base.seal import read_sealed, write_sealed

from .assignment import RatedItem, SheetLine
from .candidates import PromptTexts
from .rating_form import Mode, RatingForm, RatingQuestion

FORMAT = 1
KEY = "key.json"
_REMEDY = "restore it from a copy; without it nothing tells what was rated"


@dataclass(frozen=True, kw_only=True, slots=True)
class SheetKey:
    """One export: form, items and sheets."""

    mode: Mode
    seed: int
    task: str
    runs: tuple[str, ...]
    """Paths of the runs as they were given."""
    form: RatingForm
    prompts: tuple[PromptTexts, ...]
    items: tuple[RatedItem, ...]
    sheets: dict[str, list[SheetLine]]
    """By rater."""

    @property
    def systems(self) -> list[str]:
        """The systems whose texts are rated."""
        return sorted({system for item in self.items for system in item.systems})

    @property
    def export(self) -> str:
        """A hash that all sheets of this export carry, so that those of another one are told apart."""
        return xxhash.xxh3_64_hexdigest(orjson.dumps(_tree(self)))[:8]

    def sheet_name(self, rater: str) -> str:
        """What stands in every line of a rater's sheet."""
        return f"{self.export}-{rater}"


def write_key(folder: Path, key: SheetKey) -> None:
    """Commits `key.json`, sealed."""
    write_sealed(folder / KEY, {"format": FORMAT, "export": key.export, **_tree(key)})


def read_key(folder: Path) -> SheetKey:
    """Reads `key.json`; DamagedFile if it is not what was written."""
    if not (folder / KEY).exists():
        raise DataError(f"{folder}: no {KEY}; name a folder that `ropewalk human export` wrote")
    tree = read_sealed(folder / KEY, what="key of sheets", remedy=_REMEDY, current=FORMAT, sealed_since=1)
    form = tree["form"]
    return SheetKey(
        mode=tree["mode"],
        seed=tree["seed"],
        task=tree["task"],
        runs=tuple(tree["runs"]),
        form=RatingForm(**{**form, "questions": tuple(RatingQuestion(**each) for each in form["questions"])}),
        prompts=tuple(_prompts(tree["prompts"])),
        items=tuple(
            RatedItem(prompt=item["prompt"], systems=tuple(item["systems"]), texts=tuple(item["texts"]))
            for item in tree["items"]
        ),
        sheets={rater: [SheetLine(**line) for line in lines] for rater, lines in tree["sheets"].items()},
    )


def _tree(key: SheetKey) -> dict[str, Any]:
    tree = dataclasses.asdict(key)
    # Texts stand with the items.
    tree["prompts"] = [{name: value for name, value in each.items() if name != "texts"} for each in tree["prompts"]]
    return tree


def _prompts(rows: Sequence[dict[str, Any]]) -> list[PromptTexts]:
    return [PromptTexts(**row, texts={}) for row in rows]
