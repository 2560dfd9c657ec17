"""The bytes of a unit -> its tokens: what every packing means. Packages are imported where a packing needs them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError, MissingPackage
from ropewalk.store.references import Unit

from .strict import reading

MOST_EXPANSION = 200
"""Bytes for each compressed one, as in `prepare.sources.limits.expansion`; what unpacks to more is taken for a bomb."""
SMALL = 64 << 20
"""Unpacked bytes that are never too many."""
TOKEN_KEYS = ("tokens", "input_ids", "token_ids")
"""Names under which corpora keep their tokens, most usual first."""
Bytes = npt.NDArray[np.uint8]


def unpacked(unit: Unit, data: bytes | memoryview, *, dtype: str, footer: Any = None) -> Bytes:
    """The bytes of a unit's tokens; `footer` is the metadata of its Parquet file."""
    if unit.packing == "raw":
        return np.frombuffer(data, np.uint8)
    if unit.packing == "zstd":
        return np.frombuffer(unzstd(data, where=unit.file), np.uint8)
    if unit.packing == "gzip":
        return np.frombuffer(_gunzip(data, where=unit.file), np.uint8)
    if unit.packing == "tar-json":
        lists = [json_tokens(text, key=unit.column, where=unit.file) for text in json_members(bytes(data), unit)]
        return np.concatenate([np.zeros(0, np.int64), *lists]).astype(dtype).view(np.uint8)
    return row_group(unit, data, footer=footer).values.astype(dtype, copy=False).view(np.uint8)


def unzstd(data: bytes | memoryview, *, where: str) -> bytes:
    """All frames of a Zstandard file; sizes need not be written in it."""
    try:
        import zstandard
    except ModuleNotFoundError:
        raise MissingPackage("zstandard", f"reading {where}", "zstd") from None
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True) as stream:
            return _bounded(stream, data, where=where)
    except zstandard.ZstdError as error:
        raise DataError(f"{where}: cannot be unpacked: {error}; restore the file from a copy") from None


def json_members(data: bytes, unit: Unit) -> list[bytes]:
    """The members of a tar archive (also gzipped) that end as the unit's column says up to the first colon."""
    ending = "." + unit.column.partition(":")[0]
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            members = [member for member in archive if member.isfile() and member.name.endswith(ending)]
            _check_expansion(sum(member.size for member in members), len(data), where=unit.file)
            return [_content(archive, member) for member in members]
    except (tarfile.TarError, ValueError, EOFError, zlib.error) as error:
        raise DataError(f"{unit.file}: not a tar archive: {error}; restore the file from a copy") from None


def json_tokens(text: bytes, *, key: str, where: str) -> npt.NDArray[np.int64]:
    """Tokens of a JSON document: a list, or a list under what stands behind `key`'s colon, else one of TOKEN_KEYS."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        told = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DataError(f"{where}: a JSON document cannot be read: {told}; restore the file from a copy") from None
    wanted = key.partition(":")[2]
    if isinstance(value, dict):
        found = [name for name in ((wanted,) if wanted else TOKEN_KEYS) if name in value]
        if not found:
            names = wanted or " or ".join(TOKEN_KEYS)
            raise DataError(f"{where}: a JSON document has no {names}; name its key in `column` as json:KEY")
        value = value[found[0]]
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 1 << 62 for token in value):
        raise DataError(f"{where}: a JSON document holds something else than a list of tokens; correct it")
    return np.asarray(value, np.int64)


class Rows:
    """A column of lists of integers of one row group."""

    def __init__(self, values: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
        self.values = values
        """Of all rows, joined."""
        self.lengths = lengths


def row_group(unit: Unit, data: bytes | memoryview, *, footer: Any) -> Rows:
    """The rows of a unit of a Parquet file from the bytes of its column."""
    parquet = pyarrow_parquet(unit.file)
    with reading(unit.file):
        file = parquet.ParquetFile(_Window(data, unit.start, unit.file_bytes), metadata=footer)
        column = file.read_row_group(unit.group, columns=[unit.column], use_threads=False).column(0).combine_chunks()
    if column.null_count:
        raise DataError(f"{unit.file}: column {unit.column} has {column.null_count} rows without tokens; remove them")
    offsets = column.offsets.to_numpy()
    return Rows(column.flatten().to_numpy(), np.diff(offsets).astype(np.int64))


def pyarrow_parquet(where: str) -> Any:
    """The module that reads Parquet."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise MissingPackage("pyarrow", f"reading {where}", "train") from None
    return pyarrow.parquet


class _Window(io.RawIOBase):
    """A file of `size` bytes of which only those from `start` on that are at hand can be read."""

    def __init__(self, data: bytes | memoryview, start: int, size: int) -> None:
        self._data, self._start, self._size = memoryview(data), start, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        first = self._position - self._start
        stop = len(self._data) if size < 0 else first + size
        if first < 0 or stop > len(self._data):
            raise OSError(f"bytes {self._position} to {self._start + stop} were not fetched")
        self._position = self._start + stop
        return bytes(self._data[first:stop])


def _gunzip(data: bytes | memoryview, *, where: str) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            return _bounded(stream, data, where=where)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{where}: cannot be unpacked: {error}; restore the file from a copy") from None


def _bounded(stream: Any, data: bytes | memoryview, *, where: str) -> bytes:
    found = bytes(stream.read(_most(len(data)) + 1))
    _check_expansion(len(found), len(data), where=where)
    return found


def _check_expansion(unpacked_bytes: int, packed_bytes: int, *, where: str) -> None:
    if unpacked_bytes > _most(packed_bytes):
        told = f"{packed_bytes:,} bytes unpack to more than {_most(packed_bytes):,}"
        raise DataError(f"{where}: {told}; if you trust the file, write it anew without compression")


def _most(packed_bytes: int) -> int:
    return max(SMALL, MOST_EXPANSION * packed_bytes)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, "a regular member has content"
    return file.read()
