"""Which reader takes a file, by its ending and the format of its source."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from .config import Source

Reader = Literal[
    "text",
    "jsonl",
    "json",
    "parquet",
    "html",
    "latex",
    "jats",
    "xml",
    "pdf",
    "epub",
    "warc",
    "zip",
    "tar",
    "docstrings",
    "topics",
]
"""`json` is a list of records; `xml` is JATS where the root says so, text where it does not; `docstrings` and
`topics` belong to the built-in corpora."""

Packing = Literal["", "gzip", "zstd", "bz2"]


class Kind(NamedTuple):
    """How to read a file: first unpack it, then read what is inside."""

    packing: Packing
    reader: Reader | None
    """None for an ending that the source does not take when it meets the file in a folder or an archive."""
    name: str
    """Without the ending of the packing."""


ONE_DOCUMENT: frozenset[Reader] = frozenset({"text", "html", "latex", "jats", "xml", "pdf", "epub", "docstrings"})
"""Readers that take a file as one document; of the others, the rest of a file may be damaged."""


SPLIT: frozenset[Reader] = ONE_DOCUMENT - {"docstrings"}
"""Readers whose text `split` of the source cuts into documents."""


def kind_of(name: str, source: Source) -> Kind:
    """How `source` reads a file of this name when it meets it in a folder or an archive."""
    inner, packing = _unpacked(name)
    return Kind(packing, _reader(_ending(inner), source), inner)


def named_kind(name: str, source: Source) -> Kind:
    """How `source` reads a file that its paths name: one with an unknown ending is of the source's format, or text."""
    kind = kind_of(name, source)
    return kind._replace(reader=kind.reader or _default(source))


def _unpacked(name: str) -> tuple[str, Packing]:
    lower = name.lower()
    for ending, (packing, inner) in _PACKINGS.items():
        if lower.endswith(ending):
            return name[: -len(ending)] + inner, packing
    return name, ""


def _ending(name: str) -> str:
    found = re.search(r"\.([^./]+)$", name)
    return found[1].lower() if found else ""


def _reader(ending: str, source: Source) -> Reader | None:
    if ending in _ARCHIVES:
        return _ARCHIVES[ending]
    if source.format == "auto":
        return _ENDINGS.get(ending)
    if source.format == "text":
        return "text"
    if source.format == "chat":
        return _DIALOGUES.get(ending)
    if source.format == "jsonl" and ending == "json":
        return "json"
    takes = _ENDINGS.get(ending)
    return source.format if takes == source.format or (takes, source.format) in _ALSO else None


def _default(source: Source) -> Reader:
    if source.format == "auto":
        return "text"
    return "jsonl" if source.format == "chat" else source.format


_PACKINGS: dict[str, tuple[Packing, str]] = {
    ".gz": ("gzip", ""),
    ".tgz": ("gzip", ".tar"),
    ".zst": ("zstd", ""),
    ".bz2": ("bz2", ""),
}
_ARCHIVES: dict[str, Reader] = {"zip": "zip", "tar": "tar"}
_DIALOGUES: dict[str, Reader] = {"jsonl": "jsonl", "ndjson": "jsonl", "json": "json", "parquet": "parquet"}
_ALSO = {("xml", "jats")}
"""(reader of an ending in `auto`, format that takes it too)."""

_TEXT = (
    "txt text md markdown rst adoc org csv tsv log json toml yaml yml ini cfg sql",
    "py pyi c h cc cpp cxx hpp cu java kt scala js jsx ts tsx go rs rb php swift m jl r lua pl hs ml",
    "ex erl clj lisp sh bash ps1 bat css scss proto cmake mk v sv vhd f90 f asm s",
)
_OTHERS: dict[Reader, str] = {
    "jsonl": "jsonl ndjson",
    "parquet": "parquet",
    "html": "html htm xhtml",
    "latex": "tex latex",
    "jats": "nxml jats",
    "xml": "xml",
    "pdf": "pdf",
    "epub": "epub",
    "warc": "warc wet",
}
_ENDINGS: dict[str, Reader] = {
    **{ending: "text" for line in _TEXT for ending in line.split()},
    **{ending: reader for reader, endings in _OTHERS.items() for ending in endings.split()},
}
