"""From a token back to where it came from: shard and offset -> document -> source file.

Shards hold the documents of one source and one split in the order of the ledger, and so does a filter of the ledger:
document k of a shard is row k of those of its source and split, after the documents of earlier shards. No table of
pointers is needed; the document's key, which the shard has, proves the row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ropewalk.base.errors import DataError, UserError
from ropewalk.store.manifest import Manifest, ShardEntry, check_table, read_manifest
from ropewalk.store.shards import Shard, document_key

from .columns import Rows
from .holdout import BOTH, part_id
from .ledger import FILE as LEDGER
from .ledger import PARTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a token came from."""

    id: str
    """The document."""
    source: str
    file: str
    """The input file, or the archive that holds the document, as the recipe's paths give it."""
    url: str | None
    split: str
    shard: str
    document: int
    """Number of the document in the shard."""
    start: int
    stop: int
    """Its tokens in the shard, the closing end of text included."""


class Tracer:
    """Answers for one folder of prepared data; reads the ids of a source and split once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifest = read_manifest(folder)
        self._shards: dict[str, Shard] = {}
        self._rows: dict[str, pa.Table] = {}

    def trace(self, shard: str, token: int) -> Origin:
        """The origin of token number `token` of a shard (a file name of the manifest)."""
        entry = next((entry for entry in self._manifest.shards if entry.file == shard), None)
        if entry is None:
            raise UserError(f"{self._folder}: no shard {shard}; the manifest names {self._manifest.shards[0].file} ...")
        opened = self.shard(shard)
        if not 0 <= token < len(opened.tokens):
            raise UserError(f"{shard} holds {len(opened.tokens)} tokens; there is no number {token}")
        document = int(np.searchsorted(opened.offsets, token, side="right")) - 1
        return self.origin(entry, document)

    def origin(self, entry: ShardEntry, document: int) -> Origin:
        """The origin of document number `document` of a shard."""
        opened, rows = self.shard(entry.file), self._documents(entry)
        opened.verify_documents(document, document + 1)
        row = {name: rows[name][document].as_py() for name in rows.column_names}
        if document_key(row.pop("key")) != int(opened.ids[document]):
            raise DataError(f"{self._folder}: ledger and shard {entry.file} do not belong together; prepare them again")
        start, stop = opened.offsets[document : document + 2].tolist()
        return Origin(
            **row,
            file=file_of(row["id"]),
            split=entry.split,
            shard=entry.file,
            document=document,
            start=start,
            stop=stop,
        )

    def shard(self, file: str) -> Shard:
        """The opened shard, whose index was checked."""
        if file not in self._shards:
            entry = next(entry for entry in self._manifest.shards if entry.file == file)
            self._shards[file] = Shard(self._folder / file, checksum=entry.checksum)
            self._shards[file].verify_index()
        return self._shards[file]

    def _documents(self, entry: ShardEntry) -> pa.Table:
        if entry.file not in self._rows:
            check_table(self._folder, LEDGER, self._manifest)
            table = read_ledger(self._folder, ["id", "source", "url", "split", "parts"])
            rows, keys = documents_of(table, source=entry.source, split=entry.split)
            found = table.select(["id", "source", "url"]).take(pa.array(rows)).append_column("key", keys)
            first = 0
            for other in self._manifest.shards_of(entry.split, entry.source):
                self._rows[other.file] = found.slice(first, other.documents)
                first += other.documents
        return self._rows[entry.file]


def ledger_rows(ledger: pa.Table, manifest: Manifest) -> Iterator[tuple[ShardEntry, Rows]]:
    """Each shard with the rows of its documents in `ledger`, which has the columns `id`, `source`, `split` and `parts`;
    a document of which the shard holds several parts comes as often."""
    places: dict[tuple[str, str], Rows] = {}
    for entry in manifest.shards:
        group = (entry.source, entry.split)
        if group not in places:
            places[group], _ = documents_of(ledger, source=entry.source, split=entry.split)
        yield entry, places[group][: entry.documents]
        places[group] = places[group][entry.documents :]


def read_ledger(folder: Path, columns: list[str]) -> pa.Table:
    """Columns of the ledger in `folder`; `parts`, which earlier versions did not write, without values there."""
    known = [name for name in columns if name in pq.read_schema(folder / LEDGER).names]
    table = pq.read_table(folder / LEDGER, columns=known)
    missing = {name: pa.nulls(len(table), PARTS) for name in columns if name not in known}
    return pa.table({**{name: table[name] for name in known}, **missing})


def documents_of(ledger: pa.Table, *, source: str, split: str) -> tuple[Rows, pa.Array]:
    """(row in the ledger, id or name of the part) of all documents of the shards of a source and split, in order."""
    named = pc.and_(pc.equal(ledger["source"], source), pc.is_in(ledger["split"], pa.array([split, BOTH])))
    rows = np.flatnonzero(np.asarray(named))
    found = ledger.take(pa.array(rows))
    cut = np.flatnonzero(np.asarray(pc.equal(found["split"], BOTH)))
    if not len(cut):
        return rows, found["id"].combine_chunks()
    names = [[name] for name in found["id"].to_pylist()]
    for row, parts in zip(cut.tolist(), found["parts"].take(pa.array(cut)).to_pylist(), strict=True):
        mine = [part for part in parts if part["split"] == split]
        names[row] = [part_id(names[row][0], part["start"], part["stop"]) for part in mine]
    keys = pa.array([name for several in names for name in several], pa.string())
    return np.repeat(rows, [len(several) for several in names]), keys


def file_of(document: str) -> str:
    """The input file in a document's id: without the source, the place in the file and the name in an archive."""
    _, _, place = document.partition(":")
    return re.sub(r":(\d+([.-]\d+)?|rest)$", "", place.partition("!")[0])
