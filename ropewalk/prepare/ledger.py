"""The ledger: one row a document that says what became of it; beside it, row for row, what was measured of each."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ropewalk.base.errors import DataError
from ropewalk.base.files import committed_file
from ropewalk.store.manifest import Manifest, check_table, read_manifest
from ropewalk.store.shards import Shard, document_key

from .config import Source
from .corpus import Corpus
from .documents import EDITS
from .fates import Fates
from .faults import reason, rest_of
from .holdout import Parts, part_id
from .stages import read_table

FILE = "ledger.parquet"
STATISTICS = "statistics.parquet"

PARTS = pa.list_(pa.struct([("split", pa.string()), ("start", pa.int64()), ("stop", pa.int64())]))
"""What is trained on and held out of one document, in order: bytes of its text. The rest is in neither split."""

LEDGER = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("domain", pa.string()),
        ("url", pa.string()),
        ("time", pa.string()),
        ("licence", pa.string()),
        ("outcome", pa.string()),
        ("stage", pa.string()),
        ("rule", pa.string()),
        ("value", pa.float64()),
        ("threshold", pa.float64()),
        ("partner", pa.string()),
        ("jaccard", pa.float64()),
        ("edits", EDITS),
        ("split", pa.string()),
        ("parts", PARTS),  # of a document that is in both splits; null for others
        ("raw_bytes", pa.int64()),
        ("bytes", pa.int64()),
    ]
)

REPEATED = "repeats.parquet"
REPEATS = pa.schema(
    [
        ("id", pa.string()),
        ("start", pa.int64()),  # bytes of its text
        ("stop", pa.int64()),
        ("kept_id", pa.string()),  # the same bytes stay in this document
        ("kept_start", pa.int64()),
    ]
)
"""Spans that occur earlier in the corpus, cut out or masked."""

ROW_GROUP = 1 << 16
"""Rows written at a time, whatever the chunks."""
MOST_NAMED = 5
"""Duplicates and repeats that a story names; the others are in the files."""


def write_ledger(folder: Path, corpus: Corpus, fates: Fates, *, split: pa.StringArray, parts: Parts) -> None:
    """Commits the ledger."""
    removed = fates.removed()
    edits = fates.edits()
    touched = pc.greater(pc.list_value_length(edits), 0)
    outcome = pc.case_when(
        pc.make_struct(pa.array(~fates.left), touched), pa.scalar("removed"), pa.scalar("edited"), pa.scalar("kept")
    )
    columns = {
        **{name: removed[name] for name in removed.column_names},
        "outcome": outcome,
        "edits": edits,
        "split": split,
        "parts": _parts_column(parts, len(corpus)),
        "bytes": pa.array(fates.sizes),
    }
    decided = pa.table(columns)

    def tables() -> Iterator[pa.Table]:
        names = ["id", "source", "domain", "url", "time", "licence", "raw_bytes"]
        for chunk, start, end in zip(corpus.chunks, corpus.starts, corpus.starts[1:], strict=False):
            read = read_table(chunk.documents, names)
            rest = decided.slice(start, end - start)
            known = {name: _given(read[name]) for name in names} | {name: rest[name] for name in rest.column_names}
            yield pa.table({name: known[name] for name in LEDGER.names}, schema=LEDGER)

    _write(folder / FILE, LEDGER, tables())


def _parts_column(parts: Parts, documents: int) -> pa.ListArray:
    counts = np.bincount(parts.rows, minlength=documents)
    names = pa.array(np.where(parts.held, "validation", "train"), pa.string())
    values = pa.StructArray.from_arrays(
        [names, pa.array(parts.starts), pa.array(parts.stops)], fields=list(PARTS.value_type)
    )
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, values, type=PARTS, mask=pa.array(counts == 0))


def write_statistics(folder: Path, corpus: Corpus) -> None:
    """Commits what was measured, row for row as the ledger: `hash` of the text and every statistic."""

    def tables() -> Iterator[pa.Table]:
        for chunk in corpus.chunks:
            yield read_table(chunk.measured).drop_columns("edits")

    first = next(tables())
    _write(folder / STATISTICS, first.schema, tables())


def write_repeats(folder: Path, repeats: pa.Table) -> None:
    """Commits the repeated spans, where there are any."""
    if len(repeats):
        _write(folder / REPEATED, REPEATS, [repeats])
    else:
        (folder / REPEATED).unlink(missing_ok=True)  # of no preparation that has this name


def is_intact(folder: Path, manifest: Manifest) -> bool:
    """Whether ledger and statistics are there, end as they should and have a row for each document: all that can be
    told of those that an earlier version wrote without checksums."""
    documents = sum(source.steps[0].documents_in for source in manifest.sources)
    try:
        return all(pq.read_metadata(folder / name).num_rows == documents for name in (FILE, STATISTICS))
    except (OSError, pa.ArrowException):
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """What became of one document. Empty fields do not apply."""

    id: str
    source: str
    domain: str
    url: str | None
    time: str | None
    licence: str | None
    outcome: str
    stage: str | None
    rule: str | None
    reason: str
    """What was wrong with a document that could not be read, and what to do."""
    value: float | None
    threshold: float | None
    partner: str | None
    jaccard: float | None
    edits: tuple[dict[str, Any], ...]
    """The rules that changed its text, and the bytes that each took away."""
    split: str | None
    raw_bytes: int
    bytes: int
    duplicates: tuple[str, ...]
    """Documents removed because this one stays in their place."""
    line: int | None
    """The line of its file in which it begins, where the source splits files."""
    shard: str | None
    """File that holds its tokens."""
    tokens: int | None
    parts: tuple[dict[str, Any], ...]
    """Of a document that is in both splits: `split`, `start` and `stop` (bytes of its text), `shard` and `tokens` of
    each part, in order. What lies between them is in neither."""
    repeats: tuple[dict[str, Any], ...]
    """Spans of its text that occur earlier: `start`, `stop`, and where they stay."""
    measured: dict[str, Any]
    """Every statistic of its text after corrections."""

    def __str__(self) -> str:
        lines = [f"{self.id}: {self.outcome}, {self.bytes} bytes, source {self.source}"]
        if self.line is not None:
            lines.append(f"begins in line {self.line}")
        lines += [f"edited by rule {edit['rule']}: {edit['bytes']} bytes less" for edit in self.edits]
        if self.rule:
            lines.append(f"removed in {self.stage} by rule {self.rule}{self._told()}")
        if self.reason:
            lines.append(self.reason)
        if self.partner:
            alike = "equals" if self.jaccard is None else f"is near (Jaccard {self.jaccard:.3f})"
            lines.append(f"its text {alike} that of {self.partner}, which stays")
        for span in self.repeats[:MOST_NAMED]:
            lines.append(f"bytes {span['start']} to {span['stop']} stay in {span['kept_id']} at {span['kept_start']}")
        if self.shard:
            lines.append(f"{self.split}: {self.tokens} tokens in {self.shard}")
        for part in self.parts[:MOST_NAMED]:
            lines.append(
                f"bytes {part['start']} to {part['stop']}: {part['split']}, {part['tokens']} tokens in {part['shard']}"
            )
        if len(self.parts) > MOST_NAMED:
            held = sum(part["split"] == "validation" for part in self.parts)
            lines.append(f"and {len(self.parts) - MOST_NAMED} more parts; {held} of all {len(self.parts)} are held out")
        if self.duplicates:
            lines.append(f"{len(self.duplicates)} removed in its favour: {', '.join(self.duplicates[:MOST_NAMED])}")
        return "\n".join(lines)

    def _told(self) -> str:
        """What was measured by the rule that removed it."""
        if self.rule == "language.keep":
            code, confidence = self.measured["language"], self.measured["language_confidence"]
            return f": its language is {code}, with confidence {confidence:.2g}" if code else ": it has no letters"
        return "" if self.value is None else f": measured {self.value:g}, the limit is {self.threshold:g}"


def explain(folder: Path, document_id: str, *, sources: Sequence[Source]) -> Story:
    """The story of one document of the data in `folder`, which was made of `sources`.

    For an unknown id, DataError suggests near ones.
    """
    path = check_table(folder, FILE)
    ids = pq.read_table(path, columns=["id"])["id"]
    row = pc.index(ids, document_id).as_py()
    if row < 0:
        near = _near(ids, document_id)
        advice = f"did you mean {' or '.join(near)}?" if near else "ids look like " + ids[0].as_py()
        raise DataError(f'{folder}: no document "{document_id}"; {advice}')
    known = _row(path, row)
    measured = _row(check_table(folder, STATISTICS), row)
    del measured["hash"]
    same = pq.read_table(path, columns=["id"], filters=pc.field("partner") == document_id)["id"].to_pylist()
    placed = _places(folder, known)
    shard, tokens = (None, None) if known["parts"] else placed[0]
    source = next(source for source in sources if source.name == known["source"])
    previous = ids[row - 1].as_py() if row else ""
    return Story(
        **{**known, "edits": tuple(known["edits"]), "parts": _with_places(known["parts"] or (), placed)},
        reason=reason(known["rule"] or "", document_id, previous=previous, source=source),
        duplicates=tuple(same),
        line=_line(document_id, source),
        shard=shard,
        tokens=tokens,
        repeats=_repeats(folder, document_id),
        measured=measured,
    )


def _row(path: Path, row: int) -> dict[str, Any]:
    with pq.ParquetFile(path) as file:
        group = file.read_row_group(row // ROW_GROUP)
    found: dict[str, Any] = group.slice(row % ROW_GROUP, 1).to_pylist()[0]
    return found


def _repeats(folder: Path, document_id: str) -> tuple[dict[str, Any], ...]:
    if not (folder / REPEATED).exists() and REPEATED not in read_manifest(folder).tables:
        return ()
    path = check_table(folder, REPEATED)
    return tuple(pq.read_table(path, filters=pc.field("id") == document_id).drop_columns("id").to_pylist())


_Place = tuple[str | None, int | None]
"""A shard and a number of tokens."""


def _places(folder: Path, row: dict[str, Any]) -> list[_Place]:
    """Where the document lies, or each of its parts."""
    if row["split"] is None:
        return [(None, None)]
    parts = [(part["split"], part_id(row["id"], part["start"], part["stop"])) for part in row["parts"] or ()]
    wanted = [(split, np.uint64(document_key(name))) for split, name in parts or [(row["split"], row["id"])]]
    found: dict[tuple[str, np.uint64], _Place] = {}
    for entry in read_manifest(folder).shards:
        keys = [key for split, key in wanted if split == entry.split and (split, key) not in found]
        if entry.source == row["source"] and keys:
            shard = Shard(folder / entry.file, checksum=entry.checksum)
            shard.verify_index()
            for index in np.flatnonzero(np.isin(shard.ids, keys)).tolist():
                found.setdefault((entry.split, shard.ids[index]), (entry.file, len(shard.document(index))))
    return [found.get(key, (None, None)) for key in wanted]


def _with_places(parts: Sequence[dict[str, Any]], places: Sequence[_Place]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {**part, "shard": shard, "tokens": tokens} for part, (shard, tokens) in zip(parts, places, strict=False)
    )


def _line(document_id: str, source: Source) -> int | None:
    found = re.search(r":(\d+)(?:\.\d+)?$", document_id)
    return int(found[1]) if found and source.split != "none" else None


def _near(ids: pa.ChunkedArray, wanted: str) -> list[str]:
    """At most three ids like `wanted`: what could not be read of its file, those that contain its last part, else those
    spelled alike."""
    rest = [rest_of(wanted)] if pc.index(ids, rest_of(wanted)).as_py() >= 0 else []
    last = wanted.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    holding = ids.filter(pc.match_substring(ids, last)) if last else ids
    # difflib takes about 40 us a candidate (measured): 10,000 of them are 0.4 s.
    candidates = (holding if len(holding) else ids).slice(0, 10_000).to_pylist()
    near = difflib.get_close_matches(wanted, candidates, n=3, cutoff=0.5) or candidates[: 3 * bool(len(holding))]
    return list(dict.fromkeys(rest + near))[:3]


def _given(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column with null for text that is not there."""
    return pc.if_else(pc.equal(column, ""), None, column) if pa.types.is_string(column.type) else column


def _write(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Commits `tables` as one Parquet file in row groups of ROW_GROUP."""
    waiting = schema.empty_table()
    with committed_file(path) as file, pq.ParquetWriter(file, schema) as writer:
        for table in tables:
            waiting = pa.concat_tables([waiting, table])
            whole = len(waiting) // ROW_GROUP * ROW_GROUP
            if whole:
                writer.write_table(waiting.slice(0, whole).combine_chunks(), ROW_GROUP)
                waiting = waiting.slice(whole)
        writer.write_table(waiting.combine_chunks(), ROW_GROUP)
