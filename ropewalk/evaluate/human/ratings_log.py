"""`ratings.jsonl`: every rating that was imported, one line each, sealed.

A corrected sheet appends lines; the last one of a question about a line of a sheet counts. Importing the same file
twice appends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ropewalk.base.files import committed_file, read_regular, storage
from ropewalk.base.seal import parse_sealed_lines, sealed_lines
from ropewalk.store.sealed import checksum_of

from .filled_sheets import FilledSheet

RATINGS = "ratings.jsonl"

Scores = dict[tuple[str, str, str], int]
"""Scores by sheet, id of the line, and question."""


_REMEDY = "delete it and import the sheets again"


def read_ratings(folder: Path) -> Scores:
    """The scores that count, none before the first import; DamagedFile if the file is not what was written."""
    return _scores(_rows(folder / RATINGS))


def ratings_checksum(folder: Path) -> str:
    """A checksum of the ratings, which their results carry."""
    return checksum_of(folder / RATINGS) if (folder / RATINGS).exists() else ""


def append_ratings(folder: Path, sheets: Iterable[FilledSheet]) -> tuple[int, int]:
    """Appends what is new; (ratings added, ratings changed)."""
    rows = _rows(folder / RATINGS)
    known = _scores(rows)
    added = changed = 0
    for rating in (rating for sheet in sheets for rating in sheet.ratings):
        name = (rating.sheet, rating.id, rating.question)
        if known.get(name) == rating.score:
            continue
        added, changed = added + (name not in known), changed + (name in known)
        known[name] = rating.score
        file = Path(rating.file).name
        rows.append({"sheet": name[0], "id": name[1], "question": name[2], "score": rating.score, "file": file})
    if added or changed or not (folder / RATINGS).exists():
        with committed_file(folder / RATINGS) as log:
            log.write(sealed_lines(rows))
    return added, changed


def _scores(rows: Iterable[dict[str, Any]]) -> Scores:
    return {(row["sheet"], row["id"], row["question"]): row["score"] for row in rows}


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with storage(f"reading {path}"):
        data = read_regular(path)
    rows: list[dict[str, Any]] = parse_sealed_lines(data, path=path, what="file of ratings", remedy=_REMEDY)
    return rows
