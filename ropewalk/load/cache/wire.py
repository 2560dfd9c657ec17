"""What nodes say to each other over TCP: who they are, which ranges they want, the bytes with their checksums.

    handshake   see `base/network.py`
    request     length (4 bytes), JSON [[file, start, stop, checksum, name], ...]
    reply       for each item: status (1), length (8), xxh3-64 (8), bytes; or one item of status 1 with a text

Both sides prove that they know the secret; it never travels. The bytes themselves are checked, not hidden: peers belong
on a network of their own, as the gradients do. Neither end believes the other: lengths and nesting are bounded before
anything is parsed, and a whole message has a deadline.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence

import xxhash

from ropewalk.base.network import allowed_s, parse_json, receive
from ropewalk.store.items import Item

PURPOSE = b"rwcache2"
TIMEOUT_S = 60.0
"""A message that is no further after so long, and its bytes at a modest pace, is given up."""
MOST_REQUEST_BYTES = 16 << 20
MOST_REPLY_BYTES = 256 << 20
"""A server holds the items of one request in memory at once."""
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<BQQ")
_OK, _FAILED = 0, 1
_MOST_TEXT_BYTES = 1 << 16
_MOST_OFFSET = 1 << 62


class WireError(ConnectionError):
    """What came is not what was asked, or not by these rules; the connection is of no use any more."""


class Refused(WireError):
    """The peer is well and says that it cannot give these items."""


def send_request(connection: socket.socket, items: Sequence[Item]) -> None:
    """Asks for `items`."""
    wanted = [[item.file, item.start, item.stop, item.checksum, item.name] for item in items]
    body = json.dumps(wanted).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive_request(connection: socket.socket, *, timeout_s: float = TIMEOUT_S) -> list[Item] | None:
    """The items that a client asks for, whenever it does; None when it has hung up."""
    connection.settimeout(None)
    first = connection.recv(1)
    if not first:
        return None
    deadline = time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(first + _receive(connection, _LENGTH.size - 1, deadline))
    if length > MOST_REQUEST_BYTES:
        raise WireError(f"a request of {length} bytes")
    text = _receive(connection, length, deadline + allowed_s(length, 0))
    try:
        entries = parse_json(text, most_depth=2)
        if not isinstance(entries, list):
            raise ValueError("not a list")
        return [_item(entry) for entry in entries]
    except ValueError as error:
        raise WireError(f"a request that cannot be read: {error}") from None


def send_items(connection: socket.socket, data: Sequence[bytes | memoryview], *, timeout_s: float = TIMEOUT_S) -> None:
    """Answers with the bytes asked for."""
    for value in data:
        connection.settimeout(allowed_s(len(value), timeout_s))
        connection.sendall(_HEAD.pack(_OK, len(value), xxhash.xxh3_64_intdigest(value)))
        connection.sendall(value)


def send_failure(connection: socket.socket, text: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """Answers that the items cannot be had here."""
    body = text.encode(errors="backslashreplace")[:_MOST_TEXT_BYTES]
    connection.settimeout(timeout_s)
    connection.sendall(_HEAD.pack(_FAILED, len(body), xxhash.xxh3_64_intdigest(body)) + body)


def receive_items(connection: socket.socket, items: Sequence[Item], *, timeout_s: float = TIMEOUT_S) -> list[bytes]:
    """The bytes of `items`, each checked against what was sent; each has `timeout_s` beside the time its bytes take."""
    data = []
    for item in items:
        deadline = time.monotonic() + allowed_s(len(item), timeout_s)
        status, length, checksum = _HEAD.unpack(_receive(connection, _HEAD.size, deadline))
        if status == _FAILED:
            text = _receive(connection, min(length, _MOST_TEXT_BYTES), deadline)
            if length > _MOST_TEXT_BYTES or xxhash.xxh3_64_intdigest(text) != checksum:
                raise WireError(f"{item.file}: a refusal of {length} bytes that cannot be read")
            raise Refused(text.decode(errors="replace"))
        if status != _OK or length != len(item):
            raise WireError(f"{item.file}: {length} bytes of status {status} came, {len(item)} were asked for")
        value = _receive(connection, length, deadline)
        if xxhash.xxh3_64_intdigest(value) != checksum or item.checksum not in (None, checksum):
            raise WireError(f"{item.file}: bytes {item.start} to {item.stop} came changed")
        data.append(value)
    return data


def _item(entry: object) -> Item:
    match entry:
        case [str(file), int(start), int(stop), int() | None as checksum, str(name)]:
            whole = not any(isinstance(value, bool) for value in (start, stop, checksum))
            if whole and 0 <= start <= stop < _MOST_OFFSET and 0 <= (checksum or 0) < 1 << 64 and "\0" not in file:
                return Item(file, start, stop, checksum, name)
    raise ValueError("not an item")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly `size` bytes; a connection that ends before is an error."""
    return bytes(receive(connection, size, deadline=deadline))
