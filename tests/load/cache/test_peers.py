"""One cache over several nodes: each item once from the origin, and no peer's death or lie reaches a batch."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ropewalk.base.errors import ConfigError
from ropewalk.base.network import connect
from ropewalk.load.cache import wire
from ropewalk.load.cache.peers import Peers, owner
from ropewalk.load.cache.ram import Ram
from ropewalk.load.cache.serve import Server
from ropewalk.store.items import Item
from tests.hostile import greet_client

from .origins import Counting, logged, make_items, truth

ROOT = Path(__file__).parents[3]
ITEMS = make_items(40)
SECRET = b"sixteen secret.."


class Cluster:
    """Two nodes in one process: this one, and a peer whose server can be stopped and started."""

    def __init__(self, *, secret: bytes = SECRET) -> None:
        self.ours, self.theirs = Counting(), Counting()
        self.me, self.peer = "this-node:1", "127.0.0.1:0"
        self.now = 0.0
        self.start()
        local = Ram(self.ours, budget_bytes=1 << 20)
        self.peers = Peers(
            *(local, self.ours),
            nodes=[self.me, self.peer],
            me=self.me,
            secret=secret,
            clock=lambda: self.now,
            timeout_s=5,
        )

    def start(self) -> None:
        tier = Ram(self.theirs, budget_bytes=1 << 20)
        self.server = Server(tier, listen=self.peer, roots=["origin"], secret=SECRET)
        self.peer = self.server.address

    def stop(self) -> None:
        self.server.close()

    def read(self, items: list[Item] = ITEMS) -> None:
        assert [bytes(data) for data in self.peers.fetch(items)] == [truth(item) for item in items]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.peers.close()
    made.stop()


def test_owners_are_even_and_only_the_items_of_a_lost_node_move() -> None:
    nodes = ["a:1", "b:1", "c:1", "d:1"]
    keys = [item.key for item in make_items(4000)]
    before = [owner(key, nodes) for key in keys]
    assert all(900 < count < 1100 for count in Counter(before).values())
    after = [owner(key, nodes[:3]) for key in keys]
    moved = Counter(new for old, new in zip(before, after, strict=True) if old != new)
    assert [old for old, new in zip(before, after, strict=True) if old != new] == ["d:1"] * sum(moved.values())
    assert all(count > 250 for count in moved.values())


def test_each_item_is_asked_of_the_origin_by_its_owner_alone(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.read()
    assert set(cluster.ours.asked.values()) == set(cluster.theirs.asked.values()) == {1}
    mine = {item.start for item in ITEMS if owner(item.key, [cluster.me, cluster.peer]) == cluster.me}
    assert set(cluster.ours.asked) == mine
    assert set(cluster.theirs.asked) == {item.start for item in ITEMS} - mine
    assert cluster.peers.counts().hits == 3 * (40 - len(mine))


def test_a_lost_peer_costs_nothing_but_its_hits_and_is_tried_again_later(cluster: Cluster) -> None:
    cluster.read()
    cluster.stop()
    cluster.read()
    assert cluster.peers.counts().failures == 1
    cluster.read()
    assert cluster.peers.counts().failures == 1
    cluster.start()
    hits = cluster.peers.counts().hits
    cluster.read()
    assert cluster.peers.counts().hits == hits
    cluster.now = 1.5
    cluster.read()
    assert cluster.peers.counts().hits > hits


def test_a_peer_restarted_between_two_batches_is_used_at_once(cluster: Cluster) -> None:
    cluster.read()
    cluster.stop()
    cluster.start()
    cluster.read()
    assert cluster.peers.counts().failures == 0


def test_an_error_of_the_origin_reaches_the_caller_and_does_not_condemn_the_peer(cluster: Cluster) -> None:
    theirs = [item for item in ITEMS if owner(item.key, [cluster.me, cluster.peer]) == cluster.peer]
    cluster.theirs.failing = 1
    cluster.read(theirs)
    assert cluster.peers.counts().failures == 1
    cluster.read(theirs)
    assert cluster.peers.counts().hits == len(theirs)
    cluster.theirs.failing = cluster.ours.failing = 5
    with pytest.raises(OSError, match="away"):
        cluster.read(make_items(3, file="origin/other"))


def test_a_process_that_serves_nobody_asks_its_nodes_server(cluster: Cluster) -> None:
    origin = Counting()
    guest = Peers(origin, origin, nodes=[cluster.peer], me=None, secret=SECRET)
    assert [bytes(data) for data in guest.fetch(ITEMS)] == [truth(item) for item in ITEMS]
    assert origin.requests == 0
    cluster.stop()
    assert [bytes(data) for data in guest.fetch(ITEMS)] == [truth(item) for item in ITEMS]
    guest.close()


def test_a_wrong_secret_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(secret=b"guess")
    cluster.read()
    assert cluster.theirs.requests == 0
    assert "secret_file" in caplog.text
    cluster.peers.close()
    cluster.stop()


@pytest.mark.parametrize("file", ["other", "origin/../other", "originals", "/etc/passwd"])
def test_nothing_outside_the_corpus_is_served(cluster: Cluster, file: str) -> None:
    host, port = cluster.peer.split(":")
    connection = connect((host, int(port)), secret=SECRET, purpose=wire.PURPOSE, timeout_s=5)
    wire.send_request(connection, [Item(file, 0, 10)])
    with pytest.raises(wire.Refused, match="not part of the corpus"):
        wire.receive_items(connection, [Item(file, 0, 10)])
    assert cluster.theirs.requests == 0
    connection.close()


def test_a_port_open_to_the_network_needs_a_secret() -> None:
    with pytest.raises(ConfigError, match="secret_file"):
        Server(Counting(), listen="0.0.0.0:0", roots=[])
    with pytest.raises(ConfigError, match="host:port"):
        Server(Counting(), listen="localhost", roots=[])


@pytest.mark.parametrize("noise", [b"", b"x" * 100, b"\xff\xff\xff\xff", b"\x04\0\0\0[[1]]", b"\x02\0\0\0{}"])
def test_noise_on_the_port_disturbs_nobody(cluster: Cluster, noise: bytes) -> None:
    host, port = cluster.peer.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(noise)
    with connect((host, int(port)), secret=SECRET, purpose=wire.PURPOSE, timeout_s=5) as known:
        known.sendall(noise)
    cluster.read()
    assert cluster.peers.counts().failures == 0


@pytest.mark.parametrize("lie", ["changed", "short", "torn", "longer", "garbage", "silent"])
def test_a_peer_that_lies_is_found_out(lie: str) -> None:
    """A hand-made server that answers by the rules except for one thing."""
    listener = socket.create_server(("127.0.0.1", 0))
    item = make_items(1)[0]

    def serve() -> None:
        connection, _ = listener.accept()
        greet_client(connection, SECRET, wire.PURPOSE)
        wire.receive_request(connection)
        data = bytearray(truth(item))
        if lie == "changed":
            data[5] ^= 1
            wire.send_items(connection, [bytes(data)])
        elif lie == "short":
            wire.send_items(connection, [bytes(data[:-1])])
        elif lie == "longer":
            wire.send_items(connection, [bytes(data) + b"x"])
        elif lie == "torn":
            connection.sendall(wire._HEAD.pack(0, len(data), 0) + data[:20])
        elif lie == "garbage":
            connection.sendall(bytes(1000))
        elif lie == "silent":
            threading.Event().wait(0.6)
        connection.close()

    threading.Thread(target=serve, daemon=True).start()
    origin = Counting()
    node = f"127.0.0.1:{listener.getsockname()[1]}"
    peers = Peers(origin, origin, nodes=[node], me=None, secret=SECRET, timeout_s=0.3)
    assert bytes(peers.fetch([item])[0]) == truth(item)
    assert peers.counts().failures == 1
    assert origin.requests == 1
    peers.close()
    listener.close()


def start_nodes(log: Path, *, epochs: list[int]) -> list[subprocess.Popen[str]]:
    """Nodes that know each other and begin to read."""
    nodes = []
    for number, count in enumerate(epochs):
        command = [sys.executable, "-m", "tests.load.cache.worker", "node", str(number), str(log), str(count)]
        nodes.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    addresses = [node.stdout.readline().strip() for node in nodes if node.stdout]
    for node in nodes:
        tell(node, " ".join(addresses))
    return nodes


def tell(node: subprocess.Popen[str], line: str = "") -> None:
    assert node.stdin is not None
    node.stdin.write(line + "\n")
    node.stdin.flush()


def test_four_processes_ask_the_origin_once_for_each_item(tmp_path: Path) -> None:
    nodes = start_nodes(tmp_path / "log", epochs=[2] * 4)
    results = [json.loads(node.stdout.readline()) for node in nodes if node.stdout]
    for node in nodes:
        tell(node)
    assert [node.wait() for node in nodes] == [0] * 4
    assert len(logged(tmp_path / "log")) == 80
    assert set(logged(tmp_path / "log").values()) == {1}
    assert sum(result["failures"] for result in results) == 0


def test_a_node_killed_in_the_middle_stops_nobody(tmp_path: Path) -> None:
    nodes = start_nodes(tmp_path / "log", epochs=[8, 8, 10**6])
    threading.Timer(0.05, nodes[2].kill).start()
    results = [json.loads(node.stdout.readline()) for node in nodes[:2] if node.stdout]
    for node in nodes[:2]:
        tell(node)
    assert [node.wait() for node in nodes] == [0, 0, -9]
    assert all(result["hits"] + result["misses"] == 8 * 80 for result in results)
