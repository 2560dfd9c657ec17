"""WebDataset: tar archives in which files of one name and several endings are a sample.

Tokens are `.npy` files (one-dimensional integers), `.bin` files (plain tokens of `dtype`) or `.json` files (a list, or
an object with a list under `tokens` or `input_ids`); each is a document. The first two are read where they lie.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator

import numpy as np

from ropewalk.base.errors import DataError
from ropewalk.store.origin import Origin
from ropewalk.store.references import INTEGERS, Catalogue, Unit, joined

from .local import file_bytes
from .strict import RESTORE, check_tokens, reading
from .unpack import TOKEN_KEYS, Bytes, json_members, json_tokens, unpacked

_ENDINGS = ("npy", "bin", "json")
_GZIP = b"\x1f\x8b"


def scan_webdataset(files: list[str], *, origin: Origin, column: str = "", dtype: str = "") -> Catalogue:
    """The token files of the archives as documents. `column` is their ending (`tokens.npy`, `json:ids`), where there
    are several kinds. Reads the headers of local archives, all of those that are packed or lie behind a URL."""
    found = []
    for file in files:
        with reading(file):
            found.append(_scan(file, origin=origin, column=column, dtype=dtype or "uint16"))
    types = sorted({catalogue.dtype for catalogue in found})
    if len(types) > 1:
        raise DataError(f"{files[0]} and the rest have tokens of {' and '.join(types)}; write them of one type")
    return joined(found)


def _scan(file: str, *, origin: Origin, column: str, dtype: str) -> Catalogue:
    size = origin.size(file)
    data = file_bytes(file, origin)
    packed = data[:2].tobytes() == _GZIP
    unit = Unit(file=file, stop=size, file_bytes=size, packing="gzip" if packed else "raw")
    if packed:
        data = unpacked(unit, data.tobytes(), dtype="uint8")
    members = list(_members(data, file))
    ending = column.partition(":")[0] or _ending([member.name for member in members], file)
    chosen = [member for member in members if member.name.endswith(f".{ending}")]
    if not chosen:
        raise DataError(f"{file}: no member ends in .{ending}; set `column` to the ending of its tokens")
    if ending.endswith("json"):
        unit = Unit(file=file, stop=size, file_bytes=size, packing="tar-json", column=column or ending)
        texts = json_members(data.tobytes(), unit)
        length = np.array([len(json_tokens(text, key=unit.column, where=file)) for text in texts], np.int64)
        return Catalogue("int64", (unit,), np.zeros(len(length), np.int32), 8 * (np.cumsum(length) - length), length)
    start = np.array([member.offset_data for member in chosen], np.int64)
    stop = start + np.array([member.size for member in chosen], np.int64)
    if len(stop) and int(stop.max()) > len(data):
        raise DataError(f"{file}: it ends within a member; {RESTORE}")
    if ending.endswith("npy"):
        headers = [
            _array_header(data[a:b], file, member.name) for a, b, member in zip(start, stop, chosen, strict=True)
        ]
        dtypes = sorted({found for found, _ in headers})
        if len(dtypes) > 1:
            raise DataError(f"{file}: its arrays are of {' and '.join(dtypes)}; write them of one type")
        dtype, start = dtypes[0], start + np.array([header for _, header in headers], np.int64)
        check_tokens(start, stop, first=start, last=stop, file=file)
    length, rest = np.divmod(stop - start, np.dtype(dtype).itemsize)
    if rest.any():
        raise DataError(f"{file}: a member .{ending} does not hold whole tokens of {dtype}; set `dtype`")
    return Catalogue(dtype, (unit,), np.zeros(len(start), np.int32), start, length)


def _members(data: Bytes, file: str) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(fileobj=_View(data), mode="r:") as archive:
            yield from (member for member in archive if member.isfile())
    except tarfile.TarError as error:
        raise DataError(f"{file}: not a tar archive: {error}; restore the file from a copy") from None


def _ending(names: list[str], file: str) -> str:
    """The ending of the token files: the most telling one that there is."""
    endings = list(dict.fromkeys(name.rsplit("/", 1)[-1].partition(".")[2] for name in names))
    telling = [f"{key}.{kind}" for key in TOKEN_KEYS for kind in _ENDINGS]
    found = [ending for ending in (*telling, *TOKEN_KEYS, *_ENDINGS) if ending in endings]
    if not found:
        raise DataError(f"{file}: no tokens among .{', .'.join(endings)}; set `column` to the ending of its tokens")
    return found[0]


def _array_header(data: Bytes, file: str, name: str) -> tuple[str, int]:
    """Type of an .npy file and where its values begin."""
    stream = io.BytesIO(data[:1024].tobytes())
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise DataError(f"{file}: {name} is not an array of numpy: {error}") from None
    if dtype.name not in INTEGERS or dtype.byteorder == ">" or len(shape) != 1:
        raise DataError(f"{file}: {name} is of {dtype} and shape {shape}; tokens are one row of little-endian integers")
    return dtype.name, stream.tell()


class _View(io.RawIOBase):
    """A mapped file as a stream: only what tarfile asks for is touched."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        stop = len(self._data) if size < 0 else self._position + size
        part = self._data[self._position : stop].tobytes()
        self._position += len(part)
        return part
