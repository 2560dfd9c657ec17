"""Reads sheets that raters have filled in, CSV or JSON, and checks every line against the key.

Incomplete sheets are welcome: what is blank or left out is counted as missing. Anything else that does not fit is an
error with file, line, value and remedy, and nothing of the file counts.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import ConfigError, DataError, Problem
from ropewalk.base.files import read_regular, storage

from .rating_form import COLUMNS, RatingQuestion
from .sheet_key import SheetKey

_LETTERS = {"A": -1, "B": 1, "=": 0}
"""What raters of pairs write in a CSV file."""
_DELIMITERS = ",;\t"
_MOST_TEXT = 1 << 24
"""Characters of a cell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenRating:
    """A rater's answer to one question about one line, as the sheet has it."""

    sheet: str
    id: str
    question: str
    score: int
    file: str
    line: int
    """Of the file, counted from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilledSheet:
    """What a file holds."""

    file: str
    sheet: str
    ratings: tuple[GivenRating, ...]
    comments: Mapping[str, str]
    """By the id of the line."""
    missing: int
    """Ratings that are blank or whose line is left out."""


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    cells: Mapping[str, Any]


def read_sheets(paths: Sequence[Path], key: SheetKey) -> list[FilledSheet]:
    """Reads the files; ConfigError lists everything wrong in all of them."""
    problems: list[Problem] = []
    sheets = [sheet for path in paths if (sheet := _read(path, key, problems))]
    problems += _contradictions(sheets)
    if problems:
        raise ConfigError(problems)
    return sheets


def _read(path: Path, key: SheetKey, problems: list[Problem]) -> FilledSheet | None:
    lines = _json_lines(path) if path.suffix.lower() == ".json" else _table_lines(path)
    if not lines:
        problems.append(Problem(str(path), "no line below the head", "give the file that the rater has filled in"))
        return None
    raters = {key.sheet_name(rater): rater for rater in key.sheets}
    names = {str(line.cells.get("sheet", "")).strip() for line in lines}
    if len(names) > 1 or not names <= raters.keys():
        wrong = ", ".join(sorted(names - raters.keys()) or sorted(names))
        what = f'sheet "{wrong}" is not of this export ({key.export}-r1 to {key.export}-r{len(key.sheets)})'
        if len(names) > 1:
            what = f"lines of different sheets ({', '.join(sorted(names))})"
        problems.append(Problem(str(path), what, "name the folder that the sheet was exported to, one sheet per file"))
        return None
    sheet = names.pop()
    known = {line.id for line in key.sheets[raters[sheet]]}
    questions = [question.name for question in key.form.questions]
    if path.suffix.lower() != ".json":
        _check_columns(path, list(lines[0].cells), questions)
    found: dict[str, int] = {}
    ratings: list[GivenRating] = []
    comments: dict[str, str] = {}
    for line in lines:
        identity = str(line.cells.get("id", "")).strip()
        where = f"{path}:{line.number}"
        if identity not in known:
            what = f'there is no item "{identity}" in sheet {sheet}'
            problems.append(Problem(where, what, "the id was edited; restore it from the exported sheet"))
        elif identity in found:
            what = f'item "{identity}" occurs again, first in line {found[identity]}'
            problems.append(Problem(where, what, "delete one of the two lines"))
        else:
            found[identity] = line.number
            if strange := sorted(line.cells.keys() - {*COLUMNS, *questions, ""}):
                what = f"there is no question `{strange[0]}`"
                problems.append(Problem(where, what, f"the questions are {', '.join(questions)}"))
            if comment := str(line.cells.get("comment") or "").strip():
                comments[identity] = comment
            for question in key.form.questions:
                score = _score(line.cells.get(question.name), question, key, where, problems)
                if score is not None:
                    ratings.append(
                        GivenRating(
                            sheet=sheet,
                            id=identity,
                            question=question.name,
                            score=score,
                            file=str(path),
                            line=line.number,
                        )
                    )
    missing = len(known) * len(key.form.questions) - len(ratings)
    return FilledSheet(file=str(path), sheet=sheet, ratings=tuple(ratings), comments=comments, missing=missing)


def _score(value: Any, question: RatingQuestion, key: SheetKey, where: str, problems: list[Problem]) -> int | None:
    """The score of a cell; None if it is blank or wrong."""
    text = "" if value is None else str(value).strip()
    if not text:
        return None
    pairs = key.mode == "pairwise"
    try:
        number = _LETTERS[text.upper()] if pairs and text.upper() in _LETTERS else float(text)
    except ValueError:
        number = float("nan")
    if number in question.values:
        return int(number)
    allowed = "A, B or =" if pairs else f"a whole number from {question.least} to {question.most}"
    problems.append(Problem(where, f'{question.name} is "{text}"', f"write {allowed}, or leave it blank"))
    return None


def _contradictions(sheets: Iterable[FilledSheet]) -> Iterator[Problem]:
    """Different scores for the same line in two files of one call."""
    seen: dict[tuple[str, str, str], GivenRating] = {}
    for rating in (rating for sheet in sheets for rating in sheet.ratings):
        first = seen.setdefault((rating.sheet, rating.id, rating.question), rating)
        if first.score != rating.score:
            what = f'{rating.question} of "{rating.id}" is {rating.score}, but {first.score} in {first.file}'
            yield Problem(f"{rating.file}:{rating.line}", what, "give only the file that holds")


def _text(path: Path) -> str:
    try:
        with storage(f"reading {path}"):
            return read_regular(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; name the sheets that raters have sent back") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8; save it as `CSV UTF-8`") from None


def _table_lines(path: Path) -> list[_Line]:
    text = _text(path)
    head = text.partition("\n")[0]
    delimiter = max(_DELIMITERS, key=head.count)
    before = csv.field_size_limit(_MOST_TEXT)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        rows: list[tuple[int, list[str]]] = []
        begin = 1
        for row in reader:
            rows.append((begin, row))  # a cell may span lines: the first one is named
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}:{begin}: no table of comma-separated values: {error}; save it as CSV again") from None
    finally:
        csv.field_size_limit(before)
    names = [name.strip() for name in rows[0][1]] if rows else []
    for name in ("sheet", "id", *names):
        if names.count(name) != 1 and name:
            found = "there twice" if name in names else "not there"
            raise DataError(f"{path}:1: column `{name}` is {found}; keep the head of the exported sheet")
    return [
        _Line(number, _cells(path, number, names, row)) for number, row in rows[1:] if any(cell.strip() for cell in row)
    ]


def _check_columns(path: Path, names: list[str], questions: list[str]) -> None:
    asked = f"keep the head of the exported sheet (questions: {', '.join(questions)})"
    if not set(names) & set(questions):
        raise DataError(f"{path}:1: no column of a question; {asked}")
    for name in names:
        if name and name not in (*COLUMNS, *questions):
            raise DataError(f"{path}:1: column `{name}` is unknown; {asked}")


def _cells(path: Path, number: int, names: list[str], row: list[str]) -> dict[str, str]:
    if any(cell.strip() for cell in row[len(names) :]):
        raise DataError(f"{path}:{number}: {len(row)} cells for {len(names)} columns; quote cells with commas")
    return dict(zip(names, row, strict=False))


def _json_lines(path: Path) -> list[_Line]:
    """The ratings in the order of the file; the number of a line is that of the rating."""
    text = _text(path)
    try:
        tree = json.loads(text)
        rows = [
            {"sheet": tree["sheet"], "id": row["id"], "comment": row.get("comment", ""), **row["scores"]}
            for row in tree["ratings"]
        ]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path}: not a sheet saved by the page (sheet-….html); save it there again") from None
    return [_Line(number, row) for number, row in enumerate(rows, start=1)]
