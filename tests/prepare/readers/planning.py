"""A file as prepare plans to read it."""

from __future__ import annotations

from pathlib import Path

from ropewalk.prepare.config import Prepare, Source
from ropewalk.prepare.sources import InputFile, collect_files


def planned(path: str | Path, **settings: object) -> InputFile:
    """The file at `path`, as the only one of the source `s`."""
    source = Source(name="s", paths=(str(path),), **settings)
    return collect_files(Prepare(sources=(source,))).files[0]
