"""Memory that outlives the process: two slots, one of which is always whole."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ropewalk.base.errors import DataError, StorageError
from ropewalk.checkpoint.format import verify_checkpoint
from ropewalk.checkpoint.read.load import load
from ropewalk.checkpoint.tiers.memory_tier import MemorySource, MemoryTier
from ropewalk.checkpoint.tiers.tier import ShardKey
from tests.checkpoint.shards import flip, keep, same, state


def test_what_is_kept_comes_back_bit_for_bit_and_names_its_owner(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path / "memory")
    key = keep(memory, 7)
    assert memory.path(key) == tmp_path / "memory/run/rank-00000-of-00001/step-00000007.a"
    assert same(load(memory.path(key)), state(7))
    assert MemoryTier(tmp_path / "memory").shards("run") == [key]
    assert (tmp_path / "memory").stat().st_mode & 0o777 == 0o700


def test_the_third_shard_is_written_over_the_first_in_place(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path)
    first, second = keep(memory, 1), keep(memory, 2)
    page = (memory.path(first) / "model.safetensors").stat().st_ino
    third = keep(memory, 3)
    assert memory.shards("run") == [second, third]
    assert (memory.path(third) / "model.safetensors").stat().st_ino == page
    assert same(load(memory.path(third)), state(3))
    assert len(list(memory.path(third).parent.iterdir())) == 2


def test_a_smaller_shard_over_a_larger_one_is_whole(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path)
    keep(memory, 1, rows=100)
    keep(memory, 2, rows=100)
    key = keep(memory, 3, rows=4)
    assert verify_checkpoint(memory.path(key)) == []
    assert same(load(memory.path(key)), state(3, rows=4))


def test_a_kill_at_any_point_leaves_an_older_shard_whole(tmp_path: Path) -> None:
    survived, killed_at = False, 0
    while not survived:
        killed_at += 1
        memory = MemoryTier(tmp_path / str(killed_at))
        for step in (1, 2):
            keep(memory, step)
        child = os.fork()
        if child == 0:
            _die_at(killed_at)
            keep(memory, 3)
            os._exit(0)
        survived = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        # A new process, as it were, finds what the dead one left.
        found = MemoryTier(tmp_path / str(killed_at))
        whole = found.shards("run")
        assert whole
        assert whole[-1].step >= 2
        assert all(same(load(found.path(key)), state(key.step)) for key in whole)
        keep(found, 4)
        assert found.shards("run")[-1].step == 4
        assert len(list(found.path(whole[-1]).parent.iterdir())) <= 2, "memory leaks"
    assert killed_at > 5


def _die_at(number: int) -> None:
    seen = 0

    def hook(event: str, _: tuple[object, ...]) -> None:
        nonlocal seen
        if event == "ropewalk.point":
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_flipped_bits_anywhere_are_found_and_the_shard_is_taken_out_of_sight(tmp_path: Path) -> None:
    draw = random.Random(0)
    memory = MemoryTier(tmp_path)
    for _ in range(60):
        key = keep(memory, 5)
        path = draw.choice(sorted(memory.path(key).iterdir()))
        flip(path, bit=draw.randrange(8 * path.stat().st_size))
        wrong = memory.check(key)
        assert wrong
        assert path.name in wrong[0]
        assert memory.shards("run") == []


def test_a_damaged_manifest_is_named_and_offers_the_rest(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path)
    good, bad = keep(memory, 1), keep(memory, 2)
    flip(memory.path(bad) / "manifest.json", bit=4000)
    offers, wrong = MemorySource(memory, "run").offers()
    assert [offer.key for offer in offers] == [good]
    assert "step-00000002" in wrong[0]


def test_the_limit_holds_and_what_was_there_stays(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path, limit_bytes=12_000)
    key = keep(memory, 1)
    with pytest.raises(StorageError, match=r"memory_bytes"):
        keep(memory, 2, rows=1000)
    assert memory.shards("run") == [key]
    assert verify_checkpoint(memory.path(key)) == []
    for step in range(2, 12):
        keep(memory, step)
    assert memory.used_bytes() <= 12_000


def test_a_shard_in_use_is_not_written_over(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path)
    first = keep(memory, 1)
    with memory.pinned(first) as path:
        for step in (2, 3, 4):
            keep(memory, step)
        assert same(load(path), state(1))
    assert [key.step for key in memory.shards("run")] == [1, 4]


def test_two_writers_of_one_rank_do_not_mix(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path)
    begun, go = threading.Event(), threading.Event()

    def slow() -> None:
        with memory.filling(ShardKey(run="run", step=9), size=1):
            begun.set()
            go.wait(10)

    thread = threading.Thread(target=slow)
    thread.start()
    assert begun.wait(10)
    with pytest.raises(StorageError, match=r"another copy"):
        keep(memory, 10)
    go.set()
    thread.join()


def test_the_next_start_reclaims_idle_runs_but_not_its_own(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path)
    for run in ("idle", "live", "mine"):
        keep(memory, 1, run=run)
    day_ago = time.time() - 90_000
    for run in ("idle", "mine"):
        for path in (tmp_path / run, *(tmp_path / run).rglob("*")):
            os.utime(path, (day_ago, day_ago))
    assert memory.reclaim(own="mine") == ["idle"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["live", "mine"]
    memory.drop("mine")
    assert memory.shards("mine") == []


def test_nothing_is_removed_that_was_not_made_here(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path / "memory")
    keep(memory, 1, run="idle")
    notes = [
        tmp_path / "memory" / name for name in ("thesis/one.txt", "idle/two.txt", "idle/rank-00000-of-00001/three")
    ]
    for path in notes:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (tmp_path / "memory/idle/rank-00007-of-00008").symlink_to(tmp_path / "memory/thesis")
    (tmp_path / "memory/idle/rank-00000-of-00001/step-00000009.a").symlink_to(tmp_path / "memory/thesis")
    (tmp_path / "memory/link").symlink_to(tmp_path / "memory/thesis")
    day_ago = time.time() - 90_000
    for path in (tmp_path / "memory").rglob("*"):
        os.utime(path, (day_ago, day_ago), follow_symlinks=False)
    assert memory.reclaim() == ["idle"]
    assert [path.read_text() for path in notes] == ["mine"] * 3
    assert memory.shards("idle") == []
    (tmp_path / "memory/idle/.ropewalk-memory").unlink()
    os.utime(tmp_path / "memory/idle", (day_ago, day_ago))
    assert memory.reclaim() == [], "without the mark it is not ours"


def test_no_file_of_a_shard_is_read_or_written_through_a_link(tmp_path: Path) -> None:
    memory, secret = MemoryTier(tmp_path / "memory"), tmp_path / "secret"
    secret.write_text("private")
    key = keep(memory, 1)
    (memory.path(key) / "model.safetensors").unlink()
    (memory.path(key) / "model.safetensors").symlink_to(secret)
    with pytest.raises(DataError, match=r"model.safetensors of step 1"), memory.opened(key, "model.safetensors"):
        pass
    keep(memory, 2)
    with pytest.raises(OSError, match=r"symbolic"):
        keep(memory, 3)  # over the files of step 1
    assert secret.read_text() == "private"


@pytest.mark.parametrize("name", ["../etc", "a/b", "", ".hidden", "x" * 200])
def test_names_that_are_not_names_are_refused(name: str) -> None:
    with pytest.raises(DataError):
        ShardKey(run=name, step=1)
