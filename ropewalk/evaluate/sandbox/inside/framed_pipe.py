"""Messages on pipes: a length and so many bytes."""

from __future__ import annotations

import os
import struct

_LENGTH = struct.Struct(">I")
MOST_BYTES = 16 << 20
"""Of a message; a longer answer is no answer."""


def send(file: int, data: bytes) -> None:
    """Writes a message."""
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:
        left = left[os.write(file, left) :]


def receive(file: int) -> bytes | None:
    """The next message; None at the end of the stream. ValueError if it is too long."""
    head = _exactly(file, _LENGTH.size)
    if head is None:
        return None
    size = _LENGTH.unpack(head)[0]
    if size > MOST_BYTES:
        raise ValueError(f"a message of {size} bytes; the maximum is {MOST_BYTES}")
    return _exactly(file, size)


def _exactly(file: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(file, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
