"""litdata's optimised datasets: `index.json` lists chunks of items, each item a row of serialised leaves.

chunk   uint32 items, uint32 offsets[items + 1] in bytes of the file, items
item    written for `TokensLoader`: the tokens; else uint32 size of each leaf, then the leaves
framed  (`compression_level` "batch") "LDFZ01\\0\\0", uint16 version, uint16 flags, uint32 items, uint32 items a
        frame, uint32 frames, uint32 offsets[items + 1] in bytes of the unpacked items, then for every frame
        uint32 first item, uint32 items, uint64 offset, uint32 length packed, uint32 length unpacked
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError
from ropewalk.store.origin import Origin
from ropewalk.store.references import INTEGERS, Catalogue, Unit, joined

from .local import file_bytes
from .strict import INDEX, RESTORE, check_offsets, check_tokens, listed, place, read_index, reading, taken
from .unpack import Bytes, unpacked

_TORCH = {11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64"}
_TORCH |= {20: "uint16"}
_NUMPY = dict(enumerate(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")))
_LEAVES = {"no_header_tensor": _TORCH, "no_header_numpy": _NUMPY}
_FRAMED = b"LDFZ01\0\0"
_PREFIX = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("offset", "<u8"), ("packed", "<u4"), ("raw", "<u4")])


def scan_litdata(folder: str, *, origin: Origin, column: str = "") -> Catalogue:
    """The items of a folder as documents. `column` is the number of the leaf that holds the tokens, where there are
    several. Reads the offsets of each chunk; all of it when it is packed, lies behind a URL or has several leaves."""
    index, where = read_index(folder, origin=origin), f"{folder}/{INDEX}"
    config, chunks = taken(index, "config", dict, where=where), listed(index, "chunks", dict, where=where)
    formats = listed(config, "data_format", str, where=where)
    if not chunks:
        raise DataError(f"{where}: it lists no chunks; {RESTORE}")
    if config.get("encryption"):
        raise DataError(f"{folder}: its chunks are encrypted; write them without")
    if config.get("compression_level") == "sample":
        raise DataError(f"{folder}: every item is packed by itself; write it with compression_level batch or chunk")
    leaf, dtype = _leaf(formats, column, where=where)
    leaves = 0 if config.get("item_loader") == "TokensLoader" else len(formats)
    return joined(
        [_scan(folder, chunk, config=config, origin=origin, leaf=leaf, leaves=leaves, dtype=dtype) for chunk in chunks]
    )


def _leaf(formats: list[str], column: str, *, where: str) -> tuple[int, str]:
    """Number and type of the leaf with the tokens."""
    known = {}
    for number, told in enumerate(formats):
        kind, _, code = told.partition(":")
        dtype = _LEAVES.get(kind, {}).get(int(code) if code.isdecimal() and len(code) < 9 else -1)
        if dtype in INTEGERS:
            known[number] = dtype
    if column:
        if not column.isdecimal() or int(column) not in known:
            raise DataError(f"{where}: leaf {column} of {formats} is no row of tokens; set `column` to its number")
        return int(column), known[int(column)]
    if len(known) != 1:
        raise DataError(f"{where}: which leaf of {formats} holds the tokens? Set `column` to its number, from 0")
    return next(iter(known.items()))


def _scan(
    folder: str, chunk: dict[str, Any], *, config: dict[str, Any], origin: Origin, leaf: int, leaves: int, dtype: str
) -> Catalogue:
    where = f"{folder}/{INDEX}"
    file = place(folder, taken(chunk, "filename", str, where=where), where=where)
    size, items = origin.size(file), taken(chunk, "chunk_size", int, where=where)
    with reading(file):
        return _read_chunk(file, size, items, config=config, origin=origin, leaf=leaf, leaves=leaves, dtype=dtype)


def _read_chunk(
    file: str, size: int, items: int, *, config: dict[str, Any], origin: Origin, leaf: int, leaves: int, dtype: str
) -> Catalogue:
    data = file_bytes(file, origin)
    if data[:8].tobytes() == _FRAMED:
        units, unit, offsets, data, inside = _framed(file, data, items)
    else:
        whole = bool(config.get("compression"))
        units = [Unit(file=file, stop=size, file_bytes=size, packing="zstd" if whole else "raw")]
        if whole:
            data = unpacked(units[0], data.tobytes(), dtype="uint8")
        if len(data) < 8 + 4 * items or int(data[:4].view("<u4")[0]) != items:
            raise DataError(f"{file}: not the chunk of {items} items that its index tells of; restore it from a copy")
        offsets = data[4 : 8 + 4 * items].view("<u4").astype(np.int64)
        unit, inside = np.zeros(items, np.int32), np.zeros(items, np.int64)
    if int(offsets[-1]) > len(data):
        raise DataError(f"{file}: {len(data)} bytes, its offsets tell of {offsets[-1]}; restore it from a copy")
    check_offsets(offsets, begin=0, end=len(data), file=file)
    start, stop = first, last = offsets[:-1], offsets[1:]
    if leaves:
        sizes = data[start[:, None] + np.arange(4 * leaves)].view("<u4").astype(np.int64)
        start = start + 4 * leaves + sizes[:, :leaf].sum(axis=1)
        stop = start + sizes[:, leaf]
    check_tokens(start, stop, first=first, last=last, file=file)
    length, rest = np.divmod(stop - start, np.dtype(dtype).itemsize)
    if rest.any():
        raise DataError(f"{file}: an item does not hold whole tokens of {dtype}; restore the file from a copy")
    return Catalogue(dtype, tuple(units), unit, start - inside, length)


def _framed(
    file: str, data: Bytes, items: int
) -> tuple[list[Unit], npt.NDArray[np.int32], npt.NDArray[np.int64], Bytes, npt.NDArray[np.int64]]:
    """Units (one a frame), unit of each item, offsets of the items in all frames unpacked, these bytes, and where the
    frame of each item begins in them."""
    _, _, _, count, _, frames = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
    behind = _PREFIX.size + 4 * (count + 1)
    if count != items:
        raise DataError(f"{file}: {count} items, its index tells of {items}; restore it from a copy")
    offsets = data[_PREFIX.size : behind].view("<u4").astype(np.int64)
    table = data[behind : behind + frames * _FRAME.itemsize].view(_FRAME)
    if len(table) != frames or int(table["items"].sum()) != items:
        raise DataError(f"{file}: its {frames} frames do not hold {items} items; {RESTORE}")
    units = [
        Unit(
            file=file,
            start=int(row["offset"]),
            stop=int(row["offset"]) + int(row["packed"]),
            file_bytes=len(data),
            packing="zstd",
        )
        for row in table
    ]
    unit = np.repeat(np.arange(frames, dtype=np.int32), table["items"].astype(np.int64))
    raw = [unpacked(u, data[u.start : u.stop].tobytes(), dtype="uint8") for u in units]
    return units, unit, offsets, np.concatenate([np.zeros(0, np.uint8), *raw]), offsets[table["first"]][unit]
