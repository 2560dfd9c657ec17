"""A disk that is full, broken, read-only, slow or hanging costs checkpoints, never the run or what was saved before."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch

from ropewalk.base.errors import StorageError
from ropewalk.checkpoint.disk import LocalDisk, WatchedDisk
from ropewalk.checkpoint.faulty import Fault, FaultyDisk
from ropewalk.checkpoint.format import list_checkpoints, verify_checkpoint
from ropewalk.checkpoint.run_state import local_shards, manifest_of
from ropewalk.checkpoint.write.persist import Persister
from ropewalk.checkpoint.write.snapshot import Stager
from ropewalk.train.loop import train
from tests.checkpoint.test_background import state
from tests.tiny import make_run
from tests.train.runs import events, final_files, quick, train_until

WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EIO: "input/output error",
    errno.EROFS: "read-only",
    errno.EXDEV: "two file systems",
    errno.EDQUOT: "quota",
    errno.ESTALE: "network file system",
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The last checkpoint of a run on a sound disk."""
    run = make_run(tmp_path_factory.mktemp("whole"))
    train(run)
    return final_files(run)


def sound(run: Path) -> bool:
    """Whether every checkpoint of the run is whole, and there is one."""
    found = list_checkpoints(run / "checkpoints")
    return bool(found) and not any(verify_checkpoint(path) for path in found)


CALLS = ["create", "write", "sync", "make_folder", "rename", "sync_folder"]


@pytest.mark.parametrize("code", WORDS, ids=lambda code: errno.errorcode[code])
def test_training_outlives_a_disk_that_fails_for_a_while(tmp_path: Path, code: int, whole: dict[str, bytes]) -> None:
    run = make_run(tmp_path)
    call = "rename" if code == errno.EXDEV else "write"
    train(run, disk=FaultyDisk(Fault(kind="error", code=code, on=(call,), times=1)))
    (failed,) = events(run, "save_failed")
    assert failed["step"] == 3
    assert WORDS[code] in failed["error"]
    (warning,) = [e["message"] for e in events(run, "warning") if "could not be saved" in e["message"]]
    assert "step 3 could not be saved" in warning
    assert "(2 more may fail)" in warning
    assert sound(run)
    assert final_files(run) == whole


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_failure_of_any_call_leaves_older_checkpoints_and_the_result_alone(
    tmp_path: Path, call: str, after: int, whole: dict[str, bytes]
) -> None:
    run = make_run(tmp_path)
    train_until(run, 5)
    before = list_checkpoints(run / "checkpoints")
    assert before
    train(run, disk=FaultyDisk(Fault(kind="error", on=(call,), after=after, times=1)))
    # One that fails at the very end is made again before the run is said to be over.
    assert len(events(run, "save_failed")) == (1 if after == 0 or call != "make_folder" else after % 2)
    assert sound(run)
    assert final_files(run) == whole


def test_a_disk_that_stays_full_ends_the_run_when_the_budget_is_spent(tmp_path: Path, whole: dict[str, bytes]) -> None:
    run = make_run(tmp_path, checkpoint__save_every_steps=1, checkpoint__failures=2)
    size = sum(map(len, whole.values()))
    disk = FaultyDisk(Fault(kind="quota", code=errno.ENOSPC, bytes=2 * size + size // 2))
    with pytest.raises(StorageError, match="the disk is full"):
        train(run, disk=disk)
    assert [event["step"] for event in events(run, "save_failed")] == [3, 4]
    assert sound(run)
    assert not list((run / "checkpoints").glob("*.partial"))
    train(run)
    assert {k: v for k, v in final_files(run).items() if k != "manifest.json"} == {
        k: v for k, v in whole.items() if k != "manifest.json"
    }


def test_a_slow_disk_costs_time_alone(tmp_path: Path, whole: dict[str, bytes]) -> None:
    run = make_run(tmp_path)
    train(run, disk=FaultyDisk(Fault(kind="slow", seconds=0.02)))
    assert not events(run, "save_failed")
    assert final_files(run) == whole


@pytest.mark.parametrize("write", ["background", "blocking"])
def test_a_hanging_disk_does_not_hold_training_up_for_ever(tmp_path: Path, write: str, whole: dict[str, bytes]) -> None:
    settings = {"checkpoint__save_every_steps": 1, "checkpoint__failures": 1, "checkpoint__write": write}
    train_until(make_run(tmp_path, **settings), 2)  # with the usual patience: a disk may be slow
    run = make_run(tmp_path, checkpoint__timeout_s=0.3, **settings)
    before = list_checkpoints(run / "checkpoints")
    disk = FaultyDisk(Fault(kind="hang", on=("write",)))
    try:
        with pytest.raises(StorageError, match=r"the disk has not answered for .* s and what is being saved"):
            train(run, disk=disk)
        assert events(run, "save_failed")
        assert list_checkpoints(run / "checkpoints") == before
        assert sound(run)
    finally:
        disk.healed.set()


def test_a_call_under_way_is_timed_and_one_that_ended_is_not() -> None:
    disk = FaultyDisk(Fault(kind="hang", on=("remove",)))
    watched = WatchedDisk(disk)
    assert watched.waiting_s() == 0.0
    thread = threading.Thread(target=watched.remove, args=(Path("nothing"),))
    thread.start()
    while watched.waiting_s() < 0.02:
        pass
    disk.healed.set()
    thread.join()
    assert watched.waiting_s() == 0.0


def test_a_bit_that_flips_in_the_staging_buffer_is_found_before_anything_is_committed(tmp_path: Path) -> None:
    class Flips(LocalDisk):
        """Flips a bit of what is about to be written, once the first file is begun."""

        def make_folder(self, path: Path) -> None:
            super().make_folder(path)
            snapshot.parts["optimizer"][0].local.view(torch.uint8).view(-1)[1] ^= 4

    stager, persister = Stager(), Persister(Flips())
    live = state(1)
    snapshot = stager.take({"model": list(local_shards(live.model)), "optimizer": list(local_shards(live.optimizer))})
    assert snapshot
    snapshot.wait_copied()
    persister.submit(tmp_path, manifest_of(live), snapshot, tokenizer=b"{}")
    persister.close()
    stager.close()
    (saved,) = persister.finished()
    assert isinstance(saved.error, StorageError)
    assert "optimizer/exp_avg/w: the copy in memory changed before it was written" in str(saved.error)
    assert list_checkpoints(tmp_path) == []
