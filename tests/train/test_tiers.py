"""Training with copies in memory, in a peer's memory and in a store."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.errors import ConfigError
from ropewalk.checkpoint.config import Tiers
from ropewalk.checkpoint.format import identity, list_checkpoints, read_checkpoint_manifest, step_path
from ropewalk.checkpoint.tiers.memory_tier import MemoryTier
from ropewalk.checkpoint.tiers.peer_tier import PeerServer
from ropewalk.checkpoint.tiers.tier_writer import memory_folder
from ropewalk.load.cache.config import Cache
from ropewalk.load.cache.tiers import open_tiers
from ropewalk.parallel.executor import StepResult
from ropewalk.store.origin import Origin
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.loop import train
from ropewalk.train.training_run import TrainingRun
from tests.checkpoint.shards import flip
from tests.tiny import make_run
from tests.train.runs import events, last_checkpoint, quick, train_until

KILLED = """
import os, signal, sys
from pathlib import Path

def hook(event, arguments):
    if event == "ropewalk.point" and arguments[0] == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
from ropewalk.train.loop import train
from ropewalk.parallel.executor import StepResult
from ropewalk.train.training_run import TrainingRun
train(Path(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


def killed_at(run: Path, point: str) -> None:
    """Trains in a process that is killed at a labelled point."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", KILLED, str(run), point], env=environment)
    assert done.returncode == -signal.SIGKILL


def tiers(folder: Path, **settings: Any) -> Tiers:
    (folder / "shm").mkdir(exist_ok=True)
    return Tiers(memory="on", folder=str(folder / "shm"), **settings)


class Patient(Hook):
    """Waits in step 7 until a memory holds what was saved before."""

    def __init__(self, memory: MemoryTier, run: str, *, steps: list[int]) -> None:
        self._memory, self._run, self._steps = memory, run, steps

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        deadline = time.monotonic() + 100
        while run.step == 7 and [key.step for key in self._memory.shards(self._run)] != self._steps:
            assert time.monotonic() < deadline, "the copies do not come"
            time.sleep(0.01)


def uninterrupted(folder: Path) -> str:
    folder.mkdir()
    run = make_run(folder)
    train(run)
    return identity(read_checkpoint_manifest(last_checkpoint(run)))


def sent_from(event: dict[str, Any]) -> set[str]:
    return {taken["source"] for taken in event["files"].values()}


def test_a_killed_process_goes_on_from_its_own_memory_with_the_same_bits(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint__tiers=tiers(tmp_path))
    # The second save, of step 6, is in memory and nowhere else.
    killed_at(run, "checkpoint.begin:step-00000006")
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000003"]
    train(run)
    (gathered,) = events(run, "gathered")
    assert gathered["step"] == 6
    assert sent_from(gathered) == {"own memory"}
    assert identity(read_checkpoint_manifest(last_checkpoint(run))) == uninterrupted(tmp_path / "other")
    memory = memory_folder(str(tmp_path / "shm"))
    assert list(memory.iterdir()) == [], "the run ended well and left memory behind"


def test_copies_in_memory_may_come_oftener_than_checkpoints(tmp_path: Path) -> None:
    settings = tiers(tmp_path, memory_every_steps=1)
    run = make_run(tmp_path, checkpoint__tiers=settings, checkpoint__save_every_steps=100)
    killed_at(run, "train.step:6")
    assert list_checkpoints(run / "checkpoints") == []
    train(run)
    (gathered,) = events(run, "gathered")
    # A step is left out while the copy before it is under way: which one is the last is a matter of moments.
    assert 1 <= gathered["step"] <= 5
    assert any(event["tier"] == "memory" for event in events(run, "copied"))
    other = make_run(tmp_path / "other", checkpoint__save_every_steps=100)
    train(other)
    made, expected = (read_checkpoint_manifest(last_checkpoint(one)) for one in (run, other))
    assert identity(made) == identity(expected)


def test_the_last_step_is_on_the_disk_even_when_it_was_only_in_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint__tiers=tiers(tmp_path))
    killed_at(run, "checkpoint.begin:step-00000008")
    train(run)
    assert last_checkpoint(run) == step_path(run / "checkpoints", 8)
    assert identity(read_checkpoint_manifest(last_checkpoint(run))) == uninterrupted(tmp_path / "other")


def test_damaged_memory_is_named_and_the_disk_serves(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint__tiers=tiers(tmp_path))
    killed_at(run, "checkpoint.begin:step-00000006")
    for path in (tmp_path / "shm").rglob("model.safetensors"):
        flip(path, bit=5555)
    train(run)
    (gathered,) = events(run, "gathered")
    assert gathered["step"] == 3
    assert any("own memory: step 6" in told and "model.safetensors" in told for told in gathered["damaged"])
    assert any("own memory" in event["message"] for event in events(run, "warning"))
    assert identity(read_checkpoint_manifest(last_checkpoint(run))) == uninterrupted(tmp_path / "other")


def test_a_machine_that_is_lost_is_replaced_from_a_peer_and_traffic_is_told(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    theirs = MemoryTier(tmp_path / "theirs")
    server = PeerServer(theirs, "127.0.0.1:0", secret=secret.read_bytes())
    settings = tiers(
        tmp_path, peers=("127.0.0.1:0", server.address), secret_file=str(secret), run="precious", timeout_s=5.0
    )
    run = make_run(tmp_path, checkpoint__tiers=settings)
    # One thread copies: that step 6 has come says that the copy of step 3 has been reported to the loop.
    train_until(run, 8, Patient(theirs, "precious", steps=[3, 6]))
    copied = [event for event in events(run, "copied") if event["tier"].startswith("peer")]
    assert copied
    assert all(event["error"] == "" and event["bytes"] > 0 and event["measured_s"] > 0 for event in copied)
    shutil.rmtree(tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    shutil.rmtree(run / "checkpoints")
    train(run)
    (gathered,) = events(run, "gathered")
    assert (gathered["step"], sent_from(gathered)) == (6, {f"peer {server.address}"})
    assert identity(read_checkpoint_manifest(last_checkpoint(run))) == uninterrupted(tmp_path / "other")
    assert theirs.shards("precious") == [], "the run ended well and left memory behind"
    server.close()


def test_checkpoints_go_to_a_store_and_come_back_when_the_machine_is_lost(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = Tiers(remote=f"file://{store}", run="precious")
    run = make_run(tmp_path, checkpoint__tiers=settings)
    train(run)
    names = sorted(path.name[:13] for path in (store / "precious").iterdir())
    assert names[-1] == "step-00000008"
    assert len(names) <= 2
    expected = identity(read_checkpoint_manifest(last_checkpoint(run)))
    shutil.rmtree(run / "checkpoints")
    train(run)
    (gathered,) = events(run, "gathered")
    assert gathered["step"] == 8
    assert identity(read_checkpoint_manifest(last_checkpoint(run))) == expected


def test_a_run_directory_that_was_deleted_begins_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint__tiers=tiers(tmp_path))
    train_until(run, 7)
    name = json.loads((run / "checkpoints/copies.json").read_text())["run"]
    shutil.rmtree(run)
    run = make_run(tmp_path, checkpoint__tiers=tiers(tmp_path))
    train(run)
    assert events(run, "gathered") == []
    assert json.loads((run / "checkpoints/copies.json").read_text())["run"] != name


def test_a_copy_of_a_run_directory_has_copies_of_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint__tiers=tiers(tmp_path))
    train_until(run, 7)
    shutil.copytree(run, tmp_path / "twin")
    train(tmp_path / "twin")
    memory = MemoryTier(memory_folder(str(tmp_path / "shm")))
    name = json.loads((run / "checkpoints/copies.json").read_text())["run"]
    assert [key.step for key in memory.shards(name)] == [3, 6], "the copy took what belongs to the run"


def test_a_peer_that_is_down_is_told_and_training_goes_on(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    settings = tiers(tmp_path, peers=("127.0.0.1:0", "127.0.0.1:9"), secret_file=str(secret), timeout_s=0.5)
    run = make_run(tmp_path, checkpoint__tiers=settings)
    train(run)
    assert last_checkpoint(run) == step_path(run / "checkpoints", 8)
    assert any("127.0.0.1:9" in event["message"] for event in events(run, "warning"))


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short")
    secret.chmod(0o600)
    settings = tiers(tmp_path, peers=("127.0.0.1:0", "127.0.0.1:9"), secret_file=str(secret))
    with pytest.raises(ConfigError, match=r"16 or more"):
        train(make_run(tmp_path, checkpoint__tiers=settings))


@pytest.mark.parametrize("mode", [0o644, 0o602, 0o620, "pipe"])
def test_a_secret_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int | str) -> None:
    secret = tmp_path / "secret"
    if isinstance(mode, int):
        secret.write_text("0123456789abcdef")
        secret.chmod(mode)
        words = rf"secret: other users can read or write it \(mode {mode:04o}\); `chmod 600"
    else:
        os.mkfifo(secret, 0o600)
        words = "secret: not a regular file"
    settings = tiers(tmp_path, peers=("127.0.0.1:0", "127.0.0.1:9"), secret_file=str(secret))
    with pytest.raises(ConfigError, match=rf"checkpoint\.tiers\.secret_file.*{words}"):
        train(make_run(tmp_path, checkpoint__tiers=settings))
    with pytest.raises(ConfigError, match=rf"load\.cache\.secret_file.*{words}"):
        open_tiers(Cache(peers=("127.0.0.1:0",), secret_file=str(secret)), Origin())


def test_settings_that_cannot_work_are_all_named() -> None:
    wrong = dict(Tiers(peers=("here",), racks=("a", "b")).check())
    assert set(wrong) == {"memory", "secret_file", "copies", "peers", "racks"}
    assert dict(Tiers(memory="on", peers=("a:1", "b:2"), secret_file="x", racks=("r", "s")).check()) == {}
