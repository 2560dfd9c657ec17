"""Real processes that die with their memory: the rest of the machines have the state."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from ropewalk.base.errors import DataError
from ropewalk.checkpoint.read.load_latest import restore
from ropewalk.checkpoint.tiers.memory_tier import MemorySource, MemoryTier
from ropewalk.checkpoint.tiers.peer_tier import Peer, PeerServer, PeerSource
from ropewalk.checkpoint.tiers.tier import CopySource
from tests.checkpoint.machine import SECRET
from tests.checkpoint.shards import flip, same, state

WORLD = 3


class Cluster:
    """Machines that hold the shards of all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = Path(__file__).with_name("machine.py")
        root = str(script.parent.parent.parent)
        environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(folder / str(rank)), str(rank), str(WORLD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(WORLD)
        ]
        self.addresses = [_pipe(process.stdout).readline().strip() for process in self.processes]
        for process in self.processes:
            _pipe(process.stdin).write(json.dumps(self.addresses) + "\n")
            _pipe(process.stdin).flush()
        for process in self.processes:
            assert _pipe(process.stdout).readline().strip() == "sent"

    def lose(self, rank: int) -> None:
        """A machine goes, with all that is in its memory."""
        self.kill(rank)
        shutil.rmtree(self.folder / str(rank))

    def kill(self, rank: int) -> None:
        """A process goes; its memory stays."""
        self.processes[rank].kill()
        self.processes[rank].wait()

    def source(self, rank: int) -> CopySource:
        return PeerSource(Peer(self.addresses[rank], secret=SECRET, timeout_s=5), "run")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            _pipe(process.stdin).close()
            _pipe(process.stdout).close()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream
    return stream


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def test_machines_that_die_together_leave_enough_and_what_is_damaged_is_not_used(
    cluster: Cluster, tmp_path: Path
) -> None:
    # Owner 0 and one of its replicas die together: the last machine has every shard.
    cluster.lose(0)
    cluster.lose(1)
    sources = [cluster.source(rank) for rank in range(WORLD)]
    found, report = restore(sources, scratch=tmp_path / "scratch")
    assert found is not None
    assert same(found, state(20))
    assert set(report.sources) == {f"peer {cluster.addresses[2]}"}
    assert len(report.unreachable) == 2

    # A replica is corrupted: the newest step is no longer whole anywhere, and is neither used nor offered again.
    (damaged,) = (cluster.folder / "2/run").glob("rank-00001-of-*/step-00000020.a/optimizer-00001.safetensors")
    flip(damaged, bit=1234)
    found, report = restore(sources, scratch=tmp_path / "scratch")
    assert found is not None
    assert same(found, state(10))
    assert "optimizer-00001.safetensors" in report.damaged[0]
    assert cluster.addresses[2] in report.damaged[0]
    assert (cluster.folder / "2/run/rank-00001-of-00003/step-00000020.a.damaged").is_dir()

    # The process dies, its memory stays: served by the next process, or read on the spot.
    cluster.kill(2)
    memory = MemoryTier(cluster.folder / "2")
    server = PeerServer(memory, "127.0.0.1:0", secret=SECRET)
    source = PeerSource(Peer(server.address, secret=SECRET), "run")
    for place in (source, MemorySource(memory, "run")):
        found, _ = restore([place], scratch=tmp_path / "scratch")
        assert found is not None
        assert same(found, state(10))
    server.close()

    # Nothing whole is left: told, not started from scratch.
    for path in (cluster.folder / "2/run").glob("rank-00000-of-*/step-*/model-00000.safetensors"):
        flip(path, bit=999)
    with pytest.raises(DataError, match=r"model-00000.safetensors"):
        restore([MemorySource(memory, "run")], scratch=tmp_path / "scratch")
