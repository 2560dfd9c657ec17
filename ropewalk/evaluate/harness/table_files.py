"""Rows of data files: JSON lines, JSON, CSV, TSV, Parquet, Arrow and plain text, compressed with gzip or not."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import xxhash

from ropewalk.base.errors import DataError

Row = dict[str, Any]
_GZIP = b"\x1f\x8b"
"""How compressed files begin, whatever their names."""


def read_rows(files: Sequence[Path]) -> tuple[list[Row], str]:
    """The rows of the files in order, each with the same fields (absent ones are None), and a checksum of the files.

    DataError names the file and line of what cannot be read.
    """
    rows: list[Row] = []
    digest = xxhash.xxh3_64()
    for path in files:
        data = _read(path)
        digest.update(data)
        rows += _reader(path)(_unpacked(data, path), path)
    fields = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in fields} for row in rows], digest.hexdigest()


def read_json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    """Line number and object of each line of a JSON-lines file of any name, compressed with gzip or not."""
    return _numbered(_unpacked(_read(path), path), path)


ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
"""Endings that are read, each also with .gz."""


def is_data_file(path: Path) -> bool:
    """Whether the file's ending is one that is read."""
    return path.name.removesuffix(".gz").endswith(ENDINGS)


def _reader(path: Path) -> Callable[[bytes, Path], list[Row]]:
    name = path.name.removesuffix(".gz")
    ending = next((each for each in ENDINGS if name.endswith(each)), "")
    if not ending:
        raise DataError(f"{path}: no data file; its name must end with {', '.join(ENDINGS)}")
    return _READERS[ending]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _unpacked(data: bytes, path: Path) -> bytes:
    if not path.name.endswith(".gz") and data[:2] != _GZIP:
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file: {error}") from None


def _json_lines(data: bytes, path: Path) -> list[Row]:
    return [row for _, row in _numbered(data, path)]


def _numbered(data: bytes, path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield number, _row(line, path, number)


def _row(line: bytes, path: Path, number: int) -> Row:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: a row must be a JSON object, not {str(row)[:60]}")
    return row


def _json(data: bytes, path: Path) -> list[Row]:
    """A list of objects; a file with one object a line is read too, as `datasets` does."""
    try:
        tree = orjson.loads(data)
    except orjson.JSONDecodeError:
        return _json_lines(data, path)
    if isinstance(tree, dict):
        return [tree]
    if not isinstance(tree, list) or not all(isinstance(row, dict) for row in tree):
        raise DataError(f"{path}: must be a list of JSON objects")
    return tree


def _text(data: bytes, path: Path) -> list[Row]:
    return [{"text": line} for line in _decoded(data, path).splitlines()]


def _table(separator: str) -> Callable[[bytes, Path], list[Row]]:
    def read(data: bytes, path: Path) -> list[Row]:
        lines = csv.reader(io.StringIO(_decoded(data, path), newline=""), delimiter=separator)
        try:
            names = next(lines, [])
            cells = list(lines)
        except csv.Error as error:
            raise DataError(f"{path}:{lines.line_num}: {error}") from None
        wrong = next((number for number, line in enumerate(cells, 2) if line and len(line) != len(names)), None)
        if wrong is not None:
            raise DataError(f"{path}: row {wrong} has {len(cells[wrong - 2])} cells; the first has {len(names)}")
        # A column without a name is pandas' index, which `datasets` calls so.
        names = [name or f"Unnamed: {place}" for place, name in enumerate(names)]
        columns = [_typed([line[place] for line in cells if line]) for place in range(len(names))]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    return read


def _typed(cells: list[str]) -> list[Any]:
    """Whole numbers, numbers or booleans where the whole column is; empty cells are None."""
    given = [cell for cell in cells if cell != ""]
    for kind in (int, float):
        try:
            if given and all(cell == cell.strip() and "_" not in cell for cell in given):
                values = iter([kind(cell) for cell in given])
                return [next(values) if cell != "" else None for cell in cells]
        except ValueError:
            continue
    if given and {*given} <= {"True", "False"}:
        return [cell == "True" if cell else None for cell in cells]
    return [cell if cell != "" else None for cell in cells]


def _parquet(data: bytes, path: Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_table(pa.BufferReader(data)).to_pylist())
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from None


def _arrow(data: bytes, path: Path) -> list[Row]:
    """The stream format, in which `datasets` caches, or the file format."""
    import pyarrow as pa

    kind = pa.ipc.open_file if data.startswith(b"ARROW1") else pa.ipc.open_stream
    try:
        return list(kind(pa.BufferReader(data)).read_all().to_pylist())
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: cannot be read as Arrow: {error}") from None


def _decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error}") from None


_READERS: dict[str, Callable[[bytes, Path], list[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _table(","),
    ".tsv": _table("\t"),
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".txt": _text,
}
