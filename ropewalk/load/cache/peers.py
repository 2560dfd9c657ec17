"""One cache over all nodes: each item has one owner, so that a cluster holds one copy and asks the origin once.

The owner is found by rendezvous hashing (Thaler and Ravishankar 1998): the node with the highest hash of (item, node).
Nobody keeps a table, and when a node goes only its own items move, evenly, to the others.

A peer that fails is left alone for a while and its items go to the next in line, in the end to the origin: slower,
never wrong, never a stop.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from ropewalk.base.network import connect
from ropewalk.store.items import Fetch, Item

from . import wire
from .flights import Data
from .serve import split_address
from .stats import Counts, Stats

_log = logging.getLogger(__name__)
_CONNECT_S = 2.0
"""For the connection and the handshake."""
_REQUEST_BYTES = 64 << 20
_MOST_PAUSE_S = 60.0


def owner(key: int, nodes: Iterable[str]) -> str:
    """The node that item `key` belongs to."""
    return max(nodes, key=lambda node: xxhash.xxh3_64_intdigest(node.encode(), seed=key))


class Peers:
    """Items from the node that owns them: ours from `local`, those of others over TCP.

    `local` are this node's own tiers, which hold only what the node owns; a second copy of another node's item would
    take the room of one that nobody holds. A process that serves nobody (`me` is None) asks its node's server; its
    `local` is the origin.
    """

    def __init__(
        self,
        local: Fetch,
        origin: Fetch,
        *,
        nodes: Sequence[str],
        me: str | None,
        secret: bytes = b"",
        timeout_s: float = 10.0,
        pause_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pause_s` is how long a peer is left alone after its first failure; each further one doubles it."""
        self._local = local
        self._origin = origin
        self._nodes = tuple(nodes)
        self._me = me
        self._peers = {
            node: Peer(node, secret=secret, timeout_s=timeout_s, pause_s=pause_s, clock=clock)
            for node in self._nodes
            if node != me
        }
        self._threads = ThreadPoolExecutor(4 * max(1, len(self._peers)), thread_name_prefix="cache-client")
        self._stats = Stats()

    def fetch(self, items: Sequence[Item]) -> list[Data]:
        """The items' bytes, asked of all owners at the same time."""
        data: dict[int, Data] = {}
        wanted = {item.key: item for item in items}
        tried: dict[int, set[str]] = defaultdict(set)
        while left := {key: item for key, item in wanted.items() if key not in data}:
            shares = self._shares(left, tried)
            asked = [
                (batch, self._threads.submit(self._ask, node, [left[key] for key in batch]))
                for node, keys in shares.items()
                if node in self._peers
                for batch in _batches(keys, left)
            ]
            for node, source in {None: self._origin, self._me: self._local}.items():
                if keys := shares.get(node, []):
                    data.update(zip(keys, source.fetch([left[key] for key in keys]), strict=True))
            for batch, answer in asked:
                found = answer.result()
                if found is not None:
                    data.update(zip(batch, found, strict=True))
        return [data[item.key] for item in items]

    def counts(self) -> Counts:
        """Hits are items that came from another node, misses those that were ours or that no node could give."""
        return self._stats.counts()

    def close(self) -> None:
        """Hangs up and closes the node's own tiers, which close the origin."""
        self._threads.shutdown()
        for peer in self._peers.values():
            peer.close()
        self._local.close()

    def _shares(self, left: dict[int, Item], tried: dict[int, set[str]]) -> dict[str | None, list[int]]:
        """Which node is asked for which keys; None is the origin, for what the owner and the next in line both lack."""
        alive = [node for node in self._nodes if node == self._me or self._peers[node].alive()]
        shares: dict[str | None, list[int]] = defaultdict(list)
        for key in left:
            candidates = [node for node in alive if node not in tried[key]]
            node = owner(key, candidates) if candidates and len(tried[key]) < 2 else None
            if node is not None:
                tried[key].add(node)
            shares[node].append(key)
        with self._stats as counts:
            ours = [key for node in {None, self._me} for key in shares.get(node, [])]
            counts.misses += len(ours)
            counts.miss_bytes += sum(len(left[key]) for key in ours)
        return shares

    def _ask(self, node: str, items: list[Item]) -> list[bytes] | None:
        start = time.perf_counter()
        found = self._peers[node].fetch(items)
        with self._stats as counts:
            counts.hit_seconds += time.perf_counter() - start
            if found is None:
                counts.failures += 1
            else:
                counts.hits += len(found)
                counts.hit_bytes += sum(map(len, found))
        return found


class Peer:
    """The connections to one node, and whether it answers."""

    def __init__(
        self, address: str, *, secret: bytes, timeout_s: float, pause_s: float, clock: Callable[[], float]
    ) -> None:
        self._address = address
        self._host, self._port = split_address(address)
        self._secret = secret
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._failures = 0
        self._until = 0.0

    def alive(self) -> bool:
        """Whether it is worth asking now."""
        return self._clock() >= self._until

    def fetch(self, items: Sequence[Item]) -> list[bytes] | None:
        """The items from there; None when that failed, and the peer is left alone for a while."""
        while True:
            with self._lock:
                idle = self._idle.pop() if self._idle else None
            try:
                connection = idle or self._connect()
            except OSError as error:
                self._failed(error)
                return None
            try:
                connection.settimeout(self._timeout_s)
                wire.send_request(connection, items)
                data = wire.receive_items(connection, items, timeout_s=self._timeout_s)
            except wire.Refused as refusal:
                _log.warning("cache peer %s: %s", self._address, refusal)
                self._answered(connection)
                return None
            except OSError as error:
                connection.close()
                # A connection kept since before the peer was restarted says nothing about the peer of now.
                if idle is not None and not isinstance(error, TimeoutError):
                    continue
                self._failed(error)
                return None
            self._answered(connection)
            return data

    def close(self) -> None:
        """Hangs up."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def _connect(self) -> socket.socket:
        place = (self._host, self._port)
        return connect(place, secret=self._secret, purpose=wire.PURPOSE, timeout_s=min(self._timeout_s, _CONNECT_S))

    def _answered(self, connection: socket.socket) -> None:
        with self._lock:
            self._idle.append(connection)
            self._failures = 0

    def _failed(self, error: OSError) -> None:
        with self._lock:
            if not self.alive():
                return  # one death fails all requests in flight; it counts once
            pause = min(self._pause_s * 2**self._failures, _MOST_PAUSE_S)
            self._failures += 1
            self._until = self._clock() + pause
        _log.warning("cache peer %s: %s; its items come from elsewhere for %g s", self._address, error, pause)


def _batches(keys: Sequence[int], items: dict[int, Item]) -> Iterator[list[int]]:
    """`keys` in requests that a server can hold in memory."""
    batch: list[int] = []
    size = 0
    for key in keys:
        if batch and size + len(items[key]) > _REQUEST_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(key)
        size += len(items[key])
    if batch:
        yield batch
