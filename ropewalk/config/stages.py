"""The records of a run's stages, `stages/STAGE.json`: what `flow` writes, and workers and `flow` read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ropewalk.base.seal import damaged, read_sealed

FORMAT = 2
SEALED_SINCE = 2
_KEYS = {"stage", "input", "seconds", "result"}
_WHAT = "record of a stage"
_REMEDY = "`ropewalk run` with the recipe writes it again and keeps the results of the stage"


def read_stage(run: Path, stage: str) -> dict[str, Any]:
    """`stage`, `input` (hash of all that it depends on), `seconds` and `result` (None when it has not ended).

    DamagedFile when the record is not what was written, DataError when there is none.
    """
    path = run / "stages" / f"{stage}.json"
    tree = read_sealed(
        path,
        what=_WHAT,
        remedy=_REMEDY,
        current=FORMAT,
        sealed_since=SEALED_SINCE,
        upgrades={1: lambda tree: tree},
    )
    tree.pop("format")
    if tree.keys() != _KEYS:
        raise damaged(path, what=_WHAT, remedy=_REMEDY, why=f"its keys are {', '.join(tree)}")
    if tree["stage"] != stage:
        raise damaged(path, what=_WHAT, remedy=_REMEDY, why=f"it is the record of {tree['stage']}")
    return tree
