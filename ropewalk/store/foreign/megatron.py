"""Megatron-LM's indexed datasets: NAME.bin holds the tokens one after the other, NAME.idx says where each sequence is.

NAME.idx  "MMIDIDX\\0\\0", uint64 version 1, uint8 code of the dtype, uint64 sequences, uint64 boundaries,
          int32 length of each sequence in tokens, int64 byte of each in NAME.bin,
          int64 boundaries: number of the sequence with which each document begins, and of the one after the last
"""

from __future__ import annotations

import struct

import numpy as np

from ropewalk.base.errors import DataError
from ropewalk.store.origin import Origin
from ropewalk.store.references import INTEGERS, Catalogue, Unit, joined

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float64",
    7: "float32",
    8: "uint16",
}


def scan_megatron(files: list[str], *, origin: Origin) -> Catalogue:
    """The documents of one or more datasets; `files` are their .idx files. Reads these and nothing of the tokens."""
    return joined([_scan(file, origin) for file in files])


def _scan(index: str, origin: Origin) -> Catalogue:
    data = origin.read(index)
    tokens_file = index.removesuffix(".idx") + ".bin"
    size = origin.size(tokens_file)
    if len(data) < _HEADER.size or data[:9] != _MAGIC:
        raise DataError(f"{index}: not an index of Megatron-LM: it does not begin with MMIDIDX")
    _, version, code, sequences, boundaries = _HEADER.unpack_from(data)
    if version != 1:
        raise DataError(f"{index}: version {version} of Megatron-LM's index; only version 1 is known")
    dtype = _DTYPES.get(code, f"code {code}")
    if dtype not in INTEGERS:
        raise DataError(f"{index}: its tokens are of {dtype}; tokens are integers")
    expected = _HEADER.size + 12 * sequences + 8 * boundaries
    if len(data) < expected:
        raise DataError(f"{index}: {len(data)} bytes, its counts need {expected}; restore the file from a copy")
    lengths = np.frombuffer(data, "<i4", sequences, _HEADER.size).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, _HEADER.size + 4 * sequences)
    documents = np.frombuffer(data, "<i8", boundaries, _HEADER.size + 12 * sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    width = np.dtype(dtype).itemsize
    if (lengths < 0).any():
        raise DataError(f"{index}: a sequence has fewer tokens than none; restore the file from a copy")
    if not np.array_equal(pointers, ends[:-1] * width):
        raise DataError(f"{index}: its sequences do not follow each other in {tokens_file}; write it again")
    if boundaries < 1 or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise DataError(f"{index}: its document boundaries do not go from 0 to {sequences}; restore it from a copy")
    if int(ends[-1]) * width != size:
        raise DataError(f"{tokens_file}: {size} bytes, its index tells of {int(ends[-1]) * width}; restore both files")
    offsets = ends[documents]
    return Catalogue(
        dtype,
        (Unit(file=tokens_file, stop=size, file_bytes=size),),
        np.zeros(boundaries - 1, np.int32),
        offsets[:-1] * width,
        np.diff(offsets),
    )
