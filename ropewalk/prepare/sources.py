"""Which files a recipe means: paths, folders, globs, URLs and the files of the running Python, in canonical order.

Every file has a name that does not depend on where the working folder lies (`texts/a.md`, `stdlib/ast.py`);
documents are identified and ordered by it.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import functools
import glob
import importlib.util
import io
import os
import posixpath
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.base.errors import DataError
from ropewalk.base.progress import counted
from ropewalk.config.renames import old_names

from . import remote
from .config import Prepare, Source
from .fingerprint import Fingerprint, row_groups, take_fingerprint
from .formats import Kind, Packing, Reader, kind_of, named_kind
from .readers.item import Part
from .readers.pdf import require_pypdf

if TYPE_CHECKING:
    from .checksums import Checksums

STDLIB, DOCSTRINGS = "stdlib", "docstrings"
"""Folders in the names of what comes from the Python of this machine."""
PYTHON_SOURCES = "python:stdlib"
PYTHON_PROSE = "python:prose"


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read, or one part of it, and how."""

    source: str
    domain: str
    name: str
    location: str
    reader: Reader
    packing: Packing
    settings: Source
    size: int
    """Bytes of the whole file."""
    stamp: str
    """Changes when the file does."""
    checksum: str
    """xxh3-128 of the content."""
    parts: tuple[Part, ...] = ()
    """In which it can be read; empty when it is read as a whole."""
    part: Part | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the file, or of the part."""
        return self.part.bytes if self.part else self.size

    def identity(self) -> dict[str, Any]:
        """What its documents depend on: all but where it lies, in which parts it is read, and how it is mixed."""
        return {
            "source": self.source,
            "domain": self.domain,
            "name": self.name,
            "reader": self.reader,
            "packing": self.packing,
            "checksum": self.checksum,
            "part": self.part,
            "settings": _what_reading_needs(self.settings),
        }


@dataclass(frozen=True, slots=True)
class Collection:
    """The files of all sources in canonical order, and what was passed over in their folders."""

    files: tuple[InputFile, ...]
    passed_over: tuple[str, ...]
    """A sentence or two for each path; empty when everything behind it is used."""


def collect_files(settings: Prepare, *, checksums: Checksums | None = None) -> Collection:
    """Every input file, source by source and then by name; reads each for its checksum unless `checksums` know it.

    Raises DataError for paths without a match (all of them), an unreadable file or folder, two files with one name,
    and MissingPackage when a format needs a library that is not installed.
    """
    matches = {(index, path): expand(path, source) for index, source, path in _paths(settings)}
    missing = [(index, path) for (index, path), match in matches.items() if not match.files]
    if missing:
        lines = [f'source {settings.sources[index].name}: "{path}": {_why_missing(path)}' for index, path in missing]
        raise DataError("\n".join(lines))
    if checksums is None:
        from .checksums import Checksums  # brings pyarrow along, which finding files does without

        checksums = Checksums()
    files: list[InputFile] = []
    passed_over: list[str] = []
    for index, source in enumerate(settings.sources):
        found: dict[str, Found] = {}
        for path in source.paths:
            match = matches[index, path]
            passed_over.extend(_tell(match, path=path, source=source))
            for item in match.files:
                _add(found, item, source=source)
        files.extend(_describe(found[name], source, checksums) for name in sorted(found))
    return Collection(tuple(files), tuple(passed_over))


@functools.cache
def _what_reading_needs(source: Source) -> dict[str, Any]:
    tree = old_names(dataclasses.asdict(source), "prepare.sources")
    return {key: value for key, value in tree.items() if key not in ("paths", "weight")}


def divided(files: Iterable[InputFile]) -> Iterator[InputFile]:
    """`files` in order, large ones in the parts in which they can be read: together the documents of the whole."""
    for file in files:
        if file.parts:
            yield from (dataclasses.replace(file, parts=(), part=part) for part in file.parts)
        else:
            yield file


def open_location(location: str, *, seek: bool) -> io.BufferedReader:
    """The bytes of a file or URL; with `seek`, at any place."""
    return remote.open_url(location, seek=seek) if remote.is_url(location) else open(location, "rb")


def stamp_of(location: str) -> str:
    """Text that changes when the file does."""
    if remote.is_url(location):
        return remote.stamp_of(location)
    status = os.stat(location)
    return _stamp(status.st_size, status.st_mtime_ns)


def missing_paths(settings: Prepare) -> list[tuple[int, str]]:
    """(index of the source, path) of every path that gives no file."""
    return [(index, path) for index, source, path in _paths(settings) if not expand(path, source).files]


def missing_packages(settings: Prepare) -> list[tuple[str, str, str]]:
    """(key of the setting, package, extra that installs it) of what these settings need and this Python has not."""
    needed = [("compression", "zstandard", "zstd")] if settings.compression == "zstd" else []
    missing = [each for each in needed if importlib.util.find_spec(each[1]) is None]
    if importlib.util.find_spec("pypdf") is None:  # else nothing has to be looked at
        found = {
            index: None
            for index, source, path in _paths(settings)
            if any(file.kind.reader == "pdf" for file in expand(path, source).files)
        }
        missing += [(f"sources.{index}.paths", "pypdf", "pdf") for index in found]
    return missing


def _paths(settings: Prepare) -> Iterator[tuple[int, Source, str]]:
    return ((index, source, path) for index, source in enumerate(settings.sources) for path in source.paths)


@dataclass(frozen=True, slots=True)
class Found:
    """A file that a path means."""

    name: str
    """Independent of the working folder, for ids."""
    location: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Match:
    """What a path means."""

    files: tuple[Found, ...]
    passed_over: tuple[str, ...] = ()
    """Files with endings that the source does not take."""
    no_files: tuple[tuple[str, str], ...] = ()
    """(name, what it is) of links, pipes and the like, in which there is nothing to read."""


def expand(path: str, source: Source) -> Match:
    """The files that a path of `source` means; DataError for a folder that cannot be opened."""
    if path == PYTHON_SOURCES:
        code = [(name, place) for name, place in _python_files() if name != _TOPICS]
        return Match(tuple(_built_in(f"{STDLIB}/{name}", place, "text") for name, place in code))
    if path == PYTHON_PROSE:
        return Match(tuple(_python_prose()))
    files: list[Found] = []
    passed_over: list[str] = []
    no_files: list[tuple[str, str]] = []
    for name, named in _url_names(path, source) if remote.is_url(path) else _local_names(path, source):
        kind = named_kind(name, source) if named else kind_of(name, source)
        if what := _no_file(name, source):
            no_files.append((name, what))
        elif kind.reader:
            files.append(Found(_readable(name), name, kind))
        else:
            passed_over.append(name)
    return Match(tuple(files), tuple(passed_over), tuple(no_files))


def _url_names(url: str, source: Source) -> Iterator[tuple[str, bool]]:
    """The files behind a URL, and whether it names them."""
    try:
        listing = remote.list_url(url)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(url, error, source=source.name) from None
    for name in listing.urls:
        inside = [] if listing.named else name.split("/")[url.rstrip("/").count("/") + 1 :]
        if not any(part.startswith(".") for part in inside):
            yield name, listing.named


def _local_names(path: str, source: Source) -> Iterator[tuple[str, bool]]:
    """What a path means that is no folder, and whether it names it; else it lies in a folder that it names."""
    try:
        for place in _places(path):
            if _is_folder(place):
                yield from ((name, False) for name in _walk(place))
            elif os.path.lexists(place):
                yield place.as_posix(), True
    except OSError as error:
        raise unreadable(error.filename or path, error, source=source.name) from None


def _readable(name: str) -> str:
    """A name that is no UTF-8, with what is wrong replaced: names stand in ledgers and reports."""
    return os.fsencode(name).decode("utf-8", "replace")


def _places(path: str) -> list[Path]:
    expanded = os.path.expanduser(path)
    if os.path.lexists(expanded) or not glob.has_magic(expanded):
        return [Path(expanded)]
    for folder in _searched(expanded):
        os.scandir(folder).close()  # `glob` passes over a folder that cannot be opened
    return [Path(match) for match in sorted(glob.glob(expanded, recursive=True))]


def _searched(pattern: str) -> Iterator[str]:
    """The folders in which `glob` looks for names."""
    folder = os.path.dirname(pattern)
    while glob.has_magic(folder):
        yield from glob.glob(os.path.join(folder, ""), recursive=True)
        folder = os.path.dirname(folder)
    if os.path.isdir(folder or "."):
        yield folder or "."


def _walk(folder: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
    """Whatever lies below `folder` and is none; hidden files and folders are not documents.

    Linked folders are followed, except back to one of those `above`, whose files are there already.
    """
    status = folder.stat()
    itself = (status.st_dev, status.st_ino)
    if itself in above:
        return
    with os.scandir(folder) as entries:
        shown = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in shown:
        place = folder / entry.name
        if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and _is_folder(place)):
            yield from _walk(place, above | {itself})
        else:
            yield place.as_posix()


def _is_folder(place: Path) -> bool:
    return stat.S_ISDIR(_mode(place))


def _mode(place: str | Path) -> int:
    """What lies at a place or behind a link, 0 for nothing; OSError when nobody can tell."""
    try:
        return os.stat(place).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return 0
        raise


def _no_file(name: str, source: Source) -> str:
    """What a name stands for that can have no documents; empty for a file."""
    if remote.is_url(name):
        return ""
    try:
        mode = _mode(name)
    except OSError as error:
        raise unreadable(name, error, source=source.name) from None
    if stat.S_ISREG(mode):
        # Files of the kernel look regular, have no end and may wait for ever, as /proc/kmsg does. Devices are told by
        # their type: below /dev, shared memory holds ordinary files.
        return "files of the kernel" if os.path.realpath(name).startswith(_KERNEL) else ""
    return "pipes, sockets or devices" if mode else "links that lead nowhere"


@functools.cache
def _python_files() -> tuple[tuple[str, Path], ...]:
    """(name, place) of every source file of the standard library, without installed packages."""
    library = Path(sysconfig.get_path("stdlib"))
    found = []
    for root, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _NOT_STANDARD]
        found += [Path(root, name) for name in names if name.endswith(".py")]
    return tuple((file.relative_to(library).as_posix(), file) for file in sorted(found))


_KERNEL = ("/proc/", "/sys/")
_NOT_STANDARD = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TOPICS = "pydoc_data/topics.py"
"""The documentation topics as one dictionary: prose, not code; counted once."""
_TESTS = frozenset({"test", "tests", "idle_test"})


def _python_prose() -> Iterator[Found]:
    """Docstrings of every module but the tests, whose docstrings say little, and the topics of `help()`."""
    for name, place in _python_files():
        if name == _TOPICS:
            yield _built_in("topics", place, "topics")
        elif _TESTS.isdisjoint(name.split("/")):
            yield _built_in(f"{DOCSTRINGS}/{name}", place, "docstrings")


def _built_in(name: str, place: Path, reader: Reader) -> Found:
    return Found(name, str(place), Kind("", reader, name))


def _add(found: dict[str, Found], item: Found, *, source: Source) -> None:
    known = found.setdefault(item.name, item)
    if known != item:
        raise DataError(
            f"source {source.name}: {known.location} and {item.location} would both be named {item.name}; "
            "give each a source of its own"
        )


def _describe(found: Found, source: Source, checksums: Checksums) -> InputFile:
    assert found.kind.reader is not None, "what cannot be read is passed over"
    if found.kind.reader == "pdf":
        require_pypdf(found.name)
    try:
        look = _look_at_url if remote.is_url(found.location) else _look_at_file
        taken, stamp = look(found, checksums)
    except OSError as error:
        raise unreadable(found.location, error, source=source.name) from None
    return InputFile(
        source=source.name,
        domain=source.domain or source.name,
        name=found.name,
        location=found.location,
        reader=found.kind.reader,
        packing=found.kind.packing,
        settings=source,
        size=taken.bytes,
        stamp=stamp,
        checksum=taken.checksum,
        parts=taken.parts,
    )


def _look_at_file(found: Found, checksums: Checksums) -> tuple[Fingerprint, str]:
    hashed = checksums.of(found.location, lines=_is_plain(found, "jsonl"))
    parts = hashed.parts
    if _is_plain(found, "parquet"):
        with open(found.location, "rb") as file:
            parts = row_groups(file)
    return Fingerprint(hashed.bytes, hashed.checksum, parts), _stamp(hashed.bytes, hashed.modified_ns)


def _look_at_url(found: Found, checksums: Checksums) -> tuple[Fingerprint, str]:
    """Reads the whole file: stores tell sizes and times, and few of them checksums."""
    stamp = remote.stamp_of(found.location)
    lines, table = _is_plain(found, "jsonl"), _is_plain(found, "parquet")
    ranges = (lines or table) and remote.gives_ranges(found.location)
    with remote.open_url(found.location, seek=False) as stream:
        taken = take_fingerprint(stream, lines=lines and ranges)
    if table and ranges:
        with remote.open_url(found.location, seek=True) as stream:
            taken = dataclasses.replace(taken, parts=row_groups(stream))
    return taken, stamp


def _is_plain(found: Found, reader: Reader) -> bool:
    return found.kind.reader == reader and not found.kind.packing


def _stamp(size: int, modified_ns: int) -> str:
    return f"{size} {modified_ns}"


def unreadable(location: str | Path, error: OSError, *, source: str) -> DataError:
    """The error for a file or folder that exists and cannot be read."""
    remedy = "repair it or its permissions, or leave it out of `paths`"
    if remote.is_url(str(location)):
        remedy = "check the address and the network and run the same command again, or leave it out of `paths`"
    return DataError(f"source {source}: {location} cannot be read: {error.strerror or error}; {remedy}")


def _why_missing(path: str) -> str:
    if path.startswith("python:"):
        if path in (PYTHON_SOURCES, PYTHON_PROSE):
            return "this Python comes without its source files; name files of your own instead"
        return f"there is no such built-in corpus; there are `{PYTHON_SOURCES}` and `{PYTHON_PROSE}`"
    if remote.is_url(path):
        return "nothing that this source can read; check the address (`*` for many files, `/` at the end of a folder)"
    place = Path(os.path.expanduser(path))
    if place.is_dir():
        return "this folder holds no file that this source can read; name its files with a glob or set `format`"
    if os.path.lexists(place):
        return "neither a file nor a folder, or a link that leads nowhere; name a file or a folder"
    if glob.has_magic(path):
        return f"no file in {Path.cwd()} matches; check the pattern (`**` crosses folders)"
    return f"no such file or folder in {Path.cwd()}; check the spelling and the working folder"


def _tell(match: Match, *, path: str, source: Source) -> Iterator[str]:
    if names := match.passed_over:
        endings = _by_kind(_readable(posixpath.splitext(name)[1]).lower() or "none" for name in names)
        yield (
            f"source {source.name}: passed over in {path} by their endings: {counted(len(names), 'file')} "
            f'({endings}); a glob or format="text" takes them'
        )
    if match.no_files:
        how_many, kinds = counted(len(match.no_files), "name"), _by_kind(what for _, what in match.no_files)
        yield (
            f"source {source.name}: passed over in {path}: {how_many} without a file behind ({kinds}), such as "
            f"{_readable(match.no_files[0][0])}"
        )


def _by_kind(kinds: Iterable[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(collections.Counter(kinds).items()))
