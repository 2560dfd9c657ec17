"""Raw bytes -> text: UTF-8, one kind of line end, no byte order mark. What is not text is removed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .columns import Mask, Rows, overlaid, text_buffers
from .documents import Edits

STAGE = "normalise"

_MARK = b"\xef\xbb\xbf"
_NUL, _RETURN = 0, 13


@dataclass(frozen=True, slots=True)
class Normalised:
    """A column of texts, empty where there is none; the rule that says why, null for a text; what was changed."""

    text: pa.LargeStringArray
    rule: pa.StringArray
    edits: Edits


def normalise(raw: pa.LargeBinaryArray) -> Normalised:
    """The texts in a column of raw bytes without nulls."""
    raw, marked = _without(raw, _MARK, "byte_order_mark", np.asarray(pc.starts_with(raw, pattern=_MARK)))
    binary = _holding(raw, _NUL)
    invalid = ~binary & _not_utf8(raw)
    raw = _emptied(raw, binary | invalid)
    raw, returned = _with_newlines(raw)
    text = raw.view(pa.large_string())
    empty = np.asarray(pc.utf8_is_space(text)) | (np.asarray(pc.binary_length(text)) == 0)
    rule = np.full(len(raw), None, object)
    for name, mask in (("empty", empty), ("not_utf8", invalid), ("binary", binary)):
        rule[mask] = name
    gone = empty | invalid | binary
    edits = Edits.joined([marked, returned])
    stays = ~gone[edits.rows]
    kept = Edits(edits.rows[stays], edits.rules[stays], edits.removed_bytes[stays])
    return Normalised(_emptied(text, gone), pa.array(rule, pa.string()), kept)


def _with_newlines(raw: pa.LargeBinaryArray) -> tuple[pa.LargeBinaryArray, Edits]:
    rows = np.flatnonzero(_holding(raw, _RETURN))
    before = raw.take(pa.array(rows))
    after = pc.replace_substring(pc.replace_substring(before, "\r\n", "\n"), "\r", "\n")
    return _replaced(raw, rows, before, after, "newlines")


def _without(raw: pa.LargeBinaryArray, start: bytes, rule: str, where: Mask) -> tuple[pa.LargeBinaryArray, Edits]:
    rows = np.flatnonzero(where)
    before = raw.take(pa.array(rows))
    return _replaced(raw, rows, before, pc.replace_substring(before, start, "", max_replacements=1), rule)


def _replaced(
    raw: pa.LargeBinaryArray,
    rows: Rows,
    before: pa.LargeBinaryArray,
    after: pa.LargeBinaryArray,
    rule: str,
) -> tuple[pa.LargeBinaryArray, Edits]:
    if not len(rows):
        return raw, Edits.of(rows, rule, rows)
    shrunk = np.asarray(pc.subtract(pc.binary_length(before), pc.binary_length(after)))
    return overlaid(raw, rows, after), Edits.of(rows, rule, shrunk)


def _emptied(column: pa.Array, where: Mask) -> pa.Array:
    rows = np.flatnonzero(where)
    return overlaid(column, rows, pa.array([b""] * len(rows), column.type))


def _holding(raw: pa.LargeBinaryArray, byte: int) -> Mask:
    """Which values hold `byte`. Most batches hold it nowhere, which a look at the whole buffer tells."""
    data, offsets = text_buffers(raw)
    places = np.flatnonzero(data[offsets[0] : offsets[-1]] == byte) + offsets[0]
    found = np.zeros(len(raw), bool)
    found[np.searchsorted(offsets, places, side="right") - 1] = True
    return found


def _not_utf8(raw: pa.LargeBinaryArray) -> Mask:
    """Which values are not UTF-8. Arrow checks a batch at 20 GB/s (measured); only one that fails is looked into."""
    try:
        raw.cast(pa.large_string())
    except pa.ArrowInvalid:
        return np.array([not _decodes(value) for value in raw.to_pylist()])
    return np.zeros(len(raw), bool)


def _decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
