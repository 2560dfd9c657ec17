"""Shards in another machine's memory: what arrives is what was sent, whoever fails on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ropewalk.base.errors import DataError, StorageError
from ropewalk.checkpoint import shard_file
from ropewalk.checkpoint.format import read_checkpoint_manifest, verify_checkpoint
from ropewalk.checkpoint.read.load import load
from ropewalk.checkpoint.tiers.gap_scheduler import TransferGate
from ropewalk.checkpoint.tiers.memory_tier import MemoryTier
from ropewalk.checkpoint.tiers.peer_tier import Peer, PeerServer, PeerSource
from ropewalk.checkpoint.tiers.tier import ShardKey
from tests.checkpoint.shards import flip, keep, same, state

SECRET = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a kilobyte: small shards have several."""
    monkeypatch.setattr(shard_file, "CHUNK_BYTES", 1024)


@pytest.fixture
def own(tmp_path: Path) -> MemoryTier:
    return MemoryTier(tmp_path / "own")


@pytest.fixture
def theirs(tmp_path: Path) -> MemoryTier:
    return MemoryTier(tmp_path / "theirs")


@pytest.fixture
def server(theirs: MemoryTier) -> Iterator[PeerServer]:
    served = PeerServer(theirs, "127.0.0.1:0", secret=SECRET, timeout_s=5)
    yield served
    served.close()


def peer_of(address: str, *, secret: bytes = SECRET, timeout_s: float = 5.0) -> Peer:
    return Peer(address, secret=secret, timeout_s=timeout_s)


def test_a_shard_goes_to_a_peer_and_comes_back(
    own: MemoryTier, theirs: MemoryTier, server: PeerServer, tmp_path: Path
) -> None:
    key, peer = keep(own, 3, rows=300), peer_of(server.address)
    sent = peer.put(key, own.path(key))
    assert sent.bytes == read_checkpoint_manifest(own.path(key)).bytes
    assert sent.resent == 0
    assert peer.shards("run") == [key] == theirs.shards("run")
    assert same(load(theirs.path(key)), state(3, rows=300))
    entry = read_checkpoint_manifest(own.path(key)).files["model.safetensors"]
    assert len(entry.chunks) > 3
    peer.get(key, "model.safetensors", entry, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (own.path(key) / "model.safetensors").read_bytes()
    peer.drop("run")
    assert peer.shards("run") == []


def test_what_a_server_keeps_is_served_by_the_next_one(own: MemoryTier, theirs: MemoryTier) -> None:
    key = keep(own, 3)
    first = PeerServer(theirs, "127.0.0.1:0", secret=SECRET)
    peer_of(first.address).put(key, own.path(key))
    first.close()
    second = PeerServer(MemoryTier(theirs.folder), "127.0.0.1:0", secret=SECRET)
    assert peer_of(second.address).shards("run") == [key]
    second.close()


class Proxy:
    """Passes bytes on, altered by `alter(direction, place, data)`, direction `up` (to the server) or `down`."""

    def __init__(self, address: str, alter: Callable[[str, int, bytearray], None]) -> None:
        host, _, port = address.rpartition(":")
        self._to, self._alter = (host, int(port)), alter
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                for direction, source, target in (("up", near, far), ("down", far, near)):
                    threading.Thread(target=self._pass, args=(direction, source, target), daemon=True).start()

    def _pass(self, direction: str, source: socket.socket, target: socket.socket) -> None:
        place = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                size = len(data)
                self._alter(direction, place, data)
                target.sendall(data)
                place += size
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


def weights_at(own: MemoryTier, key: ShardKey) -> bytes:
    """Bytes of the shard that come up nowhere else on the wire."""
    return (own.path(key) / "model.safetensors").read_bytes()[-900:-860]


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_chunk_that_is_damaged_on_the_way_is_sent_again(
    own: MemoryTier, theirs: MemoryTier, server: PeerServer, tmp_path: Path, direction: str
) -> None:
    key = keep(own, 4, rows=300)
    mark, hits = weights_at(own, key), []

    def once(way: str, _: int, data: bytearray) -> None:
        found = data.find(mark)
        if way == direction and found >= 0 and not hits:
            hits.append(found)
            data[found + 5] ^= 4

    proxy = Proxy(server.address, once)
    peer = peer_of(proxy.address)
    if direction == "up":
        assert peer.put(key, own.path(key)).resent == 1
    else:
        peer_of(server.address).put(key, own.path(key))
        entry = read_checkpoint_manifest(own.path(key)).files["model.safetensors"]
        peer.get(key, "model.safetensors", entry, tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == (own.path(key) / "model.safetensors").read_bytes()
    proxy.close()
    assert hits
    assert verify_checkpoint(theirs.path(key)) == []


def test_flipped_bits_on_the_way_never_become_a_replica(
    own: MemoryTier, theirs: MemoryTier, server: PeerServer
) -> None:
    draw = random.Random(1)
    for step in range(40):
        key = keep(own, step)
        begin, bit = draw.randrange(20, 9000), draw.randrange(8)

        def flipping(way: str, place: int, data: bytearray, at: int = begin, mask: int = 1 << bit) -> None:
            if way == "up" and place <= at < place + len(data):
                data[at - place] ^= mask

        proxy = Proxy(server.address, flipping)
        with contextlib.suppress(StorageError, DataError):
            peer_of(proxy.address, timeout_s=1).put(key, own.path(key))
        proxy.close()
        for held in theirs.shards("run"):
            assert verify_checkpoint(theirs.path(held)) == []
            assert same(load(theirs.path(held)), state(held.step))


def test_a_way_that_always_damages_is_given_up_and_named(
    own: MemoryTier, theirs: MemoryTier, server: PeerServer
) -> None:
    key = keep(own, 4, rows=300)
    mark = weights_at(own, key)

    def always(way: str, _: int, data: bytearray) -> None:
        found = data.find(mark)
        if way == "up" and found >= 0:
            data[found] ^= 1

    proxy = Proxy(server.address, always)
    with pytest.raises(StorageError, match=r"model.safetensors.*faulty"):
        peer_of(proxy.address).put(key, own.path(key))
    proxy.close()
    assert theirs.shards("run") == []


def test_a_damaged_replica_is_refused_by_whoever_fetches_it_and_goes_out_of_sight(
    own: MemoryTier, theirs: MemoryTier, server: PeerServer, tmp_path: Path
) -> None:
    key, peer = keep(own, 5), peer_of(server.address)
    peer.put(key, own.path(key))
    flip(theirs.path(key) / "model.safetensors", bit=3000)
    (offer,), _ = PeerSource(peer, "run").offers()
    with pytest.raises(DataError, match=rf"{server.address}.*model.safetensors"):
        PeerSource(peer, "run").fetch(offer, "model.safetensors", tmp_path / "back", [0])
    PeerSource(peer, "run").quarantine(offer)
    assert peer.shards("run") == []


def test_who_does_not_know_the_secret_is_turned_away_both_ways(own: MemoryTier, server: PeerServer) -> None:
    key = keep(own, 1)
    with pytest.raises(StorageError, match=server.address):
        peer_of(server.address, secret=b"another secret!!").put(key, own.path(key))
    assert peer_of(server.address).shards("run") == []


def test_strangers_and_nonsense_do_not_end_the_server(own: MemoryTier, server: PeerServer) -> None:
    host, _, port = server.address.rpartition(":")
    draw = random.Random(2)
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("!II", 2**32 - 1, 2**32 - 1), draw.randbytes(5000)):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as link:
            link.sendall(data)
    assert peer_of(server.address).shards("run") == []
    peer = peer_of(server.address)
    with peer._talk() as wire, pytest.raises(StorageError, match=r"no such operation"):
        wire.ask("format the disk")
    hostile = {**dataclasses.asdict(ShardKey(run="run", step=1)), "run": "../../etc"}
    with peer._talk() as wire, pytest.raises(StorageError, match=r"is not a valid name of a copy"):
        wire.ask("manifest", key=hostile)
    key = keep(own, 1)
    assert peer.put(key, own.path(key)).bytes


def test_a_peer_that_is_silent_or_gone_is_named_in_time(own: MemoryTier) -> None:
    key = keep(own, 1)
    silent = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    with pytest.raises(StorageError, match=address):
        peer_of(address, timeout_s=0.2).put(key, own.path(key))
    silent.close()
    with pytest.raises(StorageError, match=address):
        peer_of(address, timeout_s=0.2).shards("run")


def test_a_full_peer_says_so_and_keeps_what_it_has(own: MemoryTier, tmp_path: Path) -> None:
    theirs = MemoryTier(tmp_path / "small", limit_bytes=8_000)
    server = PeerServer(theirs, "127.0.0.1:0", secret=SECRET)
    small, large = keep(own, 1), keep(own, 2, rows=1000)
    peer = peer_of(server.address)
    peer.put(small, own.path(small))
    with pytest.raises(StorageError, match=r"memory_bytes"):
        peer.put(large, own.path(large))
    assert theirs.shards("run") == [small]
    server.close()


def test_half_a_shard_does_not_count(own: MemoryTier, theirs: MemoryTier, server: PeerServer) -> None:
    whole, half = keep(own, 1), keep(own, 2, rows=300)
    peer = peer_of(server.address)
    peer.put(whole, own.path(whole))
    with peer._talk() as wire:
        wire.ask("put", (own.path(half) / "manifest.json").read_bytes(), key=dataclasses.asdict(half))
        with open(own.path(half) / "model.safetensors", "rb") as file:
            wire.send_file({"op": "chunk", "file": "model.safetensors", "number": 0}, file, 0, 1024)
    assert peer.shards("run") == [whole]
    for _ in range(1000):
        # The server notices the end of the connection in its own time.
        with contextlib.suppress(StorageError):
            peer.put(half, own.path(half))
            break
        time.sleep(0.02)
    assert peer.shards("run") == [whole, half]
    assert verify_checkpoint(theirs.path(half)) == []


def test_a_gate_decides_on_every_slice(own: MemoryTier, server: PeerServer) -> None:
    class Counting(TransferGate):
        def __init__(self) -> None:
            super().__init__(slice_bytes=300)
            self.sizes: list[int] = []

        def wait(self, size: int) -> None:
            self.sizes.append(size)

    key, gate = keep(own, 1, rows=300), Counting()
    sent = peer_of(server.address).put(key, own.path(key), gate=gate)
    assert sum(gate.sizes) == sent.bytes
    assert max(gate.sizes) == 300


def test_connections_leave_no_files_open(own: MemoryTier, server: PeerServer) -> None:
    key, peer = keep(own, 1), peer_of(server.address)
    peer.put(key, own.path(key))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        peer.put(key, own.path(key))
        peer.shards("run")
    assert len(os.listdir("/proc/self/fd")) <= before + 2
