"""What nodes say to each other over TCP: who they are, which ranges they want, the bytes with their checksums.

    handshake   server: magic, nonce   client: nonce, HMAC-SHA256(secret, ...)   server: HMAC-SHA256(secret, ...)
    request     length (4 bytes), JSON [[file, start, stop, checksum, name], ...]
    reply       for each item: status (1), length (8), xxh3-64 (8), bytes; or one item of status 1 with a text

Both sides prove that they know the secret; it never travels. The bytes themselves are checked, not hidden: peers belong
on a network of their own, as the gradients do.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
from collections.abc import Sequence

import xxhash

from ropewalk.store.items import Item

MAGIC = b"rwcache1"
MOST_REQUEST_BYTES = 16 << 20
MOST_REPLY_BYTES = 256 << 20
"""A server holds the items of one request in memory at once."""
_NONCE = 16
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<BQQ")
_OK, _FAILED = 0, 1


class WireError(ConnectionError):
    """What came is not what was asked, or not by these rules; the connection is of no use any more."""


class Refused(WireError):
    """The peer is well and says that it cannot give these items."""


def greet_client(connection: socket.socket, secret: bytes) -> bool:
    """The server's side of the handshake; False when the client does not know the secret."""
    ours = os.urandom(_NONCE)
    connection.sendall(MAGIC + ours)
    theirs = _receive(connection, _NONCE)
    proof = _receive(connection, 32)
    if not hmac.compare_digest(proof, _proof(secret, b"client", ours, theirs)):
        return False
    connection.sendall(_proof(secret, b"server", ours, theirs))
    return True


def greet_server(connection: socket.socket, secret: bytes) -> None:
    """The client's side of the handshake."""
    if _receive(connection, len(MAGIC)) != MAGIC:
        raise WireError("what listens there is not a ropewalk cache")
    theirs = _receive(connection, _NONCE)
    ours = os.urandom(_NONCE)
    connection.sendall(ours + _proof(secret, b"client", theirs, ours))
    try:
        proof = _receive(connection, 32)
    except WireError:
        raise WireError("the peer hung up on our greeting; is `load.cache.secret_file` the same there?") from None
    if not hmac.compare_digest(proof, _proof(secret, b"server", theirs, ours)):
        raise WireError("the peer does not know the secret")


def send_request(connection: socket.socket, items: Sequence[Item]) -> None:
    """Asks for `items`."""
    wanted = [[item.file, item.start, item.stop, item.checksum, item.name] for item in items]
    body = json.dumps(wanted).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive_request(connection: socket.socket) -> list[Item] | None:
    """The items that a client asks for; None when it has hung up."""
    first = connection.recv(1)
    if not first:
        return None
    (length,) = _LENGTH.unpack(first + _receive(connection, _LENGTH.size - 1))
    if length > MOST_REQUEST_BYTES:
        raise WireError(f"a request of {length} bytes")
    try:
        return [_item(entry) for entry in json.loads(_receive(connection, length))]
    except (ValueError, TypeError) as error:
        raise WireError(f"a request that cannot be read: {error}") from None


def send_items(connection: socket.socket, data: Sequence[bytes | memoryview]) -> None:
    """Answers with the bytes asked for."""
    for value in data:
        connection.sendall(_HEAD.pack(_OK, len(value), xxhash.xxh3_64_intdigest(value)))
        connection.sendall(value)


def send_failure(connection: socket.socket, text: str) -> None:
    """Answers that the items cannot be had here."""
    body = text.encode()
    connection.sendall(_HEAD.pack(_FAILED, len(body), xxhash.xxh3_64_intdigest(body)) + body)


def receive_items(connection: socket.socket, items: Sequence[Item]) -> list[bytes]:
    """The bytes of `items`, each checked against what was sent."""
    data = []
    for item in items:
        status, length, checksum = _HEAD.unpack(_receive(connection, _HEAD.size))
        if status == _FAILED:
            raise Refused(_receive(connection, min(length, 1 << 16)).decode(errors="replace"))
        if status != _OK or length != len(item):
            raise WireError(f"{item.file}: {length} bytes of status {status} came, {len(item)} were asked for")
        value = _receive(connection, length)
        if xxhash.xxh3_64_intdigest(value) != checksum or item.checksum not in (None, checksum):
            raise WireError(f"{item.file}: bytes {item.start} to {item.stop} came changed")
        data.append(value)
    return data


def _item(entry: object) -> Item:
    match entry:
        case [str(file), int(start), int(stop), int() | None as checksum, str(name)] if 0 <= start <= stop:
            return Item(file, start, stop, checksum, name)
    raise ValueError(f"not an item: {entry!r:.100}")


def _proof(secret: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret, side + server_nonce + client_nonce, "sha256")


def _receive(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes; a connection that ends before is an error."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise WireError("the connection ended in the middle")
        view = view[count:]
    return bytes(buffer)
