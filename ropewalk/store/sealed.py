"""Bulk files that carry their own checksum: any content, then a footer of 32 bytes.

    offset 0        content, as if there were no footer
    last 32 bytes   `rwseal01`, xxh3-64 of the file's key, bytes of the content, their xxh3-64

The key says what the content is (a stage and the hash of all that it depends on): a sound file that lies under the name
of another is noticed too. Everything is hashed when a file is opened, at 5 to 10 GB/s from memory, once a process as
long as the file is not written again.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import xxhash

from ropewalk.base.errors import DamagedFile
from ropewalk.base.files import check_regular, committed_file, open_regular

FOOTER_BYTES = 32
_FOOTER = struct.Struct("<8sQQQ")
_MAGIC = b"rwseal01"


@contextlib.contextmanager
def sealed_file(path: Path, key: str, mode: str = "wb") -> Iterator[IO[Any]]:
    """An open file that replaces `path`, with its checksum, when the block ends without an exception."""
    with committed_file(path, mode) as file:
        yield file
        file.flush()
        append_seal(Path(file.name), key)


def append_seal(path: Path, key: str) -> None:
    """Appends the footer to a file that is being written, and makes the file durable."""
    with open(path, "rb+") as file:
        size = os.fstat(file.fileno()).st_size
        checksum = _hash_of(file.fileno(), size)
        file.seek(0, os.SEEK_END)
        file.write(_FOOTER.pack(_MAGIC, _identity(key), size, checksum))
        file.flush()
        os.fsync(file.fileno())


def verify(path: Path, key: str) -> int:
    """Bytes of the content of a sealed file, all of which were checked; DamagedFile says what is wrong."""
    try:
        status = check_regular(path)
    except FileNotFoundError:
        raise DamagedFile(f"{path}: this file is missing") from None
    return _verified(str(path), key, status.st_size, status.st_mtime_ns, status.st_ino)


def content_bytes(path: Path) -> int:
    """Bytes of the content of a sealed file, by its size alone."""
    return path.stat().st_size - FOOTER_BYTES


def read_content(path: Path, key: str) -> bytes:
    """The content of a sealed file; DamagedFile when it is not what was written."""
    size = verify(path, key)
    with open(path, "rb") as file:
        return file.read(size)


def checksum_of(path: Path) -> str:
    """xxh3-64 of a file in hexadecimal, for a manifest that lists it; DamagedFile when there is none."""
    try:
        with open_regular(path) as file:
            return f"{_hash_of(file.fileno(), os.fstat(file.fileno()).st_size):016x}"
    except FileNotFoundError:
        raise DamagedFile(f"{path}: this file is missing") from None


# Keyed by what changes whenever a file is written: a large artifact that several steps read is hashed once a process.
@functools.lru_cache(maxsize=1 << 16)
def _verified(path: str, key: str, size: int, modified_ns: int, inode: int) -> int:
    content = size - FOOTER_BYTES
    descriptor = os.open(path, os.O_RDONLY)
    try:
        footer = os.pread(descriptor, FOOTER_BYTES, content) if content >= 0 else b""
        magic, identity, written, checksum = _FOOTER.unpack(footer) if len(footer) == FOOTER_BYTES else (b"", 0, 0, 0)
        if magic != _MAGIC:
            raise DamagedFile(f"{path}: it does not end with a checksum")
        if written != content:
            raise DamagedFile(f"{path}: {content} bytes precede its checksum, {written} were written")
        if identity != _identity(key):
            raise DamagedFile(f"{path}: it is sound, but it is the content of another file")
        if _hash_of(descriptor, content) != checksum:
            raise DamagedFile(f"{path}: its bytes are not what was written")
    finally:
        os.close(descriptor)
    return content


def _hash_of(descriptor: int, size: int) -> int:
    """xxh3-64 of the first `size` bytes; read through a map, so that the interpreter is free for other threads."""
    if size == 0:
        return xxhash.xxh3_64_intdigest(b"")
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
        return xxhash.xxh3_64_intdigest(view)


def _identity(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode())
