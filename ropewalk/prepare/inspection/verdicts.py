"""Whether the sources of a recipe give any documents: their settings, tried on the first records of some files.

It costs milliseconds a source and finds what hours of preparing would end in: a text key that no record has, a format
that does not fit, a file that is not what its name says. What is told has the keys that there are and the settings that
would fit.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ropewalk.base.errors import DataError
from ropewalk.base.progress import amount, counted

from .. import remote
from ..config import Prepare, Source
from ..formats import Reader
from ..readers.item import Fault
from ..readers.rows import dialogue, text
from ..sources import Found, expand
from .beginnings import Beginning, beginnings
from .content import TEXTS, WORDS, Content, content_of
from .looks import packing_trouble, records_in
from .records import Key, Record, Records, keys_of
from .shapes import Shape, shape_of
from .splits import LARGE_BYTES

_FILES, _FILES_OF_A_KIND = 12, 3
"""Of a path that are looked at, and of those with one ending."""
_BEGINNING_BYTES, _LONG_BEGINNING_BYTES = 1 << 16, 1 << 22
"""That are read of each; and when that is not a whole record."""
_RECORDS = 20
_TOLD_KEYS = 8
_TOLD_SHARE = 0.2
"""Share of records that cannot be read from which on it is told, though others can."""

_EXPECTED: dict[Reader, tuple[Content, ...]] = {
    "parquet": ("parquet",),
    "pdf": ("pdf",),
    "epub": ("zip",),
    "zip": ("zip",),
    "tar": ("tar",),
    "warc": ("warc",),
}
_FORMATS: dict[Content, str] = {
    "text": "text",
    "json lines": "jsonl",
    "json list": "jsonl",
    "parquet": "parquet",
    "html": "html",
    "latex": "latex",
    "pdf": "pdf",
    "warc": "warc",
}
"""The format that reads what was found, where there is one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a source, or worth knowing."""

    source: int
    """Its index."""
    key: str
    """The setting to change, of `[[prepare.sources]]`."""
    what: str
    remedy: str
    fatal: bool
    """Whether a path gives nothing because of it; else a remark."""


@dataclass(frozen=True, slots=True)
class _Wrong:
    """Why a file gives no documents."""

    key: str
    what: str
    """Follows the name of the file and a colon."""
    remedy: str


def findings(settings: Prepare, *, remotely: bool = False) -> list[Finding]:
    """What is wrong with the sources, as far as the first records of some files tell; those behind URLs are looked at
    only `remotely`."""
    found: list[Finding] = []
    for index, source in enumerate(settings.sources):
        for path in source.paths:
            if path.startswith("python:") or (remote.is_url(path) and not remotely):
                continue
            found += _of_path(index, path, source)
    return found


def _of_path(index: int, path: str, source: Source) -> Iterator[Finding]:
    files = expand(path, source).files
    chosen = _chosen(files)
    judged = [(file, _judged(file, source)) for file in chosen]
    wrong = [(file, each) for file, each in judged if isinstance(each, _Wrong)]
    fatal = len(wrong) == len(judged)
    for each, names in _together(wrong):
        others = f" and {counted(len(names) - 1, 'more file')} of those looked at" if len(names) > 1 else ""
        yield Finding(index, each.key, f"{names[0]}{others}: {each.what}", each.remedy, fatal)
    for file, remark in judged:
        if isinstance(remark, str) and remark:
            yield Finding(index, "paths", f"{file.location}: {remark}", "", False)


def _chosen(files: Sequence[Found]) -> list[Found]:
    """Some of each kind by name, from first to last."""
    kinds: dict[tuple[str, ...], list[Found]] = {}
    for file in files:
        kinds.setdefault((file.kind.reader or "", file.kind.packing, posixpath.splitext(file.name)[1]), []).append(file)
    chosen = [
        same[place]
        for same in kinds.values()
        for place in sorted({0, len(same) // 2, len(same) - 1})[:_FILES_OF_A_KIND]
    ]
    return chosen[:_FILES]


def _together(wrong: Iterable[tuple[Found, _Wrong]]) -> Iterator[tuple[_Wrong, list[str]]]:
    """The same thing of several files once."""
    names: dict[_Wrong, list[str]] = {}
    for file, each in wrong:
        names.setdefault(each, []).append(file.location)
    yield from names.items()


def _judged(file: Found, source: Source) -> _Wrong | str:
    """Why a file gives no documents; else a remark, empty where there is nothing to say."""
    try:
        first = next(beginnings(file.location, file.kind, source, most=_BEGINNING_BYTES))
        content = content_of(first.data, whole=first.whole)
        if content in ("json lines", "json list") and not records_in(first, content, most=_RECORDS):
            first = next(beginnings(file.location, file.kind, source, most=_LONG_BEGINNING_BYTES))
    except (OSError, DataError) as error:
        return _Wrong("paths", f"it cannot be read ({getattr(error, 'strerror', None) or error})", "repair it")
    if trouble := packing_trouble(first, content):
        return _Wrong("paths", *trouble)
    reader = first.kind.reader or "text"
    if reader in _EXPECTED and content not in _EXPECTED[reader]:
        return _unexpected(reader, content, source)
    if reader in ("zip", "tar") and not remote.is_url(file.location):
        return _Wrong("paths", "no file in it has an ending that is read", "unpack it, and name its files with a glob")
    if reader in ("jsonl", "json", "parquet"):
        return _judged_records(first, content, reader, source)
    if content not in TEXTS:
        return _unexpected(reader, content, source)
    if reader == "text" and source.format == "auto":
        return _hidden_records(first, content) or _size_remark(first, source)
    return _size_remark(first, source)


def _unexpected(reader: Reader, content: Content, source: Source) -> _Wrong:
    what = f"it is {WORDS[content]}"
    if content in ("utf-16", "not utf-8"):
        encoding = "UTF-16" if content == "utf-16" else "LATIN1"
        return _Wrong("paths", what, f"convert it to UTF-8, as with `iconv -f {encoding} -t UTF-8` from {encoding}")
    fit = _FORMATS.get(content, "")
    if fit and fit != source.format:
        return _Wrong(
            "format", f'{what}, which format "{_named(reader, source)}" does not read', f'set `format = "{fit}"`'
        )
    return _Wrong("paths", f"{what}, in which there is no text to read", "leave it out of `paths`")


def _named(reader: Reader, source: Source) -> str:
    """The format by which a file is read."""
    return source.format if source.format != "auto" else reader


def _judged_records(first: Beginning, content: Content, reader: Reader, source: Source) -> _Wrong | str:
    expected: tuple[Content, ...] = ("json lines", "json list", "json object") if reader != "parquet" else ("parquet",)
    if content not in expected:
        return _unexpected(reader, content, source)
    records = records_in(first, content, most=_RECORDS)
    if reader == "jsonl" and content != "json lines" and records and records.objects:
        name = posixpath.basename(posixpath.splitext(first.kind.name)[0]) + ".json"
        kept = "" if source.format in ("jsonl", "chat") else ' and set `format = "jsonl"`'
        return _Wrong("paths", f"it is {WORDS[content]}, not an object a line", f"rename it to {name}{kept}")
    if records is None or (content == "json object" and not records.objects):
        damaged = content == "parquet"
        what = "it is damaged" if damaged else "its first record is not JSON"
        return _Wrong(
            "paths", what, "get or make the file again" if damaged else 'correct it, or set `format = "text"`'
        )
    tried = records.records
    faults = [fault for record in tried if (fault := _fault(record, source))]
    if len(faults) < len(tried):
        return _some(faults, tried, source)
    return _explained(Counter(faults).most_common(1)[0][0], records, source)


def _fault(record: Record, source: Source) -> str:
    """Why a record gives no document, by the reader's own rules; empty when it does."""
    if record.fault:
        return record.fault
    try:
        if source.format == "chat":
            dialogue(record.value, key=source.text_key)
        else:
            text(record.value, source.text_key)
    except Fault as fault:
        return fault.rule
    return ""


def _some(faults: Sequence[str], tried: Sequence[Record], source: Source) -> str:
    if len(faults) < _TOLD_SHARE * len(tried):
        return ""
    where = f" under `{source.text_key}`" if source.format != "chat" else " that is a dialogue"
    return f"{len(faults)} of its first {len(tried)} records have no text{where}"


def _explained(rule: str, records: Records, source: Source) -> _Wrong:
    """Why none of the first records gives a document, with what there is instead."""
    objects = records.objects
    if not objects:
        broken = next((record for record in records.records if record.fault), None)
        what = f"line {broken.number} is not JSON" if broken else "its records are JSON but no objects"
        return _Wrong("format", what, 'set `format = "text"`, or write each document as an object')
    keys, shape = keys_of(objects), shape_of(objects)
    there = f"its records have {_listed(keys)}"
    if source.format == "chat":
        what = _CHAT_FAULTS.get(rule, "no dialogue is in them")
        return _Wrong("format" if shape.kind != "chat" else "text_key", f"{what}; {there}", _remedy(shape, source))
    kind = next((key.kind for key in keys if key.name == source.text_key), "")
    what = f"`{source.text_key}` is no text but {kind}" if kind else f'`text_key` is "{source.text_key}"'
    return _Wrong("text_key", f"{what}, and {there}" if kind else f"{what}, but {there}", _remedy(shape, source))


_CHAT_FAULTS = {
    "no_turns": "there is no dialogue under `text_key`, `messages` or `conversations`, and no question with its answer",
    "turns_not_objects": "its turns are no list of objects",
    "no_answer": "no turn is the assistant's",
    "turn_not_text": "the role or the content of a turn is no text",
}


def _remedy(shape: Shape, source: Source) -> str:
    """The settings that fit what was found."""
    key = f'`text_key = "{shape.text_keys[0]}"`' if shape.text_keys else ""
    if shape.kind == "chat":
        settings = [*(['`format = "chat"`'] if source.format != "chat" else []), *([key] if key else [])]
        return (
            f"set {' and '.join(settings)}: they are {shape.chat}"
            if settings
            else "name the role of answers `assistant`"
        )
    if shape.kind == "none":
        return "name the key that holds the text, or leave the file out of `paths`"
    settings = [*(['`format = "jsonl"`'] if source.format == "chat" else []), key]
    others = shape.text_keys[1:] if shape.kind == "parallel" else ()
    more = f"; {', '.join(f'`{other}`' for other in others)} in a source of its own" if others else ""
    return f"set {' and '.join(settings)}{more}"


def _listed(keys: Sequence[Key]) -> str:
    told = [key for key in keys if "." not in key.name] or list(keys)
    more = f" and {len(told) - _TOLD_KEYS} more" if len(told) > _TOLD_KEYS else ""
    return ", ".join(map(str, told[:_TOLD_KEYS])) + more


def _hidden_records(first: Beginning, content: Content) -> _Wrong | None:
    """Records in a file that its ending makes one text."""
    records = records_in(first, content, most=_RECORDS) if content in ("json lines", "json list") else None
    if records is None or len(records.objects) < 2:
        return None
    shape = shape_of(records.objects)
    if shape.kind == "none":
        return None
    what = f"it is {WORDS[content]}, and would be read as one text; its records have {_listed(shape.keys)}"
    fit = '`format = "chat"`' if shape.kind == "chat" else '`format = "jsonl"`'
    key = f' and `text_key = "{shape.text_keys[0]}"`' if shape.text_keys and shape.text_keys[0] != "text" else ""
    return _Wrong("format", what, f"set {fit}{key}, and name the file in `paths` rather than its folder")


def _size_remark(first: Beginning, source: Source) -> str:
    """That a large file will be a single document."""
    size = first.unpacked_size or 0
    if source.split != "none" or size <= LARGE_BYTES or first.kind.reader != "text":
        return ""
    return f"{amount(size, 'B')} will be one document; `split` cuts a file into documents (`ropewalk new` proposes how)"
