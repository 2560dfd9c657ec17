"""What is left of a ZIP archive that was cut off: its directory stood at the end, but members have headers too."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import IO

from .item import Budget, Fault
from .streams import BLOCK_BYTES

_HEADER = struct.Struct("<4s5H3L2H")
"""Signature, version, flags, method, time, date, checksum, packed bytes, bytes, length of the name, of the rest."""
_MEMBER, _STORED, _DEFLATED = b"PK\x03\x04", 0, 8
_ENCRYPTED, _SIZES_BEHIND, _UTF8 = 1, 8, 1 << 11


def salvaged(stream: IO[bytes], *, limit: int, budget: Budget) -> Iterator[tuple[str, bytes]]:
    """(name, content) of every member that is whole, in order; ends with Fault, where the next one is not."""
    stream.seek(0)
    while True:
        head = stream.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_MEMBER):
            raise Fault("damaged")
        _, _, flags, method, _, _, checksum, packed, _, name_bytes, rest_bytes = _HEADER.unpack(head)
        name = stream.read(name_bytes).decode("utf-8" if flags & _UTF8 else "cp437", "replace")
        stream.read(rest_bytes)
        if flags & _ENCRYPTED:
            raise Fault("encrypted")
        if method == _DEFLATED:
            data = _inflated(stream, limit=limit)
        elif method == _STORED and not flags & _SIZES_BEHIND and packed <= limit:
            data = stream.read(packed)
        else:
            raise Fault("damaged")
        budget.spend(len(data))
        if flags & _SIZES_BEHIND:
            checksum = _pass_over_sizes(stream)
        if zlib.crc32(data) != checksum:
            raise Fault("damaged")
        yield name, data


def _inflated(stream: IO[bytes], *, limit: int) -> bytes:
    """The next member's content; the stream stands behind it."""
    inflate = zlib.decompressobj(-15)
    pieces: list[bytes] = []
    room = limit + 1
    while not inflate.eof:
        block = inflate.unconsumed_tail or stream.read(BLOCK_BYTES)
        if not block or room <= 0:
            raise Fault("damaged")
        try:
            pieces.append(inflate.decompress(block, room))
        except zlib.error as error:
            raise Fault("damaged") from error
        room -= len(pieces[-1])
    stream.seek(-len(inflate.unused_data), 1)
    return b"".join(pieces)


def _pass_over_sizes(stream: IO[bytes]) -> int:
    """The checksum among the sizes that follow a member: 12 bytes, with 8 more in large archives, 4 for a signature."""
    behind = stream.read(24 + len(_MEMBER))
    length = behind.find(_MEMBER)
    if length not in (12, 16, 20, 24):
        raise Fault("damaged")
    stream.seek(length - len(behind), 1)
    start = 4 if behind.startswith(b"PK\x07\x08") else 0
    return int.from_bytes(behind[start : start + 4], "little")
