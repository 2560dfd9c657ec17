"""The first records of a file: lines, items of a list, rows; and what stands under their keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..readers.item import Fault
from ..readers.rows import parsed

MOST_KEYS = 40
_PAGE = re.compile(r"\s*(<!doctype|<html|<\?xml)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Record:
    """One record, or what is no JSON in its place."""

    number: int
    """Of its line, item or row, from 1."""
    value: Any = None
    fault: str = ""
    raw: bytes = b""
    """Its line; empty for items and rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The first records of a file."""

    records: tuple[Record, ...]
    bytes: int
    """That they take in the file, as text."""
    total: int | None = None
    """Records of the whole file, where its format tells."""

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The records that are objects."""
        return [record.value for record in self.records if isinstance(record.value, dict)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What stands under one key; dots lead into nested objects."""

    name: str
    kind: str
    """`text`, `number`, `true or false`, `list of turns`, `list`, `object`, `bytes`, `null`."""
    share: float
    """Of the records that have it."""
    characters: float
    """Mean length of its texts."""
    markup: bool = False
    """Whether these are pages of HTML."""

    def __str__(self) -> str:
        size = f", about {self.characters:.0f} characters" if self.kind == "text" else ""
        return f"`{self.name}` ({self.kind}{size})"


def records_of_lines(data: bytes, *, whole: bool, most: int) -> Records:
    """The objects of JSON lines; a last line that is cut off is left out."""
    found: list[Record] = []
    size = place = 0
    number = 0
    while place < len(data) and len(found) < most:
        end = data.find(b"\n", place)
        if end < 0 and not whole:
            break
        line = data[place : end if end >= 0 else len(data)]
        place = end + 1 if end >= 0 else len(data)
        size, number = place, number + 1
        if line.strip():
            found.append(_of_line(number, line))
    return Records(records=tuple(found), bytes=size)


def records_of_items(text: str, *, whole: bool, most: int) -> Records:
    """The items of a JSON list, or of objects that stand one after the other."""
    scan = json.JSONDecoder().raw_decode
    place = _after_space(text, 0)
    if text[place : place + 1] == "[":
        place += 1
    found: list[Record] = []
    while len(found) < most:
        place = _after_space(text, place)
        try:
            value, end = scan(text, place)
        except (ValueError, RecursionError):
            if whole and text[place : place + 1] not in ("]", ""):
                found.append(Record(len(found) + 1, fault="not_json"))
            break
        found.append(Record(len(found) + 1, value))
        place = end
    return Records(records=tuple(found), bytes=len(text[:place].encode("utf-8", "surrogatepass")))


def records_of_parquet(stream: Any, *, most: int) -> Records:
    """The first rows of a Parquet file; Fault when it is damaged. A file whose rows are too large to look at gives one
    record of nulls under the names of its columns."""
    from ..readers.parquet import first_rows  # brings pyarrow along

    rows, total = first_rows(stream, most=most)
    return Records(records=tuple(Record(n, row) for n, row in enumerate(rows, 1)), bytes=0, total=total)


def keys_of(objects: Sequence[dict[str, Any]]) -> list[Key]:
    """The keys of these records, those of nested objects too, in the order of the first record."""
    texts: dict[str, list[int]] = {}
    pages: dict[str, int] = {}
    kinds: dict[str, str] = {}
    counts: dict[str, int] = {}
    for value in objects:
        for name, inner in _flat(value):
            counts[name] = counts.get(name, 0) + 1
            kind = kind_of_value(inner)
            if kinds.get(name, "null") == "null":
                kinds[name] = kind
            if kind == "text":
                texts.setdefault(name, []).append(len(inner))
                pages[name] = pages.get(name, 0) + bool(_PAGE.match(inner, 0, 1000))
    return [
        Key(
            name=name,
            kind="text" if name in texts and 2 * len(texts[name]) >= counts[name] else kinds[name],
            share=counts[name] / len(objects),
            characters=sum(texts.get(name, ())) / max(1, len(texts.get(name, ()))),
            markup=2 * pages.get(name, 0) > counts[name],
        )
        for name in list(counts)[:MOST_KEYS]
    ]


def kind_of_value(value: Any) -> str:
    """What a value is, in the words of `Key.kind`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, dict):
        return "object"
    if isinstance(value, bytes):
        return "bytes"
    return "list of turns" if is_turns(value) else "list"


def is_turns(value: Any) -> bool:
    """Whether a list holds the turns of a dialogue."""
    if not isinstance(value, list) or not value:
        return False
    first = value[0]
    return (
        isinstance(first, dict) and bool({"role", "from"} & first.keys()) and bool({"content", "value"} & first.keys())
    )


def _flat(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        yield name, inner
        if isinstance(inner, dict):
            yield from ((f"{name}.{key}", each) for key, each in inner.items() if not isinstance(each, dict))


def _of_line(number: int, line: bytes) -> Record:
    try:
        return Record(number, parsed(line), raw=line)
    except Fault as fault:
        return Record(number, fault=fault.rule, raw=line)


def _after_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n,":
        place += 1
    return place
