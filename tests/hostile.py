"""The server's side of the handshake, by hand, and what a hostile end of a connection may send."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
from collections.abc import Iterator

from ropewalk.base import network

SECRET = b"sixteen secret.."


def greet_client(link: socket.socket, secret: bytes, purpose: bytes) -> None:
    """What an honest server does, step by step."""
    ours = os.urandom(16)
    link.sendall(purpose + ours)
    said = bytearray()
    while len(said) < 48:
        said += link.recv(48 - len(said)) or b"\0" * 48
    link.sendall(network._proof(secret, purpose, b"server", ours, bytes(said[:16])))


def texts(draw: random.Random) -> Iterator[bytes]:
    """JSON of every wrong kind, and what only looks like JSON, without end."""
    deep = draw.choice([10, 100, 1000, 30_000])
    while True:
        wrong = draw.choice([None, True, -1, 2**70, 1e308, "", "\ud800", "../x", "a\0b", [], {}, [[]], {"a": 1}])
        yield draw.choice(
            [
                b"[" * deep,
                b"[" * deep + b"]" * deep,
                b'{"a":' * deep + b"1" + b"}" * deep,
                b"[]," * draw.randrange(1, 50_000),
                b"[" + b"[]," * draw.randrange(1, 20_000) + b"0]",
                json.dumps(wrong).encode(),
                json.dumps({"op": wrong, "run": wrong, "key": wrong, "file": wrong, "numbers": wrong}).encode(),
                json.dumps({"op": draw.choice(OPERATIONS), "run": wrong, "key": wrong, "file": wrong}).encode(),
                json.dumps(
                    {"op": draw.choice(OPERATIONS), "key": _key(draw), "numbers": wrong, "file": wrong}
                ).encode(),
                json.dumps([[wrong, wrong, wrong, wrong, wrong]]).encode(),
                json.dumps([["root/a", draw.choice([0, -1, 2**63]), draw.choice([5, 2**62]), wrong, ""]]).encode(),
                b'{"op": ' + b"9" * draw.choice([10, 5000]) + b"}",
                b'"' + b"\\" * draw.randrange(9) + b'"',
                draw.randbytes(draw.randrange(200)),
                b"\xff\xfe" + json.dumps(wrong).encode(),
                b"NaN",
                b"",
            ]
        )


OPERATIONS = ("list", "drop", "put", "manifest", "get", "check", "chunk", "done", "format")


def _key(draw: random.Random) -> dict[str, object]:
    key: dict[str, object] = {"run": "run", "step": 1, "rank": 0, "world": 1, "attempt": "a"}
    key[draw.choice([*key, "other"])] = draw.choice([None, [], {}, "../..", -1, 2**80, True, "x" * 500, "\0"])
    return key


def greetings(draw: random.Random, replayed: bytes) -> Iterator[bytes]:
    """What somebody says who does not know the secret."""
    while True:
        yield draw.choice(
            [
                b"",
                draw.randbytes(draw.randrange(1, 48)),
                draw.randbytes(48),
                draw.randbytes(5000),
                bytes(48),
                "ñandú".encode() * 20,
                replayed,
                replayed[:-1] + bytes([replayed[-1] ^ 1]),
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                struct.pack("!IIQ", 2**32 - 1, 2**32 - 1, 0),
                b"[" * 1000,
                b'{"nonce": "\xff", "proof": "\xc3\xa9"}',
            ]
        )
