"""Input files -> records, one a document. What cannot be read as text is a record with a fault, not a gap."""

from __future__ import annotations

import ast
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import IO

from ropewalk.base.errors import DataError

from .documents import Record
from .sources import InputFile, Reader, unreadable


def read_records(file: InputFile) -> Iterator[Record]:
    """The documents of one file in order; DataError when it cannot be read or changed since it was hashed."""
    try:
        yield from _READERS[file.reader](file)
        status = os.stat(file.location)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _damaged(file, error) from None
    except OSError as error:
        raise unreadable(file.location, error, source=file.source) from None
    if (status.st_size, status.st_mtime_ns) != (file.bytes, file.modified_ns):
        raise DataError(f"{file.location} changed while it was being read; run the same command again")


def _text(file: InputFile) -> Iterator[Record]:
    with open(file.location, "rb") as stream:
        yield _record(file, "", stream.read())


def _jsonl(file: InputFile) -> Iterator[Record]:
    """One record a line, numbered from 1; a line of white space is no document."""
    with _lines(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                text, fault = _text_of(line, file.text_key)
                yield _record(file, f":{number}", line if fault else text, fault)


def _lines(file: InputFile) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(file.location) if file.location.endswith(".gz") else open(file.location, "rb")


def _text_of(line: bytes, key: str) -> tuple[bytes, str]:
    """(text, "") or (b"", the fault)."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return b"", "not_utf8"
    except (ValueError, RecursionError):
        return b"", "not_json"
    if not isinstance(value, dict):
        return b"", "not_object"
    if key not in value:
        return b"", "no_text_key"
    text = value[key]
    if not isinstance(text, str):
        return b"", "text_not_string"
    # An escaped half of a surrogate pair is legal JSON and no text: `normalise` removes it as not_utf8.
    return text.encode("utf-8", "surrogatepass"), ""


def _docstrings(file: InputFile) -> Iterator[Record]:
    """The docstrings of one module as one document, each under its dotted name."""
    with open(file.location, "rb") as stream:
        data = stream.read()
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError):
        yield _record(file, "", data, "not_python")
        return
    module = file.name.removeprefix("docstrings/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parts = [f"{name}\n\n{text}\n" for name, text in _documented(tree, module)]
    yield _record(file, "", "\n".join(parts).encode("utf-8", "surrogatepass"))


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _documented(node: _Documented, name: str) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text:
        yield name, text
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _documented(child, f"{name}.{child.name}")


def _topics(file: InputFile) -> Iterator[Record]:
    """The topics of `help()`, one document each, read from the source that the checksum covers."""
    with open(file.location, "rb") as stream:
        tree = ast.parse(stream.read())
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    topics: dict[str, str] = ast.literal_eval(tables[0]) if tables else {}
    for name in sorted(topics):
        yield _record(file, f"/{name}", topics[name].encode())


_READERS: dict[Reader, Callable[[InputFile], Iterator[Record]]] = {
    "text": _text,
    "jsonl": _jsonl,
    "docstrings": _docstrings,
    "topics": _topics,
}


def _record(file: InputFile, suffix: str, data: bytes, fault: str = "") -> Record:
    return Record(f"{file.source}:{file.name}{suffix}", file.source, file.domain, data, fault)


def _damaged(file: InputFile, error: Exception) -> DataError:
    return DataError(
        f"source {file.source}: {file.location} is a damaged gzip file: {error}; "
        "fetch it again or leave it out of `paths`"
    )
