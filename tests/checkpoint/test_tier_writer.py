"""The tiers of two machines at work, in one process: copies go where they should, and the traffic is told."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.errors import ConfigError
from ropewalk.checkpoint.config import Tiers
from ropewalk.checkpoint.policy.retention import retain
from ropewalk.checkpoint.run_state import manifest_of
from ropewalk.checkpoint.tiers.gap_scheduler import TrafficLearner
from ropewalk.checkpoint.tiers.memory_tier import MemoryTier
from ropewalk.checkpoint.tiers.remote_tier import RemoteTier
from ropewalk.checkpoint.tiers.tier import ShardKey
from ropewalk.checkpoint.tiers.tier_writer import TierWriter, memory_folder
from ropewalk.checkpoint.write.save import save
from ropewalk.config.ranks import Ranks
from tests.checkpoint.newest import searched
from tests.checkpoint.shards import COLUMNS, ROWS, flip, parts_of, same, state

WORLD = 2


class Machines:
    """Two machines with a rank each; every one has the other's copies."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        secret = folder / "secret"
        secret.write_text("0123456789abcdef")
        secret.chmod(0o600)
        self.folder = folder
        self._settings = {
            "memory": "on",
            "peers": tuple(f"127.0.0.1:{port}" for port in free_ports(WORLD)),
            "secret_file": str(secret),
            "run": "run",
            "timeout_s": 5.0,
            **settings,
        }
        self.copiers = [self.start(rank) for rank in range(WORLD)]

    def start(self, rank: int) -> TierWriter:
        (self.folder / f"machine{rank}").mkdir(exist_ok=True)
        settings = Tiers(folder=str(self.folder / f"machine{rank}"), **self._settings)
        return TierWriter(settings, self.folder / "checkpoints", ranks=Ranks(rank, WORLD, 0), attempt="first")

    def keep(self, step: int) -> None:
        for rank, tier_writer in enumerate(self.copiers):
            of = state(step)
            size = 2 * ROWS * COLUMNS * 4 // WORLD
            tier_writer.keep(manifest_of(of), parts_of(of, rank=rank, world=WORLD), tokenizer=of.tokenizer, size=size)
        for tier_writer in self.copiers:
            tier_writer.settle()

    def lose(self, rank: int) -> None:
        """The machine is replaced by an empty one."""
        self.copiers[rank].close()
        shutil.rmtree(self.folder / f"machine{rank}")
        self.copiers[rank] = self.start(rank)

    def memory(self, rank: int) -> MemoryTier:
        return MemoryTier(memory_folder(str(self.folder / f"machine{rank}")))

    def close(self) -> None:
        for tier_writer in self.copiers:
            tier_writer.close()


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    made.close()


def test_each_machine_holds_the_shards_of_both(machines: Machines) -> None:
    machines.keep(3)
    for rank in range(WORLD):
        assert [(key.step, key.rank) for key in machines.memory(rank).shards("run")] == [(3, 0), (3, 1)]
    told = [copied for tier_writer in machines.copiers for copied in tier_writer.finished()]
    assert sorted(copied.tier.split()[0] for copied in told) == ["memory", "memory", "peer", "peer"]
    assert all(copied.error == "" for copied in told)


def test_a_replaced_machine_takes_everything_from_the_other(machines: Machines) -> None:
    machines.keep(3)
    machines.keep(4)
    machines.lose(1)
    with machines.copiers[1].candidates() as offered:
        found = searched(offered)
    assert found.state is not None
    assert same(found.state, state(4))
    assert len(offered.report.sources) == 1
    assert next(iter(offered.report.sources)).startswith("peer")


def test_a_damaged_replica_is_passed_over_for_the_step_before(machines: Machines) -> None:
    machines.keep(3)
    machines.keep(4)
    machines.lose(1)
    (damaged,) = machines.memory(0).folder.glob("run/rank-00001-of-*/step-00000004*/model-00001.safetensors")
    flip(damaged, bit=777)
    with machines.copiers[1].candidates() as offered:
        found = searched(offered)
    assert found.state is not None
    assert same(found.state, state(3))
    assert "model-00001.safetensors" in offered.report.damaged[0]


def test_forecasts_stand_beside_what_was_measured(machines: Machines) -> None:
    for step in range(1, 5):
        machines.keep(step)
    sent = [copied for copied in machines.copiers[0].finished() if copied.tier.startswith("peer")]
    assert [copied.step for copied in sent] == [1, 2, 3, 4]
    assert sent[0].predicted_s is None
    assert all(copied.predicted_s is not None and copied.predicted_s > 0 for copied in sent[1:])
    assert all(copied.measured_s > 0 and copied.bytes > 0 for copied in sent)


def test_memory_files_and_connections_stay_the_same_over_many_copies(machines: Machines) -> None:
    for step in range(1, 6):
        machines.keep(step)
    files, memory = len(os.listdir("/proc/self/fd")), [machines.memory(rank).used_bytes() for rank in range(WORLD)]
    threads = threading.active_count()
    for step in range(6, 56):
        machines.keep(step)
    assert len(os.listdir("/proc/self/fd")) <= files + 4
    assert threading.active_count() <= threads + 4
    for rank in range(WORLD):
        assert machines.memory(rank).used_bytes() <= 1.05 * memory[rank]
        assert len(machines.memory(rank).shards("run")) == 4


def test_the_end_of_a_run_gives_all_memory_back(machines: Machines) -> None:
    machines.keep(3)
    machines.copiers[0].end()
    assert [machines.memory(rank).shards("run") for rank in range(WORLD)] == [[], []]


def test_what_is_on_its_way_to_the_store_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    upload = RemoteTier.upload

    def slow(self: RemoteTier, path: Path, **options: Any) -> Any:
        begun.set()
        assert go.wait(20)
        return upload(self, path, **options)

    monkeypatch.setattr(RemoteTier, "upload", slow)
    folder = tmp_path / "checkpoints"
    tier_writer = TierWriter(Tiers(remote=f"file://{tmp_path}/store", run="run"), folder)
    for step in range(1, 6):
        tier_writer.stored(save(folder, state(step)))
        assert begun.wait(20)
        retain(folder, keep_last=1, in_use=tier_writer.in_use)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000001", "step-00000005"]
    go.set()
    tier_writer.settle()
    assert [copied.step for copied in tier_writer.finished()] == [1, 5]
    assert tier_writer.in_use == []
    tier_writer.close()


def test_a_store_gets_a_checkpoint_every_so_many(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    settings = Tiers(remote=f"file://{tmp_path}/store", run="run", remote_every=3, remote_keep_last=9)
    tier_writer = TierWriter(settings, folder)
    for step in range(1, 8):
        tier_writer.stored(save(folder, state(step)))
        tier_writer.settle()
    assert [copied.step for copied in tier_writer.finished()] == [1, 4, 7]
    tier_writer.close()


def test_a_missing_secret_is_named(tmp_path: Path) -> None:
    settings = Tiers(
        memory="on", folder=str(tmp_path), run="run", peers=("127.0.0.1:0", "127.0.0.1:9"), secret_file="nowhere"
    )
    with pytest.raises(ConfigError, match=r"nowhere: no such file"):
        TierWriter(settings, tmp_path / "checkpoints")


def test_every_slice_that_goes_to_a_peer_asks_whether_training_uses_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TrafficLearner] = []
    real = TrafficLearner.wait_free

    def wait_free(self: TrafficLearner, most_s: float) -> bool:
        asked.append(self)
        return real(self, most_s)

    monkeypatch.setattr(TrafficLearner, "wait_free", wait_free)
    machines = Machines(tmp_path)
    machines.keep(3)
    for tier_writer in machines.copiers:
        sent = [copied.bytes for copied in tier_writer.finished() if copied.tier.startswith("peer")]
        assert sent[0] > 0
        assert tier_writer.learner in asked
    machines.close()


def test_a_copy_that_newer_ones_have_replaced_before_it_could_be_sent_is_told(machines: Machines) -> None:
    tier_writer = machines.copiers[0]
    tier_writer._replicate(ShardKey(run="run", step=1, rank=0, world=WORLD, attempt="first"))
    (told,) = tier_writer.finished()
    assert (told.step, told.bytes, told.error) == (1, 0, "newer copies took its place")
