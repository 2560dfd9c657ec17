"""Shards in the memory of other machines, over TCP. No torch.

A machine that serves keeps what it is sent in its own `Memory`, so replicas outlive the process that serves them too.
A message is two lengths, a JSON header with its hash, and a body, at most one chunk of a file. Chunks are checked
against the manifest by whoever receives them, and sent again when they arrive damaged; whoever restores checks them
once more. Both ends prove that they know a shared secret before anything else is said. What passes is not encrypted:
the network between the machines of a run is taken for private.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from ropewalk.base.errors import DataError, RopewalkError, StorageError

from .copies import Key, Offer, plain_name
from .format import FILE, CheckpointManifest, parse_checkpoint_manifest
from .memory import Memory, finish_shard
from .payload import FileEntry

_FRAME = struct.Struct("!IIQ")
"""Bytes of the header, bytes of the body, xxh3-64 of the header."""
_HEADER_BYTES = 16 << 20
_BODY_BYTES = 256 << 20
"""The most of one message; a manifest of a hundred thousand tensors has 30 MB, a chunk 4."""
_STRANGER_BYTES = 1024
"""The most of a message before the secret is proven."""
_ROUNDS = 3
"""How often a chunk is sent before the way there is given up."""
_CONNECTIONS = 16

_log = logging.getLogger(__name__)


class Gate(Protocol):
    """Says when bytes may go out."""

    @property
    def slice_bytes(self) -> int:
        """The most that may go at once."""
        ...

    def wait(self, size: int) -> None:
        """Returns when the next `size` bytes may go."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """How sending a shard went."""

    bytes: int
    seconds: float
    resent: int
    """Chunks that arrived damaged and were sent again."""


class Peer:
    """A machine that serves, seen from another. What fails on the way is a StorageError that names it."""

    def __init__(self, address: str, *, secret: bytes, timeout_s: float = 30.0) -> None:
        self.address, self._secret, self._timeout = address, secret, timeout_s

    def put(self, key: Key, folder: Path, *, gate: Gate | None = None) -> Sent:
        """Sends the shard in `folder`; returns when the peer has every chunk of it, checked."""
        start, sent, resent = time.perf_counter(), 0, 0
        text = (folder / FILE).read_bytes()
        manifest = parse_checkpoint_manifest(text, folder)
        todo = [(file, number) for file, entry in manifest.files.items() for number in range(len(entry.chunks))]
        with self._talk() as wire:
            wire.ask("put", text, key=dataclasses.asdict(key))
            for _ in range(_ROUNDS):
                for name, group in _by_file(todo):
                    with open(folder / name, "rb") as file:
                        for number in group:
                            begin, end = chunk_range(manifest.files[name], number)
                            wire.send_file({"op": "chunk", "file": name, "number": number}, file, begin, end, gate)
                            sent += end - begin
                todo = [(file, number) for file, number in wire.ask("done")[0]["missing"]]
                if not todo:
                    return Sent(bytes=sent, seconds=time.perf_counter() - start, resent=resent)
                resent += len(todo)
        raise StorageError(
            f"peer {self.address}: {len(todo)} chunks of {key} arrive damaged again and again ({todo[0][0]}, chunk "
            f"{todo[0][1]}, ...); the copy in memory or the network is broken"
        )

    def shards(self, run: str) -> list[Key]:
        """What the peer has of a run."""
        with self._talk() as wire:
            return [Key(**told) for told in wire.ask("list", run=run)[0]["shards"]]

    def manifest(self, key: Key) -> bytes:
        """The text of a shard's manifest."""
        with self._talk() as wire:
            return bytes(wire.ask("manifest", key=dataclasses.asdict(key))[1])

    def get(self, key: Key, name: str, entry: FileEntry, target: Path, *, chunks: Sequence[int] | None = None) -> None:
        """Makes `target` a file of the shard, or of its `chunks` at their places, every one checked; DataError when the
        peer's copy is damaged."""
        told = dataclasses.asdict(key)
        with self._talk() as wire, open(target, "wb") as file:
            todo = list(range(len(entry.chunks)) if chunks is None else chunks)
            for _ in range(_ROUNDS):
                wire.send({"op": "get", "key": told, "file": name, "numbers": todo})
                bad = []
                for number in todo:
                    body = wire.receive_answer()[1]
                    if not _fits(entry, number, body):
                        bad.append(number)
                        continue
                    os.pwrite(file.fileno(), body, chunk_range(entry, number)[0])
                todo = bad
                if not todo:
                    os.ftruncate(file.fileno(), entry.bytes)
                    return
        begin, end = chunk_range(entry, todo[0])
        raise DataError(f"peer {self.address}: {name} of {key}: bytes {begin} to {end} are not what was written")

    def check(self, key: Key) -> list[str]:
        """Has the peer read every byte of a shard; what is wrong, after which it is out of sight there."""
        with self._talk() as wire:
            wrong: list[str] = wire.ask("check", key=dataclasses.asdict(key))[0]["wrong"]
            return wrong

    def drop(self, run: str) -> None:
        """Has the peer forget a run."""
        with self._talk() as wire:
            wire.ask("drop", run=run)

    @contextlib.contextmanager
    def _talk(self) -> Iterator[_Wire]:
        host, _, port = self.address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=self._timeout) as link:
                wire = _Wire(link)
                _prove_as_client(wire, self._secret)
                yield wire
        except (OSError, ValueError, KeyError) as error:
            # Timeouts and closed connections are OSErrors; an answer that makes no sense is one of the other two.
            raise StorageError(f"peer {self.address}: {type(error).__name__}: {error}") from error


class PeerServer:
    """Keeps in `memory` what other machines send, and gives it back; a thread of its own, one more a connection."""

    def __init__(self, memory: Memory, address: str, *, secret: bytes, timeout_s: float = 30.0) -> None:
        host, _, port = address.rpartition(":")
        self._memory, self._secret, self._timeout = memory, secret, timeout_s
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        try:
            self._server = _Listener((host, int(port)), self._serve)
        except OSError as error:
            raise StorageError(
                f"{address}: cannot listen here: {error.strerror}; change `checkpoint.tiers.peers`"
            ) from error
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening; what was kept stays."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, link: socket.socket, address: Any, _: socketserver.BaseServer) -> None:
        """One connection, to its end."""
        if not self._free.acquire(blocking=False):
            return
        try:
            link.settimeout(self._timeout)
            wire = _Wire(link)
            _prove_as_server(wire, self._secret)
            while (message := wire.receive_or_end()) is not None:
                header, body = message
                try:
                    self._answer(wire, header, body)
                except RopewalkError as error:
                    wire.send({"error": str(error)})
        except (OSError, ValueError, KeyError, TypeError, RopewalkError) as error:
            # Of a stranger, or of a peer that died: the connection is over, the next one is welcome.
            _log.warning("connection from %s: %s: %s", address[0], type(error).__name__, error)
        finally:
            self._free.release()

    def _answer(self, wire: _Wire, header: dict[str, Any], body: memoryview) -> None:
        operation = header["op"]
        if operation == "list":
            wire.send({"shards": [dataclasses.asdict(key) for key in self._memory.shards(header["run"])]})
        elif operation == "drop":
            self._memory.drop(header["run"])
            wire.send({})
        elif operation == "put":
            self._receive(wire, Key(**header["key"]), bytes(body))
        elif operation == "manifest":
            with self._opened(Key(**header["key"])) as folder:
                wire.send({}, (folder / FILE).read_bytes())
        elif operation == "get":
            self._give(wire, Key(**header["key"]), plain_name(header["file"]), header["numbers"])
        elif operation == "check":
            wire.send({"wrong": self._memory.check(Key(**header["key"]))})
        else:
            raise DataError(f"no such operation: {operation}")

    def _receive(self, wire: _Wire, key: Key, text: bytes) -> None:
        """Takes a shard in; it counts when every chunk is there and right."""
        folder = self._memory.path(key)
        manifest = parse_checkpoint_manifest(text, folder)
        missing = {
            (plain_name(name), number) for name, entry in manifest.files.items() for number in range(len(entry.chunks))
        }
        with self._memory.filling(key, size=manifest.bytes) as partial, contextlib.ExitStack() as files:
            opened = {name: files.enter_context(_reused(partial / name, e.bytes)) for name, e in manifest.files.items()}
            wire.send({})
            while missing:
                header, body = wire.receive()
                if header["op"] == "chunk":
                    name, number = header["file"], header["number"]
                    if (name, number) in missing and _fits(manifest.files[name], number, body):
                        os.pwrite(opened[name], body, chunk_range(manifest.files[name], number)[0])
                        missing.discard((name, number))
                elif header["op"] == "done" and missing:
                    wire.send({"missing": sorted(missing)})
            finish_shard(partial, manifest, text)
        while wire.receive()[0]["op"] != "done":
            pass
        wire.send({"missing": []})

    def _give(self, wire: _Wire, key: Key, name: str, numbers: list[int]) -> None:
        with self._opened(key) as folder:
            entry = parse_checkpoint_manifest((folder / FILE).read_bytes(), folder).files[name]
            with open(folder / name, "rb") as file:
                for number in numbers:
                    wire.send_file({}, file, *chunk_range(entry, number))

    @contextlib.contextmanager
    def _opened(self, key: Key) -> Iterator[Path]:
        with self._memory.pinned(key) as folder:
            if not folder.exists():
                raise DataError(f"{key} is not here")
            yield folder


class PeerSource:
    """A peer as a place to restore from."""

    checks = True

    def __init__(self, peer: Peer, run: str) -> None:
        self._peer, self._run = peer, run

    @property
    def name(self) -> str:
        return f"peer {self._peer.address}"

    def offers(self) -> tuple[list[Offer], list[str]]:
        found, wrong = [], []
        for key in self._peer.shards(self._run):
            try:
                found.append(Offer(key, self._manifest(key), self._peer.address))
            except DataError as error:
                self._peer.check(key)
                wrong.append(f"{self.name}: {error}")
        return found, wrong

    def fetch(self, offer: Offer, file: str, target: Path, chunks: Sequence[int]) -> None:
        self._peer.get(offer.key, file, offer.manifest.files[file], target, chunks=chunks)

    def quarantine(self, offer: Offer) -> None:
        self._peer.check(offer.key)

    def _manifest(self, key: Key) -> CheckpointManifest:
        return parse_checkpoint_manifest(self._peer.manifest(key), Path(str(key)))


def chunk_range(entry: FileEntry, number: int) -> tuple[int, int]:
    """First and last byte (exclusive) of a chunk."""
    begin = number * entry.chunk_bytes
    return begin, min(begin + entry.chunk_bytes, entry.bytes)


def _fits(entry: FileEntry, number: int, body: memoryview) -> bool:
    begin, end = chunk_range(entry, number)
    return len(body) == end - begin and xxhash.xxh3_64_hexdigest(body) == entry.chunks[number]


def _by_file(chunks: list[tuple[str, int]]) -> Iterator[tuple[str, list[int]]]:
    for name in dict.fromkeys(name for name, _ in chunks):
        yield name, [number for other, number in chunks if other == name]


@contextlib.contextmanager
def _reused(path: Path, size: int) -> Iterator[int]:
    """A file to be written anywhere, `size` bytes long in the end."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)


def _framed(header: dict[str, Any], body_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return _FRAME.pack(len(text), body_bytes, xxhash.xxh3_64_intdigest(text)) + text


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], serve: Any) -> None:
        super().__init__(address, serve)


class _Wire:
    """Messages over a connection."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(1 << 16)
        self.trusted = False
        """Whether the other end has proven that it knows the secret."""

    def ask(self, operation: str, body: bytes = b"", **fields: Any) -> tuple[dict[str, Any], memoryview]:
        """Sends a request and returns the answer."""
        self.send({"op": operation, **fields}, body)
        return self.receive_answer()

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        self._link.sendall(_framed(header, len(body)))
        if body:
            self._link.sendall(body)

    def send_file(self, header: dict[str, Any], file: Any, begin: int, end: int, gate: Gate | None = None) -> None:
        """A message whose body is a range of a file, in slices as the gate lets them."""
        self._link.sendall(_framed(header, end - begin))
        while begin < end:
            count = min(end - begin, gate.slice_bytes) if gate else end - begin
            if gate:
                gate.wait(count)
            if self._link.sendfile(file, begin, count) != count:
                raise OSError(f"{file.name}: shorter than its manifest says")
            begin += count

    def receive_answer(self) -> tuple[dict[str, Any], memoryview]:
        """The next message; what it says of an error is raised."""
        header, body = self.receive()
        if "error" in header:
            raise StorageError(f"peer: {header['error']}")
        return header, body

    def receive(self) -> tuple[dict[str, Any], memoryview]:
        message = self.receive_or_end()
        if message is None:
            raise ConnectionError("the connection was closed")
        return message

    def receive_or_end(self) -> tuple[dict[str, Any], memoryview] | None:
        """The next message, whose body is valid until the one after it; None when there are no more."""
        frame = self._exactly(_FRAME.size)
        if frame is None:
            return None
        header_bytes, body_bytes, expected = _FRAME.unpack(frame)
        most = (_HEADER_BYTES, _BODY_BYTES) if self.trusted else (_STRANGER_BYTES, 0)
        if header_bytes > most[0] or body_bytes > most[1]:
            raise ValueError(f"a message of {header_bytes} and {body_bytes} bytes")
        text = self._exactly(header_bytes)
        if text is None:
            raise ConnectionError("the connection was closed")
        if xxhash.xxh3_64_intdigest(text) != expected:
            raise ValueError("a header that is not what was sent")
        header = json.loads(bytes(text))
        body = self._exactly(body_bytes)
        if body is None:
            raise ConnectionError("the connection was closed")
        if not isinstance(header, dict):
            raise ValueError("a header that is not an object")
        return header, body

    def _exactly(self, size: int) -> memoryview | None:
        """The next `size` bytes; None when the connection ends before the first of them."""
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        done = 0
        while done < size:
            count = self._link.recv_into(view[done:])
            if count == 0:
                if done:
                    raise ConnectionError("the connection was closed")
                return None
            done += count
        return view


def _prove_as_server(wire: _Wire, secret: bytes) -> None:
    nonce = secrets.token_hex(16)
    wire.send({"nonce": nonce})
    header, _ = wire.receive()
    theirs = str(header["nonce"])
    if not hmac.compare_digest(_proof(secret, "client", nonce, theirs), str(header["proof"])):
        raise ConnectionError("it does not know the secret")
    wire.trusted = True
    wire.send({"proof": _proof(secret, "server", nonce, theirs)})


def _prove_as_client(wire: _Wire, secret: bytes) -> None:
    nonce = str(wire.receive()[0]["nonce"])
    ours = secrets.token_hex(16)
    wire.send({"nonce": ours, "proof": _proof(secret, "client", nonce, ours)})
    header, _ = wire.receive()
    if not hmac.compare_digest(_proof(secret, "server", nonce, ours), str(header["proof"])):
        raise ConnectionError("it does not know the secret")
    wire.trusted = True


def _proof(secret: bytes, *words: str) -> str:
    return hmac.new(secret, " ".join(words).encode(), hashlib.sha256).hexdigest()
