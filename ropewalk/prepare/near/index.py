"""Documents that were prepared before, on disk: a new crawl is matched against them and learns whose copy it brings.

    index.json             format, algorithm, and the segments with their numbers of documents and checksums
    NAME-00000.arrow ...   segments: id, shingle set, and for each band the sorted keys with the rows they belong to

A segment never changes. An addition exists when `index.json` names it, and not before: kill it anywhere, run it again.
The sets of all documents are kept, since their texts may be gone: 8 bytes a shingle, as much as the text of Python
source, 1.5 times that of English and twice that of Chinese.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ropewalk.base.errors import DataError
from ropewalk.base.files import committed_file, locked
from ropewalk.base.seal import damaged, read_sealed, warn_unsealed, write_sealed
from ropewalk.store.sealed import checksum_of

from ..columns import Rows
from ..config import Near
from ..kernels.words import Hashes
from .files import sets_of, table_in, write_table
from .propose import Keys
from .sketch import Sets, Sketch, algorithm, bands, sets, sketch

FORMAT = 2
SEALED_SINCE = 2
FILE = "index.json"
_REMEDY = (
    "restore the index from a copy, or name another folder in `prepare.deduplicate.near.index` and prepare the corpora "
    "that it held again"
)


@dataclass(frozen=True, slots=True)
class Known:
    """The documents of an index that share a key with new ones: few."""

    ids: pa.Array
    sketch: Sketch
    """Only the keys that were asked for; others are 0."""
    sets: Sets


class Index:
    """`Index.open(folder, near)`; `near` must be that of all additions, as far as keys and sets depend on it."""

    def __init__(self, folder: Path, near: Near, segments: list[dict[str, Any]]) -> None:
        self._folder = folder
        self._near = near
        self._segments = segments

    @classmethod
    def open(cls, folder: Path, near: Near) -> Index:
        """The index in `folder`, an empty one where there is none; refuses one that was made by another algorithm."""
        path = folder / FILE
        if not path.exists():
            if any(folder.glob("*.arrow")):
                raise damaged(path, what="index", remedy=_REMEDY, why="it is missing, and its segments are there")
            return cls(folder, near, [])
        value = read_sealed(
            path, what="index", remedy=_REMEDY, current=FORMAT, sealed_since=SEALED_SINCE, upgrades={1: _no_checksums}
        )
        if value["algorithm"] != algorithm(near):
            raise DataError(
                f'{path}: this index was made by "{value["algorithm"]}", these settings need "{algorithm(near)}"; '
                "change `deduplicate.near` back, or make a new index in another folder"
            )
        return cls(folder, near, value["segments"])

    @property
    def documents(self) -> int:
        """Documents in the index."""
        return sum(segment["documents"] for segment in self._segments)

    @property
    def additions(self) -> list[str]:
        """The names of the additions, in order."""
        return list(dict.fromkeys(segment["addition"] for segment in self._segments))

    def before(self, name: str) -> Index:
        """The index as it was before the addition `name`: all of it when there is none of this name."""
        names = [segment["addition"] for segment in self._segments]
        end = names.index(name) if name in names else len(names)
        return Index(self._folder, self._near, self._segments[:end])

    def append(self, name: str, batches: Iterable[tuple[pa.Array, pa.LargeStringArray]]) -> None:
        """Adds documents, (ids, texts) a batch, under the name of an addition; one that is there already is left alone.

        Every batch becomes a segment, and is all that is in memory at a time.
        """
        with locked(self._folder):
            self._segments = Index.open(self._folder, self._near)._segments
            if any(segment["addition"] == name for segment in self._segments):
                return
            if not (self._folder / FILE).exists():
                self._commit([])  # from now on segments without it say that it was lost
            added = []
            for segment in self._segments:
                if not segment["checksum"]:  # nothing else vouches for it before it is listed under a seal
                    self._open(segment)
            for number, (ids, text) in enumerate(batches):
                path = self._folder / f"{name}-{number:05}.arrow"
                with committed_file(path) as file:
                    write_table(file, _segment(ids, text, self._near), self._near)
                told = {"file": path.name, "documents": len(ids), "checksum": checksum_of(path)}
                added.append({"addition": name, **told})
            self._segments = [*self._segments, *added]
            self._commit(self._segments)

    def _commit(self, segments: list[dict[str, Any]]) -> None:
        write_sealed(self._folder / FILE, {"format": FORMAT, "algorithm": algorithm(self._near), "segments": segments})

    def known(self, chunks: Sequence[Keys]) -> Known:
        """The documents that share a key with any of `chunks`; of one key the first `max_compared` alone.

        Put `sketch` before the sketches of the chunks, `sets` before their sets, and the number of `ids` as `fixed`
        into `match`: partners below that number are documents of the index.
        """
        wanted = [_distinct(chunks, band) for band in range(bands(self._near))]
        parts = [self._known(segment, wanted) for segment in self._segments]
        ids = pa.chunked_array([part.ids for part in parts], pa.large_string()).combine_chunks()
        keys = np.concatenate([np.empty((len(wanted), 0), np.uint64), *(part.sketch.keys for part in parts)], axis=1)
        values = np.concatenate([np.empty(0, np.uint64), *(part.sets.values for part in parts)])
        lengths = [np.diff(part.sets.bounds) for part in parts]
        return Known(ids, Sketch(keys), Sets(values, np.concatenate([[0], *lengths]).cumsum().astype(np.int64)))

    def _known(self, segment: dict[str, Any], wanted: list[Hashes]) -> Known:
        table = self._open(segment)
        found = [self._rows(table, band, keys) for band, keys in enumerate(wanted)]
        rows = np.unique(np.concatenate([rows for rows, _ in found]))
        keys = np.zeros((len(wanted), len(rows)), np.uint64)
        for band, (with_key, key) in enumerate(found):
            keys[band, np.searchsorted(rows, with_key)] = key
        taken = table.select(["id", "shingles"]).take(pa.array(rows))
        return Known(taken["id"].combine_chunks(), Sketch(keys), sets_of(taken["shingles"]))

    def _open(self, segment: dict[str, Any]) -> pa.Table:
        """The table of a segment, mapped; DamagedFile when it is not what was written."""
        path, what = self._folder / segment["file"], "segment of an index of near-duplicates"
        if not path.is_file():
            raise damaged(path, what=what, remedy=_REMEDY, why="it is missing")
        if not segment["checksum"]:
            warn_unsealed(path, what)
        elif checksum_of(path) != segment["checksum"]:
            raise damaged(path, what=what, remedy=_REMEDY)
        try:
            table = table_in(pa.memory_map(str(path)), self._near, path=path, what=what)
        except pa.ArrowInvalid as error:
            raise damaged(path, what=what, remedy=_REMEDY, why=str(error)) from None
        if len(table) != segment["documents"]:
            why = f"it holds {len(table)} documents, {FILE} says {segment['documents']}"
            raise damaged(path, what=what, remedy=_REMEDY, why=why)
        return table

    def _rows(self, table: pa.Table, band: int, wanted: Hashes) -> tuple[Rows, Hashes]:
        """(rows, keys) of a segment whose key in `band` is wanted."""
        keys, rows = (table[f"{name}_{band:03}"].combine_chunks().to_numpy() for name in ("key", "row"))
        low = np.searchsorted(keys, wanted, "left")
        count = np.minimum(np.searchsorted(keys, wanted, "right") - low, self._near.max_compared)
        places = np.repeat(low - np.cumsum(count) + count, count) + np.arange(count.sum())
        return rows[places].astype(np.int64), np.repeat(wanted, count)


def _no_checksums(tree: dict[str, Any]) -> dict[str, Any]:
    """Format 1 did not say what the segments' bytes are."""
    return {**tree, "segments": [{**segment, "checksum": ""} for segment in tree["segments"]]}


def _segment(ids: pa.Array, text: pa.LargeStringArray, near: Near) -> pa.Table:
    shingles = sets(text, np.arange(len(text)), near)
    columns = {
        "id": ids.cast(pa.large_string()),
        "shingles": pa.LargeListArray.from_arrays(pa.array(shingles.bounds), pa.array(shingles.values)),
    }
    for band, keys in enumerate(sketch(text, near).keys):
        order = np.argsort(keys, kind="stable")
        columns[f"key_{band:03}"] = pa.array(keys[order])
        columns[f"row_{band:03}"] = pa.array(order.astype(np.uint32))
    return pa.table(columns)


def _distinct(chunks: Sequence[Keys], band: int) -> Hashes:
    """The different keys of a band, ascending."""
    keys = np.unique(np.concatenate([np.empty(0, np.uint64), *(np.unique(chunk.band(band)) for chunk in chunks)]))
    return np.asarray(keys[keys != 0])
