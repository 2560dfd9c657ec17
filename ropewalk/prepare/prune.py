"""Stage results that a preparation does without: found by what it says it was made from, and deleted on request.

Nothing is deleted by itself. What is gone and needed again, by another recipe or by an older setting, is made again.

    prepared/stages/used/<hash>.json    the stage results that the data in prepared/<hash> was made from
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.seal import damaged, read_sealed, write_sealed

from .stages import alone, filled

USED = "used"
FORMAT = 2
SEALED_SINCE = 2
ALWAYS = ("checksums", USED)
"""What all preparations share: the sums of input files that were read, and these lists."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted, or would be."""

    files: int
    bytes: int
    kept_files: int
    kept_bytes: int


def write_used(stages: Path, name: str, used: Iterable[Path]) -> None:
    """Commits which results under `stages` the data with this name was made from."""
    names = sorted(path.relative_to(stages).as_posix() for path in used if path.is_relative_to(stages))
    target = stages / USED / f"{name}.json"
    with filled(target, sealed=False) as place:
        write_sealed(place, {"format": FORMAT, "data": name, "stages": names})


def prune(stages: Path, name: str, *, dry_run: bool = False) -> Pruned:
    """Deletes the results under `stages` that the data with this name was not made from; with `dry_run` counts them.

    Raises UserError when another process works there.
    """
    needed = {stages / used for used in _used(stages, name)}
    with alone(stages) as is_alone:
        if not is_alone:
            raise UserError(f"{stages}: another process prepares data there; prune when it has ended")
        kept: list[Path] = []
        gone: list[Path] = []
        for path in sorted(entry for stage in stages.iterdir() if stage.is_dir() for entry in stage.iterdir()):
            (kept if path in needed or path.parent.name in ALWAYS else gone).append(path)
        counted = Pruned(*_size(gone), *_size(kept))
        for path in [] if dry_run else gone:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    return counted


def _used(stages: Path, name: str) -> list[str]:
    path = stages / USED / f"{name}.json"
    remedy = f"to free the space, move {stages} away: all that it holds is made again when it is needed"
    if not path.exists():
        raise DataError(
            f"{path}: there is no list of what the data was made from, since an earlier version made it or its stages "
            f"were dropped; {remedy}"
        )
    what = "list of what the data was made from"
    upgrades = {1: lambda tree: {**tree, "data": name}}
    tree = read_sealed(path, what=what, remedy=remedy, current=FORMAT, sealed_since=SEALED_SINCE, upgrades=upgrades)
    if tree["data"] != name:
        raise damaged(path, what=what, remedy=remedy, why=f"it is the list of {tree['data']}")
    return [str(used) for used in tree["stages"]]


def _size(paths: Iterable[Path]) -> tuple[int, int]:
    """(files, their bytes) of files and folders."""
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    return len(files), sum(file.stat().st_size for file in files)
