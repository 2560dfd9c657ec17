"""Which files a recipe means: paths, folders, globs and the files of the running Python, in canonical order.

Every file has a name that does not depend on where the working folder lies (`texts/a.md`, `stdlib/ast.py`);
documents are identified and ordered by it.
"""

from __future__ import annotations

import collections
import functools
import glob
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from ropewalk.base.errors import DataError

from .config import Prepare, Source

Reader = Literal["text", "jsonl", "docstrings", "topics"]

STDLIB, DOCSTRINGS = "stdlib", "docstrings"
"""Folders in the names of what comes from the Python of this machine."""
PYTHON_SOURCES = "python:stdlib"
PYTHON_PROSE = "python:prose"


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read, and how."""

    source: str
    domain: str
    name: str
    location: str
    reader: Reader
    text_key: str
    bytes: int
    modified_ns: int
    checksum: str
    """xxh3-128 of the content."""


@dataclass(frozen=True, slots=True)
class Collection:
    """The files of all sources in canonical order, and what was passed over in their folders."""

    files: tuple[InputFile, ...]
    passed_over: tuple[str, ...]
    """One sentence a folder; empty when every file in it is used."""


def collect_files(settings: Prepare) -> Collection:
    """Every input file, source by source and then by name; reads each once for its checksum.

    Raises DataError for paths without a match (all of them), an unreadable file, two files with one name.
    """
    missing = missing_paths(settings)
    if missing:
        lines = [f'source {settings.sources[index].name}: "{path}": {_why_missing(path)}' for index, path in missing]
        raise DataError("\n".join(lines))
    files: list[InputFile] = []
    passed_over: list[str] = []
    for source in settings.sources:
        found: dict[str, _Found] = {}
        for path in source.paths:
            match = _expand(path, source)
            passed_over.extend(_tell(match.passed_over, path=path, source=source))
            for item in match.files:
                _add(found, item, source=source)
        files.extend(_describe(found[name], source) for name in sorted(found))
    return Collection(tuple(files), tuple(passed_over))


def missing_paths(settings: Prepare) -> list[tuple[int, str]]:
    """(index of the source, path) of every path that gives no file."""
    return [
        (index, path)
        for index, source in enumerate(settings.sources)
        for path in source.paths
        if not _expand(path, source).files
    ]


@dataclass(frozen=True, slots=True)
class _Found:
    name: str
    location: Path
    reader: Reader


@dataclass(frozen=True, slots=True)
class _Match:
    files: tuple[_Found, ...]
    passed_over: tuple[Path, ...] = ()


def _expand(path: str, source: Source) -> _Match:
    if path == PYTHON_SOURCES:
        code = [(name, place) for name, place in _python_files() if name != _TOPICS]
        return _Match(tuple(_Found(f"{STDLIB}/{name}", place, "text") for name, place in code))
    if path == PYTHON_PROSE:
        return _Match(tuple(_python_prose()))
    files: list[_Found] = []
    passed_over: list[Path] = []
    for place in _places(path):
        if place.is_dir():
            for file in _walk(place):
                if _usable(file, source):
                    files.append(_Found(file.as_posix(), file, _reader(file, source)))
                else:
                    passed_over.append(file)
        elif place.is_file():
            files.append(_Found(place.as_posix(), place, _reader(place, source)))
    return _Match(tuple(files), tuple(passed_over))


def _places(path: str) -> list[Path]:
    expanded = os.path.expanduser(path)
    if os.path.exists(expanded) or not glob.has_magic(expanded):
        return [Path(expanded)]
    return [Path(match) for match in sorted(glob.glob(expanded, recursive=True))]


def _walk(folder: Path) -> Iterator[Path]:
    """Regular files below `folder`; hidden files and folders are not documents."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(root, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _reader(file: Path, source: Source) -> Reader:
    if source.format == "auto":
        return "jsonl" if file.name.endswith(_JSONL) else "text"
    return source.format


def _usable(file: Path, source: Source) -> bool:
    """Whether a file met in a folder is taken; a file named by a path or a glob always is."""
    if source.format == "text":
        return True
    if source.format == "jsonl":
        return file.name.endswith(_JSONL)
    return file.name.endswith(_JSONL) or file.suffix.lower() in _TEXT_ENDINGS


_JSONL = (".jsonl", ".jsonl.gz")
_TEXT_ENDINGS = frozenset(
    f".{ending}"
    for line in (
        "txt text md markdown rst adoc org tex html htm xml csv tsv log json toml yaml yml ini cfg sql",
        "py pyi c h cc cpp cxx hpp cu java kt scala js jsx ts tsx go rs rb php swift m jl r lua pl hs ml",
        "ex erl clj lisp sh bash ps1 bat css scss proto cmake mk v sv vhd f90 f asm s",
    )
    for ending in line.split()
)


@functools.cache
def _python_files() -> tuple[tuple[str, Path], ...]:
    """(name, place) of every source file of the standard library, without installed packages."""
    library = Path(sysconfig.get_path("stdlib"))
    found = []
    for root, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _NOT_STANDARD]
        found += [Path(root, name) for name in names if name.endswith(".py")]
    return tuple((file.relative_to(library).as_posix(), file) for file in sorted(found))


_NOT_STANDARD = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TOPICS = "pydoc_data/topics.py"
"""The documentation topics as one dictionary: prose, not code; counted once."""
_TESTS = frozenset({"test", "tests", "idle_test"})


def _python_prose() -> Iterator[_Found]:
    """Docstrings of every module but the tests, whose docstrings say little, and the topics of `help()`."""
    for name, place in _python_files():
        if name == _TOPICS:
            yield _Found("topics", place, "topics")
        elif _TESTS.isdisjoint(name.split("/")):
            yield _Found(f"{DOCSTRINGS}/{name}", place, "docstrings")


def _add(found: dict[str, _Found], item: _Found, *, source: Source) -> None:
    known = found.setdefault(item.name, item)
    if known != item:
        raise DataError(
            f"source {source.name}: {known.location} and {item.location} would both be named {item.name}; "
            "give each a source of its own"
        )


def _describe(found: _Found, source: Source) -> InputFile:
    digest = xxhash.xxh3_128()
    try:
        with open(found.location, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"source {source.name}: {found.location} is not a regular file; leave it out")
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise unreadable(found.location, error, source=source.name) from None
    return InputFile(
        source=source.name,
        domain=source.domain or source.name,
        name=found.name,
        location=str(found.location),
        reader=found.reader,
        text_key=source.text_key,
        bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        checksum=digest.hexdigest(),
    )


def unreadable(location: str | Path, error: OSError, *, source: str) -> DataError:
    """The error for a file that exists and cannot be read."""
    return DataError(
        f"source {source}: {location} cannot be read: {error.strerror or error}; "
        "repair the file or its permissions, or leave it out of `paths`"
    )


def _why_missing(path: str) -> str:
    if path.startswith("python:"):
        if path in (PYTHON_SOURCES, PYTHON_PROSE):
            return "this Python comes without its source files; name files of your own instead"
        return f"there is no such built-in corpus; there are `{PYTHON_SOURCES}` and `{PYTHON_PROSE}`"
    place = Path(os.path.expanduser(path))
    if place.is_dir():
        return "this folder holds no file that this source can read; name its files with a glob or set `format`"
    if glob.has_magic(path):
        return f"no file in {Path.cwd()} matches; check the pattern (`**` crosses folders)"
    return f"no such file or folder in {Path.cwd()}; check the spelling and the working folder"


def _tell(files: tuple[Path, ...], *, path: str, source: Source) -> Iterator[str]:
    if files:
        endings = collections.Counter(file.suffix.lower() or "none" for file in files)
        listing = ", ".join(f"{ending} {count}" for ending, count in sorted(endings.items()))
        yield (
            f"source {source.name}: {len(files)} files in {path} are passed over by their endings "
            f'({listing}); a glob or format="text" takes them'
        )
