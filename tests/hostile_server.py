"""Both services in a process of their own: `python -m tests.hostile_server FOLDER`; prints their addresses."""

from __future__ import annotations

import sys
from pathlib import Path

from ropewalk.checkpoint.tiers.memory_tier import MemoryTier
from ropewalk.checkpoint.tiers.peer_tier import PeerServer
from ropewalk.load.cache.ram import Ram
from ropewalk.load.cache.serve import Server
from ropewalk.store.origin import Origin
from tests.hostile import SECRET


def main(folder: Path) -> None:
    peers = PeerServer(MemoryTier(folder / "memory", limit_bytes=64 << 20), "127.0.0.1:0", secret=SECRET, timeout_s=20)
    tier = Ram(Origin(), budget_bytes=1 << 20)
    cache = Server(tier, listen="127.0.0.1:0", roots=[str(folder / "root")], secret=SECRET)
    print(peers.address, cache.address, flush=True)
    sys.stdin.read()
    peers.close()
    cache.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
