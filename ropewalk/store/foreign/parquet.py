"""Parquet files with a column of lists of token ids; each row is a document, each row group is unpacked by itself."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from ropewalk.base.errors import DataError
from ropewalk.store.items import Fetch, Item
from ropewalk.store.origin import Origin
from ropewalk.store.references import INTEGERS, Catalogue, Unit, joined

from .strict import RESTORE, reading
from .unpack import TOKEN_KEYS, pyarrow_parquet, row_group

_TAIL_BYTES = 1 << 16
_MAGIC = b"PAR1"


def scan_parquet(files: list[str], *, origin: Origin, column: str = "") -> Catalogue:
    """The rows of the files as documents. Reads the whole column once: lengths stand nowhere else."""
    found = []
    for file in files:
        with reading(file):
            found.append(_scan(file, origin, column))
    types = sorted({catalogue.dtype for catalogue in found})
    if len(types) > 1:
        raise DataError(f"{files[0]} and the rest have tokens of {' and '.join(types)}; write them of one type")
    return joined(found)


def read_footer(file: str, size: int, *, fetch: Fetch) -> Any:
    """The metadata of a Parquet file of `size` bytes."""
    parquet = pyarrow_parquet(file)
    first = max(0, size - _TAIL_BYTES)
    tail = bytes(fetch.fetch([Item(file, first, size)])[0])
    if size < 12 or tail[-4:] != _MAGIC:
        raise DataError(f"{file}: not a Parquet file: it does not end in PAR1")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > len(tail):
        tail = bytes(fetch.fetch([Item(file, max(0, size - length), size)])[0])
    # The reader wants a file that begins as one does; between its first and last bytes it does not look.
    with reading(file):
        return parquet.read_metadata(io.BytesIO(_MAGIC + tail[-length:]))


def _scan(file: str, origin: Origin, column: str) -> Catalogue:
    size = origin.size(file)
    footer = read_footer(file, size, fetch=origin)
    schema = footer.schema.to_arrow_schema()
    name, dtype = _token_column(schema, column, file)
    units, parts = [], []
    for group in range(footer.num_row_groups):
        start, stop = _place(footer.row_group(group), name, file, size)
        unit = Unit(file=file, start=start, stop=stop, file_bytes=size, packing="parquet", column=name, group=group)
        rows = row_group(unit, origin.fetch([Item(file, start, stop)])[0], footer=footer)
        units.append(unit)
        parts.append(rows.lengths)
    lengths = np.concatenate([np.zeros(0, np.int64), *parts])
    unit_of = np.repeat(np.arange(len(units), dtype=np.int32), [len(part) for part in parts])
    width = np.dtype(dtype).itemsize
    starts = np.concatenate([np.zeros(0, np.int64), *((np.cumsum(part) - part) * width for part in parts)])
    return Catalogue(dtype, tuple(units), unit_of, starts, lengths)


def _token_column(schema: Any, column: str, file: str) -> tuple[str, str]:
    """Name of the column and type of its tokens."""
    types = {field.name: str(getattr(field.type, "value_type", "")) for field in schema}
    if column and types.get(column) not in INTEGERS:
        raise DataError(f"{file}: column {column} does not hold lists of integers; there are {', '.join(types)}")
    lists = [name for name, kind in types.items() if kind in INTEGERS]
    found = [column] if column else [n for n in TOKEN_KEYS if n in lists] or (lists if len(lists) == 1 else [])
    if not found:
        raise DataError(
            f"{file}: which column holds the tokens? Lists of integers: {', '.join(lists) or 'none'}; set `column`. "
            "Text has to be prepared: name the files in [[prepare.sources]]"
        )
    return found[0], types[found[0]]


def _place(group: Any, name: str, file: str, size: int) -> tuple[int, int]:
    """Bytes of the file that hold a column of a row group."""
    for number in range(group.num_columns):
        chunk = group.column(number)
        if chunk.path_in_schema.split(".")[0] == name:
            offsets = [chunk.data_page_offset, chunk.dictionary_page_offset]
            start = min((offset for offset in offsets if offset is not None and offset > 0), default=0)
            if not 0 < start <= start + chunk.total_compressed_size <= size:
                raise DataError(f"{file}: column {name} of a row group lies outside of the file; {RESTORE}")
            return start, start + chunk.total_compressed_size
    raise DataError(f"{file}: a row group lacks column {name}; restore the file from a copy")
