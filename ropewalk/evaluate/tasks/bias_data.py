"""Where the data of bias tasks lie."""

from __future__ import annotations

from pathlib import Path

from ropewalk.base.errors import DataError


def bias_file(folder: str, name: str, task: str) -> Path:
    """The file of this name in the folder, or in one beneath it."""
    if not folder:
        raise DataError(f"task `{task}` reads {name}; set `evaluate.bias_folder` to the folder that has it")
    found = sorted(Path(folder).rglob(name))
    if not found:
        raise DataError(f"{folder}: no {name} in it, which task `{task}` reads; see `evaluate.bias_folder`")
    return found[0]
