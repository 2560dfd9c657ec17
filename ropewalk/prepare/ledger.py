"""The ledger: one row a document that says what became of it, and the counts that follow from it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ropewalk.base.errors import DataError
from ropewalk.base.files import committed_file
from ropewalk.store.manifest import StepCount, read_manifest
from ropewalk.store.shards import Shard, document_key

from . import deduplicate, filters, normalise
from .screen import COLLECT

FILE = "ledger.parquet"
STEPS = (COLLECT, normalise.STEP, filters.STEP, deduplicate.STEP)

_COLUMNS = ["id", "source", "outcome", "step", "rule", "value", "threshold", "partner", "split", "bytes"]


def write_ledger(folder: Path, rows: pa.Table) -> None:
    """Commits the ledger of `rows` (as `decide` gives them)."""
    removed = pc.is_valid(rows["rule"])
    edited = pc.and_(pc.invert(removed), pc.is_valid(rows["edit"]))
    outcome = pc.case_when(
        pc.make_struct(removed, edited), pa.scalar("removed"), pa.scalar("edited"), pa.scalar("kept")
    )
    step = pc.if_else(edited, pa.scalar(normalise.STEP), rows["step"])
    rule = pc.if_else(edited, rows["edit"], rows["rule"])
    columns = {
        **{name: rows[name] for name in rows.column_names},
        "outcome": outcome,
        "step": step,
        "rule": rule,
    }
    with committed_file(folder / FILE) as file:
        pq.write_table(pa.table({name: columns[name] for name in _COLUMNS}).combine_chunks(), file)


def is_intact(folder: Path, *, documents: int) -> bool:
    """Whether the ledger is there, ends as it should and has a row for each of `documents`."""
    try:
        return bool(pq.read_metadata(folder / FILE).num_rows == documents)
    except (OSError, pa.ArrowException):
        return False


def count_steps(rows: pa.Table, source: str, *, steps: Sequence[str] = STEPS) -> tuple[StepCount, ...]:
    """What each step did to the documents of `source`, counted from `rows` (as `decide` gives them)."""
    rows = rows.filter(pc.equal(rows["source"], source))
    edits = _tally(rows["edit"])
    counts = []
    for step in steps:
        gone = pc.fill_null(pc.equal(rows["step"], step), False)
        rest = rows.filter(pc.invert(gone))
        before = "raw_bytes" if step in (COLLECT, normalise.STEP) else "bytes"
        after = "raw_bytes" if step == COLLECT else "bytes"
        counts.append(
            StepCount(
                step=step,
                documents_in=len(rows),
                documents_out=len(rest),
                bytes_in=_total(rows[before]),
                bytes_out=_total(rest[after]),
                removed=_tally(rows.filter(gone)["rule"]),
                edited=edits if step == normalise.STEP else {},
            )
        )
        rows = rest
    return tuple(counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """What became of one document. Empty fields do not apply."""

    id: str
    source: str
    outcome: str
    step: str | None
    rule: str | None
    value: float | None
    threshold: float | None
    partner: str | None
    split: str | None
    bytes: int
    duplicates: tuple[str, ...]
    """Documents removed because they equal this one."""
    shard: str | None
    """File that holds its tokens."""
    tokens: int | None

    def __str__(self) -> str:
        lines = [f"{self.id}: {self.outcome}, {self.bytes} bytes, source {self.source}"]
        if self.rule:
            measured = "" if self.value is None else f": measured {self.value:g}, the limit is {self.threshold:g}"
            lines.append(f"{self.outcome} in {self.step} by rule {self.rule}{measured}")
        if self.partner:
            lines.append(f"its text equals that of {self.partner}, which stays")
        if self.shard:
            lines.append(f"{self.split}: {self.tokens} tokens in {self.shard}")
        if self.duplicates:
            lines.append(f"{len(self.duplicates)} removed as equal to it: {', '.join(self.duplicates[:5])}")
        return "\n".join(lines)


def explain(folder: Path, document_id: str) -> Story:
    """The story of one document of the data in `folder`; for an unknown id, DataError suggests near ones."""
    path = folder / FILE
    if not path.exists():
        raise DataError(f"{path}: no such ledger; run `ropewalk prepare` first")
    rows = pq.read_table(path)
    found = rows.filter(pc.equal(rows["id"], document_id)).to_pylist()
    if not found:
        near = _near(rows["id"], document_id)
        advice = f"did you mean {' or '.join(near)}?" if near else "ids look like " + rows["id"][0].as_py()
        raise DataError(f'{folder}: no document "{document_id}"; {advice}')
    same = rows.filter(pc.fill_null(pc.equal(rows["partner"], document_id), False))["id"].to_pylist()
    shard, tokens = _place(folder, found[0])
    return Story(**found[0], duplicates=tuple(same), shard=shard, tokens=tokens)


def _place(folder: Path, row: dict[str, Any]) -> tuple[str | None, int | None]:
    if row["split"] is None:
        return None, None
    key = np.uint64(document_key(row["id"]))
    for entry in read_manifest(folder).shards_of(row["split"], row["source"]):
        shard = Shard(folder / entry.file, checksum=entry.checksum)
        for index in np.flatnonzero(shard.ids == key)[:1].tolist():
            return entry.file, len(shard.document(index))
    return None, None


def _near(ids: pa.ChunkedArray, wanted: str) -> list[str]:
    """At most three ids like `wanted`: those that contain its last part, else those spelled alike."""
    last = wanted.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    holding = ids.filter(pc.match_substring(ids, last)) if last else ids
    # difflib takes about 40 us a candidate (measured): 10,000 of them are 0.4 s.
    candidates = (holding if len(holding) else ids).slice(0, 10_000).to_pylist()
    return difflib.get_close_matches(wanted, candidates, n=3, cutoff=0.5) or candidates[: 3 * bool(len(holding))]


def _tally(column: pa.ChunkedArray) -> dict[str, int]:
    counts = {row["values"]: row["counts"] for row in column.drop_null().value_counts().to_pylist()}
    return dict(sorted(counts.items()))


def _total(column: pa.ChunkedArray) -> int:
    return int(pc.sum(column).as_py() or 0)
