"""One process of a test with several: `python -m tests.load.cache.worker VERB ARGUMENTS`."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from ropewalk.base.files import point
from ropewalk.load.cache.disk import Disk
from ropewalk.load.cache.peers import Peers
from ropewalk.load.cache.ram import Ram
from ropewalk.load.cache.serve import Server
from ropewalk.load.cache.shared import Shared
from ropewalk.store.items import Item

from .origins import Logged, make_items, truth


def disk(folder: str, log: str, seed: str) -> None:
    """Reads all items twice through a shared folder, in an order of its own, and checks every byte."""
    items = make_items(60)
    tier = Disk(Logged(Path(log)), Path(folder), budget_bytes=1 << 20)
    order = random.Random(int(seed))
    for _ in range(2):
        order.shuffle(items)
        for first in range(0, len(items), 4):
            batch = items[first : first + 4]
            assert [bytes(data) for data in tier.fetch(batch)] == [truth(item) for item in batch]
    print(json.dumps({"hits": tier.counts().hits, "misses": tier.counts().misses}))
    tier.close()


def die_at(label: str, skip: int) -> None:
    """Kills this process when it passes the labelled point, after `skip` times without harm."""

    def at(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal skip
        if event == "ropewalk.point" and arguments[0] == label:
            skip -= 1
            if skip < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(at)


def killed(folder: str, log: str, label: str, skip: str) -> None:
    """Fills a folder and is killed at the labelled point, the `skip`-th time it is passed."""
    die_at(label, int(skip))
    tier = Disk(Logged(Path(log)), Path(folder), budget_bytes=1 << 20)
    for item in make_items(10):
        tier.fetch([item])


def hold(folder: str, seconds: str) -> None:
    """Has the folder open for a while."""
    tier = Disk(Logged(Path(folder) / "log"), Path(folder), budget_bytes=1 << 20)
    print("open", flush=True)
    time.sleep(float(seconds))
    tier.close()


def node(seed: str, log: str, epochs: str) -> None:
    """One of several nodes: serves its own items, reads all items of the cluster, tells how it went."""
    items = make_items(80)
    origin = Logged(Path(log))
    local = Ram(origin, budget_bytes=1 << 20)
    server = Server(local, listen="127.0.0.1:0", roots=["origin"], secret=b"secret")
    print(server.address, flush=True)
    nodes = sys.stdin.readline().split()
    peers = Peers(local, origin, nodes=nodes, me=server.address, secret=b"secret", timeout_s=5)
    order = random.Random(int(seed))
    for _ in range(int(epochs)):
        order.shuffle(items)
        for first in range(0, len(items), 5):
            batch = items[first : first + 5]
            assert [bytes(data) for data in peers.fetch(batch)] == [truth(item) for item in batch]
    counts = peers.counts()
    print(json.dumps({"hits": counts.hits, "misses": counts.misses, "failures": counts.failures}), flush=True)
    sys.stdin.readline()
    peers.close()
    server.close()


def job(number: str, jobs: str, folder: str, log: str, epochs: str, label: str, skip: str) -> None:
    """One of several jobs that read the same prepared items, killed at a labelled point."""
    items = make_items(40)
    die_at(label, int(skip))

    def prepare(item: Item, data: bytes | memoryview, epoch: int) -> bytes:
        Logged(Path(log + ".prepared")).fetch([item])
        return bytes(data) + bytes([epoch])

    area = Shared(
        *(Path(folder), Logged(Path(log))),
        prepare=prepare,
        job=int(number),
        jobs=int(jobs),
        budget_bytes=3000,
        patience_s=20,
    )
    print("seated", flush=True)
    sys.stdin.readline()
    for epoch in range(int(epochs)):
        random.Random(epoch).shuffle(items)
        for first in range(0, len(items), 4):
            point("batch")
            batch = items[first : first + 4]
            data = area.get(batch, epoch=epoch)
            assert [bytes(value) for value in data] == [truth(item) + bytes([epoch]) for item in batch]
            assert area.staged_bytes <= 3000
    print(json.dumps({"alone": area.counts().alone, "left": area.staged_bytes}), flush=True)
    area.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
