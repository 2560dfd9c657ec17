"""MosaicML Streaming's MDS: `index.json` lists shards of samples, each sample a row of encoded columns.

shard   uint32 samples, uint32 offsets[samples + 1] in bytes of the file, JSON of the columns, samples
sample  uint32 size of each column whose size varies, then the columns in the order of `column_names`
ndarray uint8 code of the dtype unless the encoding names it, then unless the encoding names the shape a byte
        (dimensions << 2 | log2 of the bytes of a size) and the sizes, then the values
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError
from ropewalk.store.origin import Origin
from ropewalk.store.references import INTEGERS, Catalogue, Packing, Unit, joined

from .local import file_bytes
from .strict import INDEX, RESTORE, check_offsets, check_tokens, listed, place, read_index, reading, taken
from .unpack import TOKEN_KEYS, Bytes, unpacked

_PACKINGS: dict[str, Packing] = {"zstd": "zstd", "gz": "gzip"}
_DTYPE_OF_BYTES = "int64"
"""What llm-foundry writes where a column is plain `bytes`; `dtype` says otherwise."""
_CODES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}


def scan_mds(folder: str, *, origin: Origin, column: str = "", dtype: str = "") -> Catalogue:
    """The samples of a folder as documents. Reads the offsets of each shard; all of it when it is packed, lies behind
    a URL or has several columns whose size varies."""
    index, where = read_index(folder, origin=origin), f"{folder}/{INDEX}"
    shards = listed(index, "shards", dict, where=where)
    if index.get("version") != 2 or not shards:
        raise DataError(f"{where}: version {index.get('version')} with {len(shards)} shards; MDS has 2")
    found = [_scan(folder, shard, origin=origin, column=column, dtype=dtype) for shard in shards]
    types = sorted({catalogue.dtype for catalogue in found})
    if len(types) > 1:
        raise DataError(f"{folder}: its shards have tokens of {' and '.join(types)}; write them of one type")
    return joined(found)


def _scan(folder: str, shard: dict[str, Any], *, origin: Origin, column: str, dtype: str) -> Catalogue:
    where = f"{folder}/{INDEX}"
    names = listed(shard, "column_names", str, where=where)
    encodings = listed(shard, "column_encodings", str, where=where)
    sizes = [size or None for size in taken(shard, "column_sizes", list, where=where)]
    if not len(names) == len(encodings) == len(sizes) or not all(s is None or _is_size(s) for s in sizes):
        raise DataError(f"{where}: names, encodings and sizes of the columns do not fit each other; {RESTORE}")
    chosen = names.index(_token_column(names, column, where=where))
    packing, stored = _stored(folder, shard, where=where)
    samples, size = taken(shard, "samples", int, where=where), origin.size(stored)
    unit = Unit(file=stored, stop=size, file_bytes=size, packing=packing)
    with reading(stored):
        start, stop, found = _read_shard(
            unit, samples, origin=origin, sizes=sizes, chosen=chosen, encoding=encodings[chosen], dtype=dtype
        )
    length, rest = np.divmod(stop - start, np.dtype(found).itemsize)
    if rest.any():
        raise DataError(f"{stored}: column {names[chosen]} does not hold whole tokens of {found}; set `dtype`")
    return Catalogue(found, (unit,), np.zeros(samples, np.int32), start, length)


def _read_shard(
    unit: Unit, samples: int, *, origin: Origin, sizes: list[int | None], chosen: int, encoding: str, dtype: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], str]:
    """First and last byte of the tokens of every sample, and their type."""
    stored, packing = unit.file, unit.packing
    data = file_bytes(stored, origin)
    if packing != "raw":
        data = unpacked(unit, data.tobytes(), dtype="uint8")
    offsets = data[4 : 4 + 4 * (samples + 1)].view("<u4").astype(np.int64) if len(data) >= 8 + 4 * samples else None
    if offsets is None or int(data[:4].view("<u4")[0]) != samples or int(offsets[-1]) != len(data):
        raise DataError(f"{stored}: not the shard of {samples} samples that its index tells of; restore it from a copy")
    check_offsets(offsets, begin=4 + 4 * (samples + 1), end=len(data), file=stored)
    start, stop = _cells(data, offsets, sizes, chosen)
    check_tokens(start, stop, first=offsets[:-1], last=offsets[1:], file=stored)
    found, start = _values(data, start, encoding, dtype=dtype, where=stored)
    check_tokens(start, stop, first=offsets[:-1], last=offsets[1:], file=stored)
    return start, stop, found


def _token_column(names: list[str], column: str, *, where: str) -> str:
    if column:
        if column not in names:
            raise DataError(f"{where}: there is no column {column}; there are {', '.join(names)}")
        return column
    found = [name for name in TOKEN_KEYS if name in names] or (names if len(names) == 1 else [])
    if not found:
        raise DataError(f"{where}: which column holds the tokens? Set `column` to one of {', '.join(names)}")
    return found[0]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 40


def _stored(folder: str, shard: dict[str, Any], *, where: str) -> tuple[Packing, str]:
    """How a shard is packed and where it lies."""
    packed = shard.get("zip_data")
    if not packed:
        raw = taken(shard, "raw_data", dict, where=where)
        return "raw", place(folder, taken(raw, "basename", str, where=where), where=where)
    name = str(shard.get("compression")).partition(":")[0]
    if name not in _PACKINGS:
        raise DataError(f"{folder}: shards packed with {name} cannot be read; {' and '.join(_PACKINGS)} can")
    return _PACKINGS[name], place(folder, taken(packed, "basename", str, where=where), where=where)


def _cells(
    data: Bytes, offsets: npt.NDArray[np.int64], sizes: list[int | None], chosen: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First and last byte of column `chosen` in every sample."""
    varying = [number for number, size in enumerate(sizes) if not size]
    begin = offsets[:-1] + 4 * len(varying)
    if varying == [chosen]:
        # The only size that varies is what the others leave: no page of the samples themselves is touched.
        before = sum(size or 0 for size in sizes[:chosen])
        behind = sum(size or 0 for size in sizes[chosen + 1 :])
        return begin + before, offsets[1:] - behind
    heads = data[offsets[:-1, None] + np.arange(4 * len(varying))].view("<u4").astype(np.int64)
    widths = [
        heads[:, varying.index(number)] if number in varying else np.full(len(begin), size, np.int64)
        for number, size in enumerate(sizes[: chosen + 1])
    ]
    start = begin + np.sum([np.zeros(len(begin), np.int64), *widths[:-1]], axis=0)
    return start, start + widths[-1]


def _values(
    data: Bytes, start: npt.NDArray[np.int64], encoding: str, *, dtype: str, where: str
) -> tuple[str, npt.NDArray[np.int64]]:
    """The type of the tokens of a column and where they begin in each sample, behind headers."""
    kind, _, told = encoding.partition(":")
    if kind == "bytes":
        return dtype or _DTYPE_OF_BYTES, start
    if kind != "ndarray":
        raise DataError(f"{where}: a column of {encoding} holds no tokens; `bytes` and `ndarray` do; set `column`")
    named, _, shape = told.partition(":")
    if not named:
        codes = np.unique(data[start])
        if len(codes) != 1 or int(codes[0]) not in _CODES:
            raise DataError(f"{where}: arrays of several types, or of no integers; write them of one type")
        named, start = _CODES[int(codes[0])], start + 1
    if named not in INTEGERS:
        raise DataError(f"{where}: its tokens are of {named}; tokens are integers")
    if not shape:
        header = data[start].astype(np.int64)
        start = start + 1 + (header >> 2) * (1 << (header & 3))
    return named, start
