"""Snapshots hold the state of their moment, and become checkpoints while the state goes on changing."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ropewalk.checkpoint.write.snapshot as snapshot_module
from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.disk import LocalDisk
from ropewalk.checkpoint.format import list_checkpoints, verify_checkpoint
from ropewalk.checkpoint.read.load import load
from ropewalk.checkpoint.run_state import State, local_shards, manifest_of
from ropewalk.checkpoint.write.persist import Persister
from ropewalk.checkpoint.write.shard_writer import RateLimiter
from ropewalk.checkpoint.write.snapshot import HostBuffer, Stager
from ropewalk.train.checkpointer import Checkpointer
from tests.tiny import small_spec


def state(step: int) -> State:
    weights = {"w": torch.full((64, 32), float(step)), "b": torch.full((3,), step, dtype=torch.bfloat16)}
    moments = {"exp_avg/w": torch.full((64, 32), step + 0.5), "step": torch.tensor(float(step))}
    return State(
        step=step,
        tokens=step,
        seed=0,
        spec=small_spec(),
        data={"row": step},
        model=weights,
        optimizer=moments,
        tokenizer=b"{}",
    )


def parts_of(of: State) -> dict[str, list]:
    return {"model": list(local_shards(of.model)), "optimizer": list(local_shards(of.optimizer))}


@pytest.fixture
def stager() -> Iterator[Stager]:
    made = Stager()
    yield made
    made.close()


def test_what_changes_after_the_copy_does_not_reach_the_checkpoint(tmp_path: Path, stager: Stager) -> None:
    persister = Persister(LocalDisk())
    live = state(1)
    for step in range(1, 6):
        for tensor in (*live.model.values(), *live.optimizer.values()):
            tensor.fill_(step)
        snapshot = stager.take(parts_of(live))
        persister.submit(tmp_path, manifest_of(state(step)), snapshot, tokenizer=b"{}")
        snapshot.wait()
        for tensor in live.model.values():
            tensor.fill_(-1.0)
    persister.close()
    assert [saved.step for saved in persister.finished()] == [1, 2, 3, 4, 5]
    for path in list_checkpoints(tmp_path):
        found = load(path)
        assert all((t == found.step).all() for t in (*found.model.values(), *found.optimizer.values()))


def test_buffers_are_made_once_and_used_in_turn(stager: Stager) -> None:
    live = state(1)
    size = stager.prepare(parts_of(live)).result()
    # 2 x (64 x 32 float32 + 3 bfloat16) of the model, 2 x (64 x 32 + 1 float32) of the optimizer.
    assert size == 2 * (64 * 32 * 4 + 3 * 2 + (64 * 32 + 1) * 4)
    places = []
    for _ in range(4):
        snapshot = stager.take(parts_of(live))
        snapshot.wait()
        places.append(snapshot.parts["model"][0].local.data_ptr())
        snapshot.release()
    assert places[0] == places[2] != places[1] == places[3]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_snapshot_is_copied_by_one_thread_and_takes_none_from_others(two_threads: None) -> None:
    """Helpers of the copying thread would slow training down for good."""
    made = Stager()
    taken = made.take({"model": list(local_shards({"w": torch.ones(1_000_000)}))})
    taken.wait()
    taken.release()
    assert made._pool.submit(torch.get_num_threads).result() == 1
    made.close()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2


def test_a_large_state_lies_in_pieces_each_part_in_one(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "BUFFER_BYTES", 100)
    live = {f"w{n}": torch.full((11,), float(n)) for n in range(20)} | {"narrow": torch.ones(7, dtype=torch.bfloat16)}
    parts = {"model": list(local_shards(live))}
    assert stager.prepare(parts).result() == 2 * (20 * 44 + 14)
    assert sorted(room.bytes for room in stager._slots[0].buffers.values()) == [14, 88] + [132] * 6
    taken = stager.take(parts)
    taken.wait_copied()
    assert all(torch.equal(part.local, live[part.name]) for part in taken.parts["model"])
    taken.release()


def test_a_snapshot_waits_for_buffers_that_are_being_made(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()
    real, made = snapshot_module.HostBuffer, []

    def slow(*arguments: Any, **options: Any) -> HostBuffer:
        made.append(threading.current_thread())
        began.set()
        assert go_on.wait(10)
        return real(*arguments, **options)

    monkeypatch.setattr(snapshot_module, "HostBuffer", slow)
    live = state(1)
    bytes_there = stager.prepare(parts_of(live))
    assert began.wait(10)
    assert not bytes_there.done()  # the caller has gone on
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stager.take, parts_of(live))
        assert not concurrent.futures.wait([waiting], timeout=0.05).done
        go_on.set()
        taken = waiting.result(10)
    assert bytes_there.done()
    assert len(set(made)) == 1  # and makes none itself
    taken.wait_copied()
    assert all(torch.equal(part.local, live.model[part.name]) for part in taken.parts["model"])
    taken.release()


def test_memory_made_ahead_is_as_large_as_asked_for_and_zero() -> None:
    for count in (0, 1, 5_000_001):
        room = HostBuffer(count, torch.float32, locked=False)
        assert room.tensor.numel() == count
        assert room.bytes == 4 * count
        assert not room.tensor.any()
        room.tensor.fill_(1.0)  # it may be written


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_for_a_gpu_is_page_locked_and_given_back() -> None:
    for _ in range(3):  # at the same address, if it was given back
        room = HostBuffer(1 << 20, torch.float32, locked=True)
        assert room.tensor.is_pinned()
        assert room.tensor[1000:].is_pinned()
        source = torch.randn(1 << 20, device="cuda")
        room.tensor.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(room.tensor, source.cpu())
        del room


def test_a_third_snapshot_waits_for_a_buffer(stager: Stager) -> None:
    live = state(1)
    first, _ = stager.take(parts_of(live)), stager.take(parts_of(live))
    taken = threading.Event()

    def third() -> None:
        stager.take(parts_of(live))
        taken.set()

    thread = threading.Thread(target=third)
    thread.start()
    assert not taken.wait(0.05)
    first.release()
    assert taken.wait(60)
    thread.join()


class Full(LocalDisk):
    """A disk that is full for its first checkpoints."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def make_folder(self, path: Path) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().make_folder(path)


def test_a_failed_save_is_told_and_the_next_one_works(tmp_path: Path, stager: Stager) -> None:
    persister = Persister(Full(failures=1))
    for step in (1, 2):
        snapshot = stager.take(parts_of(state(step)))
        persister.submit(tmp_path, manifest_of(state(step)), snapshot, tokenizer=b"{}")
    assert persister.drain(timeout_s=20)
    first, second = persister.finished()
    assert "No space left" in str(first.error)
    assert second.error is None
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002"]
    assert verify_checkpoint(list_checkpoints(tmp_path)[0]) == []
    persister.close()


def test_retention_runs_only_after_the_new_one_is_durable(tmp_path: Path, stager: Stager) -> None:
    persister = Persister(LocalDisk())
    seen = []
    for step in (1, 2):
        persister.submit(
            tmp_path,
            manifest_of(state(step)),
            stager.take(parts_of(state(step))),
            tokenizer=b"{}",
            after=lambda: seen.append([path.name for path in list_checkpoints(tmp_path)]),
        )
    persister.close()
    assert seen == [["step-00000001"], ["step-00000001", "step-00000002"]]


def test_a_pace_spreads_bytes_over_time() -> None:
    now = 0.0
    pace = RateLimiter(100.0, clock=lambda: now)
    waits = []
    for _ in range(5):
        wait = pace.delay(50)
        waits.append(wait)
        now += wait
    assert waits == [0.0, 0.5, 0.5, 0.5, 0.5]
    now += 10
    assert pace.delay(50) == 0.0


def test_a_copy_that_fails_reaches_who_waits_for_it_and_for_its_hash(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, Checkpoints(), warn=pytest.fail)
    # No storage to copy from, as when the memory of a tensor is gone.
    checkpointer.save(dataclasses.replace(state(1), model={"w": torch.empty(4, device="meta")}))
    with pytest.raises(NotImplementedError):
        checkpointer.fence()
    checkpointer.settle()
    with pytest.raises(NotImplementedError):
        checkpointer.finished()
    checkpointer.close()
