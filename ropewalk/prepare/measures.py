"""What is made and measured of every text before anything is decided: corrections, statistics, the hash."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ropewalk.base.errors import DataError
from ropewalk.base.files import read_regular

from . import statistics
from .columns import overlaid, text_buffers
from .config import Filter
from .documents import EDITS, Edits
from .language import identify, language_id
from .lines import Corrected, correct
from .lists import list_files, match, read_lists
from .texts import layer_batch

HASH = pa.field("hash", pa.binary(16))
"""xxh3-128 of the text."""
CORRECTIONS = pa.field("edits", EDITS)

_THRESHOLDS = frozenset(
    {
        *("lorem_ipsum", "curly_brackets", "min_sentences", "min_long_lines"),
        *("max_flagged_word_share", "max_soft_words"),
    }
)
"""Settings beside corrections and lists that remove documents and change neither text nor statistics."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A batch of documents after corrections."""

    layer: pa.RecordBatch
    """The texts that changed (`texts.LAYER`)."""
    columns: pa.RecordBatch
    """One row a document: `hash`, `edits` (the corrections), and every statistic."""


def correcting(settings: Filter) -> dict[str, Any] | None:
    """What the corrected texts depend on, as plain values; None when nothing is corrected."""
    tables = {"c4": settings.c4, "refinedweb": settings.refinedweb}
    found = {name: _without_thresholds(table) for name, table in tables.items() if table is not None}
    return found or None


def measuring(settings: Filter) -> dict[str, Any]:
    """What the statistics of a text depend on, as plain values: thresholds are not among it."""
    urls, words = settings.urls, settings.words
    return {
        "stop_words": stop_words(settings),
        "language": language_id() if settings.language else None,
        "urls": [_without_thresholds(urls), list_digests(dataclasses.replace(settings, words=None))] if urls else None,
        "words": list_digests(dataclasses.replace(settings, urls=None)) if words else None,
    }


def list_digests(settings: Filter) -> list[str]:
    """Hashes of the list files that the settings name, which decide as much as their names."""
    try:
        return [xxhash.xxh3_128_hexdigest(read_regular(Path(name))) for name in list_files(settings)]
    except OSError as error:
        raise DataError(
            f"{error.filename}: {error.strerror}; write the list, or correct its name in the recipe"
        ) from None


def covers(measured: Filter, asked: Filter) -> bool:
    """Whether what was measured for the settings `measured` is all that the rules of `asked` need."""
    known, needed = measuring(measured), measuring(asked)
    if asked.gopher is None:
        del needed["stop_words"]
    return correcting(measured) == correcting(asked) and all(
        value is None or value == known[name] for name, value in needed.items()
    )


def measure(documents: pa.RecordBatch, settings: Filter, *, uncut: frozenset[str] = frozenset()) -> Measured:
    """What is made of a batch with the columns `source`, `url` and `text`.

    Texts of the sources `uncut` are not corrected.
    """
    text, edits = documents["text"], Edits.joined([])
    words = pa.record_batch([np.zeros(len(text), np.int64)] * 2, names=["original_words", "flagged_words"])
    changed = np.zeros(len(text), bool)
    if correcting(settings) is not None:
        spared = np.asarray(pc.is_in(documents["source"], pa.array(sorted(uncut), pa.string())))
        found = correct(pc.if_else(pa.array(spared), "", text), settings)
        edits, words = _edits(found), found.columns
        changed[edits.rows] = True
        text = overlaid(text, np.flatnonzero(changed), found.text.filter(pa.array(changed)))
    found_columns = [statistics.measure(text, stop_words=stop_words(settings)), words]
    if settings.language:
        found_columns.append(identify(text))
    if settings.urls or settings.words:
        urls = documents["url"].cast(pa.large_string())
        found_columns.append(match(read_lists(settings), text=text, urls=urls))
    columns = [
        text_hashes(text),
        edits.column(len(text)),
        *(column for part in found_columns for column in part.columns),
    ]
    schema = pa.schema([HASH, CORRECTIONS, *(field for part in found_columns for field in part.schema)])
    return Measured(layer_batch(text, changed), pa.record_batch(columns, schema=schema))


def stop_words(settings: Filter) -> tuple[str, ...]:
    """The words that are counted as stop words."""
    return settings.gopher.stop_words if settings.gopher else statistics.ENGLISH


def text_hashes(text: pa.LargeStringArray) -> pa.FixedSizeBinaryArray:
    """The xxh3-128 of each text. 0.3 us a document beside the hashing itself (measured)."""
    data, offsets = text_buffers(text)
    view = memoryview(data)  # type: ignore[arg-type] # numpy's stubs do not know its buffers
    digests = [xxhash.xxh3_128_digest(view[start:end]) for start, end in itertools.pairwise(offsets.tolist())]
    return pa.FixedSizeBinaryArray.from_buffers(HASH.type, len(text), [None, pa.py_buffer(b"".join(digests))])


def _edits(found: Corrected) -> Edits:
    """What every rule took, by document and then in the order of rules."""
    rules, rows = np.nonzero(found.units)
    names = np.array(found.rules, object)
    return Edits.joined([Edits(rows, names[rules], found.removed_bytes[rules, rows])])


def _without_thresholds(table: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(table).items() if name not in _THRESHOLDS}
