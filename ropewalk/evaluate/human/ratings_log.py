"""`ratings.jsonl`: every rating that was imported, one line each, append-only.

A corrected sheet appends lines; the last one of a question about a line counts. Importing the same file twice appends
nothing. Each line ends with the CRC-32 of what precedes its last comma, so that an edit or a torn line is told.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DamagedFile
from ropewalk.base.files import committed_file, read_regular, storage

from .filled_sheets import FilledSheet

RATINGS = "ratings.jsonl"

Scores = dict[tuple[str, str, str], int]
"""Scores by sheet, id of the line, and question."""


def read_ratings(folder: Path) -> Scores:
    """The scores that count; DamagedFile if a line is not what was written."""
    return {(row["sheet"], row["id"], row["question"]): row["score"] for row in _rows(folder / RATINGS)}


def append_ratings(folder: Path, sheets: Iterable[FilledSheet]) -> tuple[int, int]:
    """Appends what is new; (ratings added, ratings changed)."""
    known = read_ratings(folder)
    lines: list[bytes] = []
    added = changed = 0
    for rating in (rating for sheet in sheets for rating in sheet.ratings):
        name = (rating.sheet, rating.id, rating.question)
        if known.get(name) == rating.score:
            continue
        added, changed = added + (name not in known), changed + (name in known)
        known[name] = rating.score
        file = Path(rating.file).name
        row = {"sheet": name[0], "id": name[1], "question": name[2], "score": rating.score, "file": file}
        lines.append(_line(row))
    path = folder / RATINGS
    if lines:
        before = read_regular(path) if path.exists() else b""
        with committed_file(path) as log:  # all of it or nothing, even if the machine stops
            log.write(before + b"".join(lines))
    return added, changed


def _line(row: dict[str, Any]) -> bytes:
    body = json.dumps(row, ensure_ascii=False).removesuffix("}").encode()
    return body + b', "crc": "%08x"}\n' % zlib.crc32(body)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with storage(f"reading {path}"):
        data = read_regular(path)
    rows = []
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        body, found, check = line.rpartition(b', "crc": ')
        if not found or check != b'"%08x"}\n' % zlib.crc32(body):
            raise DamagedFile(
                f"{path}:{number}: this rating is damaged: its bytes are not what ropewalk wrote (or it was edited by "
                "hand)",
                "delete the file and import the sheets again",
            )
        row: dict[str, Any] = json.loads(body + b"}")
        rows.append(row)
    return rows
