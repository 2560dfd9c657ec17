"""One machine of a small cluster, as a process: `python machine.py FOLDER RANK WORLD`.

Prints its address, reads the addresses of all as JSON, keeps its shards of two steps, sends them to every other
machine, says so, and waits to be killed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from ropewalk.checkpoint.tiers.memory_tier import MemoryTier
from ropewalk.checkpoint.tiers.peer_tier import Peer, PeerServer
from tests.checkpoint.shards import keep

SECRET = b"0123456789abcdef"
STEPS = (10, 20)


def main(folder: Path, rank: int, world: int) -> None:
    memory = MemoryTier(folder)
    server = PeerServer(memory, "127.0.0.1:0", secret=SECRET)
    print(server.address, flush=True)
    addresses = json.loads(sys.stdin.readline())
    for step in STEPS:
        key = keep(memory, step, rank=rank, world=world)
        for number, address in enumerate(addresses):
            if number != rank:
                Peer(address, secret=SECRET).put(key, memory.path(key))
    print("sent", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
