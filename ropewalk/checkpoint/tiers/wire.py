"""The wire protocol between peers. No torch.

A message has two lengths, a JSON header with its hash, and a body of at most one chunk or manifest. Neither end trusts
the other: lengths are bounded, memory grows only with received bytes, nesting is checked before the header is parsed,
and each message has a deadline.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

import xxhash

from ropewalk.base.errors import StorageError
from ropewalk.base.network import allowed_s, parse_json, receive

from .gap_scheduler import TransferGate

PURPOSE = b"rwpeers2"
HEADER_BYTES = 16 << 20
BODY_BYTES = 64 << 20
"""Maximum body; a manifest of 100,000 tensors has 30 MB, a chunk 4 MB."""
_FRAME = struct.Struct("!IIQ")
"""Bytes of the header, bytes of the body, xxh3-64 of the header."""
_MOST_ERROR = 2000


class Wire:
    """Messages over an authenticated connection."""

    def __init__(self, link: socket.socket, *, timeout_s: float) -> None:
        """`timeout_s`: without data; for a whole message, in addition to the time of its bytes at a modest rate."""
        self._link, self._timeout_s = link, timeout_s
        self._buffer = bytearray(1 << 16)

    def ask(self, operation: str, body: bytes = b"", **fields: Any) -> tuple[dict[str, Any], memoryview]:
        """Sends a request and returns the response."""
        self.send({"op": operation, **fields}, body)
        return self.receive_answer()

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        frame = _framed(header, len(body))
        self._link.settimeout(allowed_s(len(frame) + len(body), self._timeout_s))
        self._link.sendall(frame)
        if body:
            self._link.sendall(body)

    def send_file(
        self, header: dict[str, Any], file: Any, begin: int, end: int, gate: TransferGate | None = None
    ) -> None:
        """Sends a message whose body is a range of a file, in slices released by the gate."""
        self._link.settimeout(self._timeout_s)
        self._link.sendall(_framed(header, end - begin))
        while begin < end:
            count = min(end - begin, gate.slice_bytes) if gate else end - begin
            if gate:
                gate.wait(count)
            if self._link.sendfile(file, begin, count) != count:
                raise OSError(f"{file.name}: shorter than its manifest says")
            begin += count

    def receive_answer(self) -> tuple[dict[str, Any], memoryview]:
        """The next message; raises the error that it contains."""
        header, body = self.receive()
        if "error" in header:
            raise StorageError(f"peer: {str(header['error'])[:_MOST_ERROR]}")
        return header, body

    def receive(self) -> tuple[dict[str, Any], memoryview]:
        message = self.receive_or_end()
        if message is None:
            raise ConnectionError("the connection was closed")
        return message

    def receive_or_end(self) -> tuple[dict[str, Any], memoryview] | None:
        """The next message, or None at the end. Its body is valid until the next call."""
        self._link.settimeout(self._timeout_s)
        first = self._link.recv(1)
        if not first:
            return None
        header_bytes, body_bytes, expected = _FRAME.unpack(first + self._exactly(_FRAME.size - 1))
        if header_bytes > HEADER_BYTES or body_bytes > BODY_BYTES:
            raise ValueError(f"a message of {header_bytes} and {body_bytes} bytes")
        text = bytes(self._exactly(header_bytes))
        if xxhash.xxh3_64_intdigest(text) != expected:
            raise ValueError("a damaged header")
        header = parse_json(text)
        if not isinstance(header, dict):
            raise ValueError("a header that is not an object")
        return header, self._exactly(body_bytes)

    def _exactly(self, size: int) -> memoryview:
        deadline = time.monotonic() + allowed_s(size, self._timeout_s)
        view = receive(self._link, size, deadline=deadline, buffer=self._buffer)
        if isinstance(view.obj, bytearray):
            self._buffer = view.obj
        return view


def _framed(header: dict[str, Any], body_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return _FRAME.pack(len(text), body_bytes, xxhash.xxh3_64_intdigest(text)) + text
