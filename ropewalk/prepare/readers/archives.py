"""ZIP and TAR: every member is read as a file of its own, whatever is packed in it, up to a depth.

Nothing is written to disk, so that no name can lead out of a folder; names that try, links and devices are faults all
the same, because whoever made them meant no document. A member's id is `archive!member`.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import io
import re
import stat
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from typing import IO, cast

from ..formats import kind_of
from .dispatch import read_items
from .item import Budget, Fault, Input, Item
from .salvage import salvaged
from .streams import BLOCK_BYTES, Readable, buffered, unpacked, whole


def zip_members(given: Input) -> Iterator[Item]:
    """The documents of every member, in the order of the directory at the archive's end; without it, what is left."""
    _check_depth(given)
    stream = given.stream if given.stream.seekable() else io.BytesIO(whole(given.stream, limit=given.limit))
    labels = _Labels()
    with contextlib.ExitStack() as stack:
        try:
            archive = stack.enter_context(opened_zip(stream))
        except Fault:
            for name, data in salvaged(stream, limit=given.limit, budget=given.budget):
                yield from _documents(name, labels.of(name), io.BytesIO(data), given)
            return
        for member in archive.infolist():
            if not member.filename.endswith("/"):
                yield from _zip_member(archive, member, labels, given)


def tar_members(given: Input) -> Iterator[Item]:
    """The documents of every member in order, read as a stream. What stands behind the end of an archive is a fault."""
    _check_depth(given)
    labels = _Labels()
    with _tar_errors():
        stream = cast(IO[bytes], _Ending(given.stream))
        archive = tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header)  # noqa: SIM115 - owns no file
    while (member := _following(archive)) is not None:
        if member.issym() or member.islnk():
            yield Item(labels.of(member.name), fault="link")
        elif member.isreg() and not member.issparse():
            file = archive.extractfile(member)
            assert file is not None, "a regular member can be read"
            yield from _documents(member.name, labels.of(member.name), cast(Readable, file), given)
        elif not member.isdir():
            yield Item(labels.of(member.name), fault="not_a_file")
    _check_end(archive)


@contextlib.contextmanager
def opened_zip(stream: IO[bytes]) -> Iterator[zipfile.ZipFile]:
    """The archive in `stream`; Fault when its directory is damaged."""
    with _zip_errors():
        archive = zipfile.ZipFile(stream)
    with archive:
        yield archive


def member_data(archive: zipfile.ZipFile, name: str, *, limit: int, budget: Budget) -> bytes:
    """The bytes of one member; Fault when there is none of this name, or it is damaged or too large."""
    try:
        member = archive.getinfo(name)
    except KeyError:
        raise Fault("missing_member") from None
    with _open_member(archive, member) as file:
        return whole(buffered(file, budget=budget), limit=limit)


def _zip_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, labels: _Labels, given: Input) -> Iterator[Item]:
    label = labels.of(member.filename)
    if stat.S_ISLNK(member.external_attr >> 16):
        yield Item(label, fault="link")
        return
    try:
        file = _open_member(archive, member)
    except Fault as fault:
        yield fault.item(label)
        return
    with file:
        yield from _documents(member.filename, label, file, given)


def _documents(name: str, label: str, file: Readable, given: Input) -> Iterator[Item]:
    """The documents of one member."""
    parts = name.replace("\\", "/").split("/")
    kind = kind_of(name, given.settings)
    if parts[0] == "" or ".." in parts or re.match("[A-Za-z]:", name):
        yield Item(label, fault="unsafe_path")
        return
    if kind.reader is None or any(part.startswith((".", "__MACOSX")) for part in parts if part != "."):
        yield Item(label, fault="passed_over")
        return
    inner = Input(
        stream=unpacked(buffered(file, budget=given.budget), kind.packing, budget=given.budget),
        reader=kind.reader,
        settings=given.settings,
        budget=given.budget,
        name=kind.name,
        depth=given.depth + 1,
    )
    for item in read_items(inner):
        yield item._replace(suffix=label + item.suffix)


class _Labels:
    """Ids of members: readable, and each used once, though an archive may hold a name twice."""

    def __init__(self) -> None:
        self._used: collections.Counter[str] = collections.Counter()

    def of(self, name: str) -> str:
        """`!name`, or `!name#2`; what has a meaning in ids is written as in URLs."""
        text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        label = "!" + re.sub(r"[%!:#\x00-\x1f\x7f]", lambda found: f"%{ord(found[0]):02X}", text)
        self._used[label] += 1
        return label if self._used[label] == 1 else f"{label}#{self._used[label]}"


def _check_depth(given: Input) -> None:
    deepest = given.settings.limits.nesting
    if given.depth >= deepest:
        raise Fault("too_nested", value=given.depth + 1, threshold=deepest)


def _open_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> zipfile.ZipExtFile:
    if member.flag_bits & 1:
        raise Fault("encrypted")
    with _zip_errors():
        return cast(zipfile.ZipExtFile, archive.open(member))


@contextlib.contextmanager
def _zip_errors() -> Iterator[None]:
    """What `zipfile` raises for headers that make no sense becomes Fault."""
    try:
        yield
    except NotImplementedError:
        raise Fault("unsupported_compression") from None
    except (zipfile.BadZipFile, struct.error, ValueError, OverflowError, EOFError) as error:
        raise Fault("damaged") from error
    except OSError as error:
        # A header that points to a negative place makes the system refuse to go there.
        if error.errno not in (None, errno.EINVAL):
            raise
        raise Fault("damaged") from error


_MOST_HEADER_BYTES = 1 << 20
_LONG_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class _Header(tarfile.TarInfo):
    """A header that speaks up: `tarfile` takes one that makes no sense for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Header:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise Fault("damaged") from error

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        header = super().frombuf(buf, encoding, errors)
        # A negative size makes `tarfile` go in circles (CVE-2025-8194); a long name is read into memory at once.
        if header.size < 0 or (header.type in _LONG_HEADERS and header.size > _MOST_HEADER_BYTES):
            raise Fault("damaged")
        return header


class _Ending:
    """A stream that says so when it is read on and on behind its end.

    `tarfile` passes over a member block by block, without a look at what it gets: a header that claims 2^90 bytes would
    keep it busy for ever.
    """

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._reads_behind_end = 0

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end."""
        data = self._stream.read(size)
        self._reads_behind_end += not data
        if self._reads_behind_end > 10:
            raise Fault("damaged")
        return data


def _following(archive: tarfile.TarFile) -> tarfile.TarInfo | None:
    with _tar_errors():
        member = archive.next()
    # The list of members is for those who look back; it would grow with the archive.
    archive.members.clear()  # type: ignore[attr-defined]
    if member is not None and member.size < 0:
        raise Fault("damaged")
    return member


def _check_end(archive: tarfile.TarFile) -> None:
    """Behind its end an archive has zeros; anything else is members that nobody would read."""
    with _tar_errors():
        while block := cast(IO[bytes], archive.fileobj).read(BLOCK_BYTES):
            if block.count(0) != len(block):
                raise Fault("damaged")


@contextlib.contextmanager
def _tar_errors() -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise Fault("damaged") from error
