"""Thousands of hostile messages to the services of checkpoints and of the cache, while real peers are served."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from ropewalk import flow
from ropewalk.base import network
from ropewalk.base.errors import StorageError
from ropewalk.base.events import read_events
from ropewalk.base.network import connect, parse_json
from ropewalk.checkpoint.format import identity, list_checkpoints, read_checkpoint_manifest
from ropewalk.checkpoint.tiers import wire as shard_wire
from ropewalk.checkpoint.tiers.memory_tier import MemoryTier
from ropewalk.checkpoint.tiers.peer_tier import Peer, PeerServer
from ropewalk.checkpoint.tiers.tier import ShardKey
from ropewalk.checkpoint.tiers.tier_writer import memory_folder
from ropewalk.load.cache import wire as cache_wire
from ropewalk.load.cache.peers import Peers
from ropewalk.store.items import Item
from tests.checkpoint.shards import keep
from tests.flow.tiny import write_tiny
from tests.hostile import SECRET, greet_client, greetings, texts
from tests.load.cache.origins import Counting

ROOT = Path(__file__).parent.parent
PATIENCE_S = 60.0
SILENT = 300
"""More than either service holds of strangers."""
MOST_GROWTH = 200 << 20
"""Bytes by which the memory of the servers may grow: a message of 16 MB parsed, and a few of them at once."""
MOST_TRAINING = 200 << 20
"""That first steps, saves and validations add."""

Address = tuple[str, int]


class Services:
    """A process with both, and what is in them."""

    def __init__(self, folder: Path) -> None:
        self.root, self.key = folder / "root", ShardKey(run="run", step=1, attempt="a")
        self.root.mkdir()
        (self.root / "data").write_bytes(random.Random(0).randbytes(5000))
        (folder / "outside").write_bytes(b"private" * 100)
        (self.root / "link").symlink_to(folder / "outside")
        (self.root / "way").symlink_to(folder)
        self.shard = keep(MemoryTier(folder / "memory"), 1)
        self.manifest = read_checkpoint_manifest(MemoryTier(folder / "memory").path(self.shard))
        self.stderr = folder / "stderr"
        command = [sys.executable, "-m", "tests.hostile_server", str(folder)]
        with open(self.stderr, "w") as stderr:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        assert self.process.stdout
        self.peers, self.cache = self.process.stdout.readline().split()

    def memory_bytes(self) -> int:
        """The most that the process has ever held."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", status)[0])

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(PATIENCE_S) == 0


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    made = Services(tmp_path)
    yield made
    made.close()
    made.process.stdout.close()  # type: ignore[union-attr]


def address_of(address: str) -> Address:
    host, _, port = address.rpartition(":")
    return host, int(port)


class Reader:
    """A real client of both services, in a thread: every answer must come, and be right."""

    def __init__(self, services: Services, folder: Path) -> None:
        self._services, self._target = services, folder / "back"
        self.served, self.wrong = 0, ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._read()
                self.served += 1
        except BaseException as error:
            self.wrong = repr(error)

    def _read(self) -> None:
        services = self._services
        name = "model.safetensors"
        Peer(services.peers, secret=SECRET).get(services.shard, name, services.manifest.files[name], self._target)
        item = Item(str(services.root / "data"), 100, 4000)
        until = time.monotonic() + PATIENCE_S
        while not self._read_from_cache(item):
            # A client waits two seconds for a greeting, which a busy machine may take.
            assert time.monotonic() < until, "the peer did not serve"

    def _read_from_cache(self, item: Item) -> bool:
        """Whether the peer answered; what it answers must be right."""
        origin = Counting()
        peers = Peers(origin, origin, nodes=[self._services.cache], me=None, secret=SECRET, timeout_s=PATIENCE_S)
        try:
            (data,) = peers.fetch([item])
            served = origin.requests == 0
            assert not served or bytes(data) == Path(item.file).read_bytes()[item.start : item.stop]
            return served
        finally:
            peers.close()

    def more(self) -> None:
        """Returns when a whole read has begun and ended from now on."""
        before, limit = self.served, threading.Event()
        for _ in range(int(PATIENCE_S / 0.01)):
            if self.served >= before + 2 or self.wrong:
                break
            limit.wait(0.01)
        assert not self.wrong
        assert self.served >= before + 2, "real peers are not served"

    def end(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self.wrong


def shard_frame(draw: random.Random, text: bytes) -> bytes:
    body = draw.randbytes(draw.choice([0, 0, 10, 70_000]))
    checksum = xxhash.xxh3_64_intdigest(text) if draw.random() < 0.8 else draw.getrandbits(64)
    lengths = draw.choice([(len(text), len(body))] * 4 + [(2**32 - 1, 2**32 - 1), (len(text), 2**26), (2**24, 0)])
    return struct.pack("!IIQ", *lengths, checksum) + text + body


def cache_frame(draw: random.Random, text: bytes) -> bytes:
    return (
        struct.pack("<I", draw.choice([len(text)] * 5 + [2**32 - 1, 2**24, len(text) + 3, max(0, len(text) - 3)]))
        + text
    )


def speak(address: Address, data: bytes) -> None:
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=PATIENCE_S) as link:
        link.sendall(data)


def speak_as_peer(address: Address, purpose: bytes, frames: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        link = connect(address, secret=SECRET, purpose=purpose, timeout_s=PATIENCE_S)
        with link:
            for frame in frames:
                link.sendall(frame)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hostile_messages_neither_end_a_service_nor_hold_up_its_peers(
    services: Services, tmp_path: Path, count: int
) -> None:
    attack(services, tmp_path, count)


def attack(
    services: Services,
    folder: Path,
    count: int,
    *,
    sent: Callable[[float], None] = lambda share: None,
    most_growth: int = MOST_GROWTH,
) -> None:
    """Sends `count` messages to both services, while a real client of both is served; `sent` hears which share of them
    is sent."""
    draw = random.Random(count)
    both = [address_of(services.peers), address_of(services.cache)]
    kinds: list[tuple[Address, bytes, Callable[[random.Random, bytes], bytes]]] = [
        (both[0], shard_wire.PURPOSE, shard_frame),
        (both[1], cache_wire.PURPOSE, cache_frame),
    ]
    reader = Reader(services, folder)
    reader.more()
    before = services.memory_bytes()
    with contextlib.ExitStack() as held:
        # Silent connections, more than are held, and authenticated ones that never ask.
        silent = [socket.create_connection(both[number % 2]) for number in range(2 * SILENT)]
        for link in silent:
            held.callback(link.close)
        for address, purpose, _ in kinds:
            for _ in range(20):
                link = connect(address, secret=SECRET, purpose=purpose, timeout_s=PATIENCE_S)
                held.callback(link.close)
                link.sendall(b"\1")  # the first byte of a message that never ends
        reader.more()
        unknown, lines = greetings(draw, draw.randbytes(48)), texts(draw)
        for number in range(count // 4):
            for address, purpose, frame in kinds:
                speak(address, next(unknown))
                speak_as_peer(address, purpose, [frame(draw, next(lines)) for _ in range(draw.choice([1, 1, 3]))])
            with contextlib.suppress(OSError):  # one byte now and then; most were dropped long ago
                draw.choice(silent).send(b"x")
            if number % 500 == 0:
                reader.more()
            sent(number / (count // 4))
        reader.more()
    reader.end()
    grown = services.memory_bytes() - before
    print(f"{count} hostile messages, {reader.served} reads of a real peer, memory grew by {grown / 1e6:.1f} MB")
    assert grown < most_growth
    assert services.process.poll() is None
    assert services.stderr.read_text() == ""


TRAINED = """
import sys, time
from pathlib import Path
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.loop import train

class Paced(Hook):
    # Steps go on as messages are sent: the run trains from the first to the last of them.
    def after_step(self, run, result):
        while Path(sys.argv[2]).stat().st_size < run.step:
            time.sleep(0.002)

train(Path(sys.argv[1]), hooks=[Paced()])
"""
STEPS = 60


class Training(Services):
    """A run whose memory tier and cache listen, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        (folder / "secret").write_bytes(SECRET)
        (folder / "secret").chmod(0o600)
        (folder / "shm").mkdir()
        self.theirs = PeerServer(MemoryTier(folder / "theirs"), "127.0.0.1:0", secret=SECRET, timeout_s=20)
        self.peers, self.cache = (f"127.0.0.1:{free_port()}" for _ in range(2))
        secret = str(folder / "secret")
        flow.run("tiny.toml", [*SETTINGS, *listening(self, folder, secret)], until="plan")
        self.run = folder / "runs" / "tiny"
        self.root = next((folder / "prepared").glob("*/manifest.json")).parent
        (self.root / "data").write_bytes(random.Random(0).randbytes(5000))
        memory = MemoryTier(memory_folder(str(folder / "shm")))
        self.shard = keep(memory, 1)  # of another run on this machine
        self.manifest = read_checkpoint_manifest(memory.path(self.shard))
        self.stderr, self.pace = folder / "stderr", folder / "pace"
        self.pace.write_bytes(b"")
        with open(self.stderr, "w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", TRAINED, str(self.run), str(self.pace)],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stderr=stderr,
                text=True,
            )
        for address in (self.peers, self.cache):
            self._wait_for(address)

    def _wait_for(self, address: str) -> None:
        for _ in range(int(PATIENCE_S / 0.1)):
            with contextlib.suppress(OSError), socket.create_connection(address_of(address)):
                return
            assert self.process.poll() is None, self.stderr.read_text()
            time.sleep(0.1)
        raise AssertionError(f"nobody listens at {address}")

    def sent(self, share: float) -> None:
        os.truncate(self.pace, int(share * STEPS))

    def close(self) -> None:
        os.truncate(self.pace, STEPS)
        assert self.process.wait(PATIENCE_S) == 0
        self.theirs.close()


SETTINGS = (
    f"train.steps={STEPS}",
    "checkpoint.save_every_steps=5",
    'prepare.compression="zstd"',  # what is packed is read by pieces, by way of the cache
)


def listening(training: Training, folder: Path, secret: str) -> list[str]:
    return [
        f'prepare.folder="{folder}/prepared"',
        'checkpoint.tiers.memory="on"',
        f'checkpoint.tiers.folder="{folder}/shm"',
        f'checkpoint.tiers.peers=["{training.peers}", "{training.theirs.address}"]',
        f'checkpoint.tiers.secret_file="{secret}"',
        f'load.cache.peers=["{training.cache}"]',
        f'load.cache.secret_file="{secret}"',
    ]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def final_weights(run: Path) -> str:
    return identity(read_checkpoint_manifest(list_checkpoints(run / "checkpoints")[-1]))


@pytest.mark.slow
def test_a_run_trains_on_while_ten_thousand_hostile_messages_reach_its_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    training = Training(tmp_path)
    attack(training, tmp_path, 10_000, sent=training.sent, most_growth=MOST_GROWTH + MOST_TRAINING)
    steps = [event["step"] for event in read_events(training.run / "events.jsonl") if event["kind"] == "step"]
    assert max(steps) > STEPS // 2, "the run did not train meanwhile"
    training.close()
    assert training.stderr.read_text() == ""
    copied = [event for event in read_events(training.run / "events.jsonl") if event["kind"] == "copied"]
    assert [event["error"] for event in copied if event["error"]] == []
    assert any(event["tier"].startswith("peer") for event in copied)
    flow.train("tiny.toml", ["name=alone", *SETTINGS])
    assert final_weights(training.run) == final_weights(tmp_path / "runs" / "alone")


@pytest.mark.parametrize("name", ["link", "way/outside", "way/root/data", "../outside"])
def test_the_cache_serves_nothing_through_a_link_below_its_root(services: Services, name: str) -> None:
    link = connect(address_of(services.cache), secret=SECRET, purpose=cache_wire.PURPOSE, timeout_s=PATIENCE_S)
    item = Item(str(services.root / name), 0, 7)
    with link:
        cache_wire.send_request(link, [item])
        with pytest.raises(cache_wire.Refused, match="not part of the corpus"):
            cache_wire.receive_items(link, [item])


def test_a_recorded_handshake_is_of_no_use_and_none_serves_another_purpose(services: Services) -> None:
    said: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, data: bytes, *flags: int) -> None:  # type: ignore[override]
            said.append(bytes(data))
            super().sendall(data, *flags)

    with Recorded() as link:
        link.connect(address_of(services.cache))
        network.greet_server(link, secret=SECRET, purpose=cache_wire.PURPOSE, deadline=network.time.monotonic() + 60)
    for address in (services.cache, services.peers):
        with socket.create_connection(address_of(address), timeout=PATIENCE_S) as replay:
            assert len(network.receive(replay, 24, deadline=network.time.monotonic() + 60)) == 24
            replay.sendall(said[0])
            assert replay.recv(1) == b""
    with pytest.raises(network.Untrusted, match="is not rwcache2"):
        connect(address_of(services.peers), secret=SECRET, purpose=cache_wire.PURPOSE, timeout_s=PATIENCE_S)


ANSWERS = [
    b"",
    b"\0" * 1000,
    struct.pack("!IIQ", 2**32 - 1, 2**32 - 1, 0),
    *(
        struct.pack("!IIQ", len(text), 0, xxhash.xxh3_64_intdigest(text)) + text
        for text in (
            b"[" * 1000,
            b'{"shards": ' * 900 + b"1" + b"}" * 900,
            b'{"shards": 7, "missing": 7, "wrong": 7}',
            b'{"shards": [[]], "missing": [[]], "wrong": [[]]}',
            b'{"shards": [{"run": "../x", "step": 1}], "missing": [["x", 0]]}',
            b'{"shards": [{"run": 1, "step": "a"}], "missing": [["model.safetensors", 99999]]}',
            b'{"error": {"a": 1}}',
            b"\xff\xfe",
            b"NaN",
        )
    ),
]


@pytest.mark.parametrize("proof", ["right", "wrong", "short"])
def test_a_client_believes_no_server_and_says_so_in_one_kind_of_error(tmp_path: Path, proof: str) -> None:
    memory = MemoryTier(tmp_path / "own")
    key = keep(memory, 1)
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    answer = [b""]

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                with contextlib.suppress(OSError), link:
                    if proof == "right":
                        greet_client(link, SECRET, shard_wire.PURPOSE)
                        link.sendall(answer[0])
                    else:
                        link.sendall(shard_wire.PURPOSE + bytes(16))
                        link.sendall("é".encode() * (16 if proof == "wrong" else 3))
                    link.shutdown(socket.SHUT_WR)
                    while link.recv(1 << 16):
                        pass

    threading.Thread(target=serve, daemon=True).start()
    peer = Peer(address, secret=SECRET, timeout_s=PATIENCE_S)
    for text in ANSWERS if proof == "right" else [b""]:
        answer[0] = text
        for ask in (lambda: peer.shards("run"), lambda: peer.put(key, memory.path(key)), lambda: peer.check(key)):
            with contextlib.suppress(StorageError):
                ask()
        with pytest.raises(StorageError, match=r"^peer"):
            peer.shards("run")
    listener.close()


def test_a_stream_without_end_and_one_that_trickles_are_given_up(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def trickle() -> None:
        link, _ = listener.accept()
        with contextlib.suppress(OSError), link:
            greet_client(link, SECRET, shard_wire.PURPOSE)
            link.sendall(struct.pack("!IIQ", 1000, 0, 0))
            while not done.wait(0.05):
                link.sendall(b"[")

    threading.Thread(target=trickle, daemon=True).start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(StorageError, match=r"took too long|timed out"):
        Peer(address, secret=SECRET, timeout_s=0.3).shards("run")
    done.set()
    listener.close()


@pytest.mark.parametrize("text", [b"[" * 9 + b"]" * 9, b"[[[", b'{"a":' * 1000, b"[]," * 1000, b"", b"\xff", b"[1"])
def test_json_from_the_network_is_bounded_before_it_is_parsed(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text, most_depth=4, most_objects=100)


def test_json_with_brackets_in_its_strings_is_read() -> None:
    text = rb'{"a[[[[[": ["\"[[[[", "\\", "]]]{{{\\\""], "b": {"c": [1, null]}}'
    assert parse_json(text, most_depth=3) == {"a[[[[[": ['"[[[[', "\\", ']]]{{{\\"'], "b": {"c": [1, None]}}
