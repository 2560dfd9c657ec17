"""The peer tier: replicas of shards in the memory of other machines, over TCP, and their placement. No torch.

A server keeps replicas in its `MemoryTier`, so they outlive its process. The receiver verifies every chunk against the
manifest and requests damaged ones again; a restore verifies them once more. Both ends authenticate with a shared secret
and validate all messages (`wire.py`). Traffic is not encrypted: the network between the machines of a run is assumed to
be private.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from ropewalk.base.errors import DataError, RopewalkError, StorageError
from ropewalk.base.network import Service, connect, field

from ..format import FILE, CheckpointManifest, parse_checkpoint_manifest
from ..shard_file import FileEntry
from .gap_scheduler import TransferGate
from .memory_tier import MemoryTier, finish_shard
from .tier import CopyOffer, ShardKey, plain_name
from .wire import BODY_BYTES, PURPOSE, Wire

PlacementKind = Literal["groups", "ring"]
Holders = tuple[tuple[int, ...], ...]
"""For each machine, the machines that hold its shard, itself first."""
_ROUNDS = 3
"""Attempts to send a chunk."""
_MOST_PEERS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerTransfer:
    """The outcome of sending a shard."""

    bytes: int
    seconds: float
    resent: int
    """Chunks that arrived damaged and were resent."""


class Peer:
    """The client of a peer. Network failures raise StorageError with its address."""

    def __init__(self, address: str, *, secret: bytes, timeout_s: float = 30.0) -> None:
        self.address, self._secret, self._timeout = address, secret, timeout_s

    def put(self, key: ShardKey, folder: Path, *, gate: TransferGate | None = None) -> PeerTransfer:
        """Sends the shard in `folder`; returns when the peer has verified all chunks."""
        start, sent, resent = time.perf_counter(), 0, 0
        text = (folder / FILE).read_bytes()
        manifest = parse_checkpoint_manifest(text, folder, shard=True)
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
                todo = _missing(wire.ask("done")[0], manifest)
                if not todo:
                    return PeerTransfer(bytes=sent, seconds=time.perf_counter() - start, resent=resent)
                resent += len(todo)
        raise StorageError(
            f"peer {self.address}: {len(todo)} chunks of {key} arrived damaged {_ROUNDS} times ({todo[0][0]}, chunk "
            f"{todo[0][1]}, ...); the copy in memory or the network is faulty"
        )

    def shards(self, run: str) -> list[ShardKey]:
        """The shards of a run on the peer."""
        with self._talk() as wire:
            try:
                return [_key(tree) for tree in field(wire.ask("list", run=run)[0], "shards", list)]
            except DataError as error:
                raise ValueError(str(error)) from None

    def manifest(self, key: ShardKey) -> bytes:
        """The manifest of a shard, as text."""
        with self._talk() as wire:
            return bytes(wire.ask("manifest", key=dataclasses.asdict(key))[1])

    def get(
        self, key: ShardKey, name: str, entry: FileEntry, target: Path, *, chunks: Sequence[int] | None = None
    ) -> None:
        """Copies a file of the shard to `target`, or only its `chunks` at their offsets, all verified; DataError if the
        copy of the peer is damaged."""
        shard = dataclasses.asdict(key)
        with self._talk() as wire, open(target, "wb") as file:
            todo = list(range(len(entry.chunks)) if chunks is None else chunks)
            for _ in range(_ROUNDS):
                wire.send({"op": "get", "key": shard, "file": name, "numbers": todo})
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

    def check(self, key: ShardKey) -> list[str]:
        """Lets the peer verify a shard; returns its damage, after quarantine there."""
        with self._talk() as wire:
            return [str(line) for line in field(wire.ask("check", key=dataclasses.asdict(key))[0], "wrong", list)]

    def drop(self, run: str) -> None:
        """Deletes all shards of a run on the peer."""
        with self._talk() as wire:
            wire.ask("drop", run=run)

    @contextlib.contextmanager
    def _talk(self) -> Iterator[Wire]:
        host, _, port = self.address.rpartition(":")
        try:
            with connect((host, int(port)), secret=self._secret, purpose=PURPOSE, timeout_s=self._timeout) as link:
                yield Wire(link, timeout_s=self._timeout)
        except (OSError, ValueError) as error:
            # Timeouts and closed connections are OSErrors, invalid responses ValueErrors.
            raise StorageError(f"peer {self.address}: {type(error).__name__}: {error}") from error


class PeerServer:
    """Stores shards of other machines in `memory` and serves them; one thread per authenticated connection."""

    def __init__(self, memory: MemoryTier, address: str, *, secret: bytes, timeout_s: float = 30.0) -> None:
        host, _, port = address.rpartition(":")
        self._memory, self._timeout = memory, timeout_s
        try:
            listener = socket.create_server((host, int(port)), backlog=128)
        except OSError as error:
            raise StorageError(
                f"{address}: cannot listen on this address: {error.strerror}; change `checkpoint.tiers.peers`"
            ) from error
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._service = Service(listener, secret=secret, purpose=PURPOSE, serve=self._serve, most_peers=_MOST_PEERS)

    def close(self) -> None:
        """Stops listening and closes connections; shards stay in memory."""
        self._service.close()

    def _serve(self, link: socket.socket, asked: Callable[[], None]) -> None:
        """Serves a connection until it closes."""
        wire = Wire(link, timeout_s=self._timeout)
        while (message := wire.receive_or_end()) is not None:
            asked()
            header, body = message
            try:
                self._answer(wire, header, body)
            except RopewalkError as error:
                wire.send({"error": str(error)})

    def _answer(self, wire: Wire, header: dict[str, Any], body: memoryview) -> None:
        operation = field(header, "op", str)
        if operation == "list":
            shards = self._memory.shards(field(header, "run", str))
            wire.send({"shards": [dataclasses.asdict(key) for key in shards]})
        elif operation == "drop":
            self._memory.drop(field(header, "run", str))
            wire.send({})
        elif operation == "put":
            self._store(wire, _key(header.get("key")), bytes(body))
        elif operation == "manifest":
            key = _key(header.get("key"))
            with self._memory.pinned(key), self._memory.opened(key, FILE) as file:
                wire.send({}, file.read())
        elif operation == "get":
            name, numbers = plain_name(field(header, "file", str)), field(header, "numbers", list)
            self._send_chunks(wire, _key(header.get("key")), name, numbers)
        elif operation == "check":
            wire.send({"wrong": self._memory.check(_key(header.get("key")))})
        else:
            raise DataError(f"no such operation: {operation:.100}")

    def _store(self, wire: Wire, key: ShardKey, text: bytes) -> None:
        """Receives a shard; it is complete when all chunks are verified."""
        manifest = _manifest(text, self._memory.path(key))
        missing = {
            (plain_name(name), number) for name, entry in manifest.files.items() for number in range(len(entry.chunks))
        }
        with self._memory.filling(key, size=manifest.bytes) as partial, contextlib.ExitStack() as files:
            opened = {name: files.enter_context(_reused(partial / name, e.bytes)) for name, e in manifest.files.items()}
            wire.send({})
            while missing:
                header, body = wire.receive()
                operation = field(header, "op", str)
                if operation == "chunk":
                    name, number = field(header, "file", str), field(header, "number", int)
                    if (name, number) in missing and _fits(manifest.files[name], number, body):
                        os.pwrite(opened[name], body, chunk_range(manifest.files[name], number)[0])
                        missing.discard((name, number))
                elif operation == "done" and missing:
                    wire.send({"missing": sorted(missing)})
            finish_shard(partial, manifest, text)
        while field(wire.receive()[0], "op", str) != "done":
            pass
        wire.send({"missing": []})

    def _send_chunks(self, wire: Wire, key: ShardKey, name: str, numbers: list[Any]) -> None:
        with self._memory.pinned(key):
            with self._memory.opened(key, FILE) as file:
                entry = _manifest(file.read(), self._memory.path(key)).files.get(name)
            if entry is None or not set(map(type, numbers)) <= {int} or len(numbers) > len(entry.chunks):
                raise DataError(f"{key} has no such chunks of {name}")
            if any(not 0 <= number < len(entry.chunks) for number in numbers):
                raise DataError(f"{key} has no such chunks of {name}")
            with self._memory.opened(key, name) as file:
                for number in numbers:
                    wire.send_file({}, file, *chunk_range(entry, number))


class PeerSource:
    """A peer as a source of copies."""

    checks = True

    def __init__(self, peer: Peer, run: str) -> None:
        self._peer, self._run = peer, run

    @property
    def name(self) -> str:
        return f"peer {self._peer.address}"

    def offers(self) -> tuple[list[CopyOffer], list[str]]:
        found, wrong = [], []
        for key in self._peer.shards(self._run):
            try:
                found.append(CopyOffer(key, self._manifest(key), self._peer.address))
            except DataError as error:
                self._peer.check(key)
                wrong.append(f"{self.name}: {error}")
        return found, wrong

    def fetch(self, offer: CopyOffer, file: str, target: Path, chunks: Sequence[int]) -> None:
        self._peer.get(offer.key, file, offer.manifest.files[file], target, chunks=chunks)

    def quarantine(self, offer: CopyOffer) -> None:
        self._peer.check(offer.key)

    def _manifest(self, key: ShardKey) -> CheckpointManifest:
        return _manifest(self._peer.manifest(key), Path(str(key)))


def place_replicas(
    machines: int, *, copies: int, kind: PlacementKind = "groups", racks: Sequence[Hashable] = ()
) -> Holders:
    """Places the replicas of all machines (Gemini, Wang et al. 2023): each machine keeps its own shard, and others hold
    replicas, `copies` in all. `racks`: the rack of each machine; replicas go to different racks where possible.

    - `groups`: groups of `copies` machines, each holding the shards of its group. If `copies` does not divide the
      number of machines, the last group is larger and becomes a ring. A shard is lost only with a whole group.
    - `ring`: machine i sends to i+1, i+2, ...; a shard is lost with `copies` neighbours. There are more such sets than
      groups, so groups survive more failures; a ring spreads a restore over more machines.

    A group is a ring of its own length.
    """
    assert 1 <= copies <= machines, f"{copies} copies on {machines} machines"
    order = _spread(racks, groups=machines // copies) if racks else list(range(machines))
    holders: list[tuple[int, ...]] = [()] * machines
    start = 0
    for size in rings(machines, copies=copies, kind=kind):
        ring = order[start : start + size]
        for position, machine in enumerate(ring):
            holders[machine] = tuple(ring[(position + i) % size] for i in range(copies))
        start += size
    return tuple(holders)


def rings(machines: int, *, copies: int, kind: PlacementKind) -> tuple[int, ...]:
    """Lengths of the rings of a placement."""
    if kind == "ring":
        return (machines,)
    groups = machines // copies
    return (*[copies] * (groups - 1), machines - copies * (groups - 1))


def _spread(racks: Sequence[Hashable], *, groups: int) -> list[int]:
    """The machines in an order that keeps those of one rack apart.

    Sorted by rack and dealt to the groups in turn, machines of a rack are in different groups unless there are more of
    them than groups: no order does better.
    """
    sizes = {rack: sum(other == rack for other in racks) for rack in racks}
    ordered = sorted(range(len(racks)), key=lambda machine: (-sizes[racks[machine]], str(racks[machine]), machine))
    return [machine for group in range(groups) for machine in ordered[group::groups]]


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
    """A file of `size` bytes, open for writing at any offset."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)


def _key(tree: Any) -> ShardKey:
    """The key of a shard from a message; DataError if it is invalid."""
    kinds = {"run": str, "step": int, "rank": int, "world": int, "attempt": str}
    if not isinstance(tree, dict) or not set(tree) <= set(kinds) or not {"run", "step"} <= set(tree):
        raise DataError("not the key of a shard")
    if any(type(value) is not kinds[name] for name, value in tree.items()):
        raise DataError("not the key of a shard")
    key = ShardKey(**tree)
    if key.step >= 10**8 or key.world >= 10**5:
        raise DataError(f"{key}: no such shard")
    return key


def _missing(header: dict[str, Any], manifest: CheckpointManifest) -> list[tuple[str, int]]:
    """The chunks that a peer requests; ValueError if they do not exist."""
    found = []
    for entry in field(header, "missing", list):
        match entry:
            case [str(name), int(number)] if name in manifest.files and 0 <= number < len(manifest.files[name].chunks):
                found.append((name, number))
            case _:
                raise ValueError("a request for chunks that do not exist")
    return found


def _manifest(text: bytes, path: Path) -> CheckpointManifest:
    """The manifest of a received shard; DataError if it is invalid."""
    try:
        manifest = parse_checkpoint_manifest(text, path, shard=True)
        sound = all(_is_sound(entry) for entry in manifest.files.values())
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise DataError(f"{path}: not the manifest of a shard: {type(error).__name__}: {error}") from None
    if not sound:
        raise DataError(f"{path}: not the manifest of a shard: its chunks do not add up to its files")
    return manifest


def _is_sound(entry: FileEntry) -> bool:
    return (
        entry.bytes >= 0
        and 0 < entry.chunk_bytes <= BODY_BYTES
        and len(entry.chunks) == -(-entry.bytes // entry.chunk_bytes)
    )
