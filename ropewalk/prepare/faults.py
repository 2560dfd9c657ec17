"""Input that could not be read, in words: what is wrong with it, and what to do.

Rules that judge a text that was read are not among these, nor what an archive or a crawl holds besides documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from .config import Source
from .sources import PYTHON_PROSE, PYTHON_SOURCES

MOST_NAMED = 5
"""Warnings of one preparation that name a file."""

_REST = ":rest"
_PLACE = r":(\d+([.-]\d+)?|rest)$"
"""What ends the id of a line, row or record, of several rows, and of the rest of a file."""

_KEY = "say with `text_key` of the source where it is"
_TURN = "write each turn as an object with `role` and `content`"
_ANSWER = "name the role of answers `assistant`, or read it as another `format`"
_LIMIT = "raise that setting of the source, or leave it out"
_PACK = "get or pack it again"
_AGAIN = "get or make the file again"

REASONS: dict[str, tuple[str, str]] = {
    "damaged": ("the file is damaged or cut off", _PACK),
    "checksum": ("its checksum is wrong: what it covers may be damaged and is left out, as is what follows", _PACK),
    "expansion": ("it unpacks to more than `limits.expansion` allows", _LIMIT),
    "too_nested": ("it lies in more archives than `limits.nesting` allows", _LIMIT),
    "encrypted": ("it is encrypted", "decrypt it first"),
    "unsupported_compression": ("it is compressed by an unknown method", "unpack it, or pack it by another"),
    "no_text_key": ("there is no text under the key `{key}`", _KEY),
    "text_not_string": ("what stands under the key `{key}` is no text", _KEY),
    "no_turns": ("there are no turns under `{key}`, `messages` or `conversations`", _KEY),
    "not_object": ("it is JSON but no object", "write each document as an object"),
    "turns_not_objects": ("its turns are no list of objects", _TURN),
    "no_answer": ("no turn is the assistant's, so nothing of it would be learned", _ANSWER),
    "turn_not_text": ("the role or the content of a turn is no text", _TURN),
    "not_json": ("it is not JSON", "correct it, or say with `format` of the source what the file is"),
    "not_utf8": ("it is not UTF-8", "convert it to UTF-8, from Latin-1 with `iconv -f LATIN1 -t UTF-8`"),
    "not_xml": ("it is not XML", _AGAIN),
    "not_pdf": ("it is not a PDF that can be read", _AGAIN),
    "not_epub": ("it is not an EPUB", _AGAIN),
    "missing_member": ("the book lacks a part that it names", _AGAIN),
    "entity_declaration": ("it declares XML entities, which may grow without end", "expand them first"),
    "unsafe_path": ("its name leads out of the archive", "pack it under another name"),
    "too_large": (
        "it is larger than `limits.document_bytes`",
        "raise that setting of the source, cut files of text with `split`, or leave it out",
    ),
    "too_slow": ("it takes longer than `limits.document_s`", _LIMIT),
    "too_much_memory": ("it takes more memory than `limits.memory_bytes`", _LIMIT),
    "too_deep": ("it is nested too deep", "flatten it, or leave it out"),
    "unknown_encoding": ("it names an encoding that is not known", "convert it to UTF-8"),
    "wrong_encoding": ("it is not in the encoding that it names", "convert it to UTF-8"),
    "not_http": ("it is no answer of a web server", _AGAIN),
    "binary": ("it holds NUL bytes, as UTF-16 and programs do", "convert it to UTF-8, or leave it out"),
}
"""What is wrong and what to do, by rule: what loses most comes first."""


def reason(rule: str, document_id: str, *, previous: str, source: Source) -> str:
    """Why a document could not be read, and the remedy; empty for other rules.

    `previous` is the document before it in the ledger: it tells what is lost when the rest of a file is.
    """
    if rule not in REASONS:
        return ""
    wrong, remedy = REASONS[rule]
    lost = "" if rule == "checksum" else _lost(document_id, previous)
    return f"{wrong.format(key=source.text_key)}{lost}; {remedy}"


def warnings(documents: pa.Table, sources: Sequence[Source]) -> Iterator[str]:
    """A line for each file and rule of what could not be read, at most MOST_NAMED, then how many more there are.

    `documents` has the columns `id`, `source` and `rule`, in the order of the ledger. Nobody can mend the built-in
    corpora, which hold a few files in other encodings: they are left out.
    """
    known = {source.name: source for source in sources if not _is_built_in(source)}
    faults = _by_file(documents, list(known))
    named = faults.slice(0, MOST_NAMED).to_pylist()
    for group in named:
        row, others = group["row_min"], group["row_count"] - 1
        document, name = documents["id"][row].as_py(), documents["source"][row].as_py()
        previous = documents["id"][row - 1].as_py() if row else ""
        told = reason(group["rule"], document, previous=previous, source=known[name])
        yield f"could not read {document}{f' and {others} more of this file' if others else ''}: {told}"
    left = (pc.sum(faults["row_count"]).as_py() or 0) - sum(group["row_count"] for group in named)
    if left:
        yield (
            f"could not read {left} more: `ropewalk prepare report` shows some for each rule, `ledger.parquet` has all"
        )


def rest_of(document_id: str) -> str:
    """The id of what could not be read of the file that `document_id` names, or in which it is a document."""
    return re.sub(_PLACE, "", document_id) + _REST


def _by_file(documents: pa.Table, sources: Sequence[str]) -> pa.Table:
    """`file`, `rule`, first row and number of rows of what could not be read, in the order of telling."""
    rules = pa.array(REASONS)
    bad = pc.and_(pc.is_in(documents["rule"], rules), pc.is_in(documents["source"], pa.array(sources, pa.string())))
    rows = pc.indices_nonzero(bad)
    found = documents.select(["id", "rule"]).take(rows)
    files = pc.replace_substring_regex(found["id"], _PLACE, "")
    table = pa.table({"file": files, "rule": found["rule"], "row": rows})
    groups = table.group_by(["file", "rule"]).aggregate([("row", "min"), ("row", "count")])
    return groups.append_column("order", pc.index_in(groups["rule"], rules)).sort_by(
        [("order", "ascending"), ("row_min", "ascending")]
    )


def _lost(document_id: str, previous: str) -> str:
    """What is lost of a file when `document_id` is its rest."""
    file = document_id.removesuffix(_REST)
    if file == document_id:
        return ""
    if not previous.startswith((f"{file}:", f"{file}!")):
        return ": nothing of it could be read"
    return f": what comes after its document {previous[len(file) + 1 :]} is lost"


def _is_built_in(source: Source) -> bool:
    return all(path in (PYTHON_SOURCES, PYTHON_PROSE) for path in source.paths)
