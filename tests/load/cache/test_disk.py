"""A folder as a tier: whole files or none, within the quota, for several processes, through kills and damage."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.load.cache.disk import Disk
from ropewalk.load.cache.folder import SharedFolder
from ropewalk.load.cache.policies import Keep, Lru
from ropewalk.store.items import Item

from .origins import Counting, logged, make_items, truth

ROOT = Path(__file__).parents[3]
ITEMS = make_items(12)
ALL = 1 << 20


def start(verb: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.load.cache.worker", verb, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("items/*/*.item"))


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def read(tier: Disk, items: list[Item]) -> None:
    assert [bytes(data) for data in tier.fetch(items)] == [truth(item) for item in items]


def test_a_folder_opened_again_continues(tmp_path: Path) -> None:
    first = Disk(Counting(), tmp_path, budget_bytes=ALL)
    read(first, ITEMS)
    first.close()
    origin = Counting()
    again = Disk(origin, tmp_path, budget_bytes=ALL)
    read(again, ITEMS)
    assert origin.requests == 0
    assert again.used_bytes == bytes_in(tmp_path)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([Keep, Lru]), st.integers(0, 1800), st.lists(st.lists(st.integers(0, 11), max_size=5), max_size=12)
)
def test_the_quota_counts_every_byte(
    tmp_path_factory: pytest.TempPathFactory,
    policy: Callable[[], Keep | Lru],
    budget: int,
    batches: list[list[int]],
) -> None:
    folder = tmp_path_factory.mktemp("quota")
    tier = Disk(Counting(), folder, budget_bytes=budget, policy=policy())
    for batch in batches:
        read(tier, [ITEMS[number] for number in batch])
        assert tier.used_bytes == bytes_in(folder) <= budget
    tier.close()


def test_a_policy_that_drops_continues_in_the_order_of_the_files(tmp_path: Path) -> None:
    first = Disk(Counting(), tmp_path, budget_bytes=420, policy=Lru())
    read(first, ITEMS[:3])
    first.close()
    origin = Counting()
    again = Disk(origin, tmp_path, budget_bytes=420, policy=Lru())
    read(again, ITEMS[3:4])
    read(again, ITEMS[2:3])
    assert len(files(tmp_path)) == 3
    assert origin.asked == {ITEMS[3].start: 1}


@pytest.mark.parametrize("place", [0, 50, -1, -10, -20, -30])
def test_a_flipped_bit_is_found_at_the_first_read_and_the_item_fetched_again(tmp_path: Path, place: int) -> None:
    first = Disk(Counting(), tmp_path, budget_bytes=ALL)
    read(first, ITEMS)
    first.close()
    path = files(tmp_path)[3]
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    origin = Counting()
    tier = Disk(origin, tmp_path, budget_bytes=ALL)
    read(tier, ITEMS)
    assert sum(origin.asked.values()) == 1
    read(tier, ITEMS)
    assert sum(origin.asked.values()) == 1
    assert tier.used_bytes == bytes_in(tmp_path)


def test_a_file_written_again_after_it_was_read_is_checked_again(tmp_path: Path) -> None:
    tier = Disk(Counting(), tmp_path, budget_bytes=ALL)
    read(tier, ITEMS)
    path = files(tmp_path)[3]
    data = bytearray(path.read_bytes())
    data[7] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    read(tier, ITEMS)
    assert tier.counts().damaged == 1


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_neither_waited_for_nor_removed(
    tmp_path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    tier = Disk(Counting(), tmp_path, budget_bytes=ALL)
    read(tier, ITEMS)
    path = files(tmp_path)[3]
    path.unlink()
    make(path)
    read(tier, ITEMS)
    assert not path.is_file()
    assert f"{path}: not a regular file" in caplog.text


@pytest.mark.parametrize("size", [0, 10, 40, 100])
def test_a_truncated_file_is_fetched_again_and_counted(tmp_path: Path, size: int) -> None:
    first = Disk(Counting(), tmp_path, budget_bytes=ALL)
    read(first, ITEMS)
    first.close()
    with open(files(tmp_path)[0], "r+b") as file:
        file.truncate(size)
    tier = Disk(Counting(), tmp_path, budget_bytes=ALL)
    read(tier, ITEMS)
    assert tier.counts().damaged == 1


def test_bytes_of_an_earlier_version_of_the_file_are_not_given(tmp_path: Path) -> None:
    class New(Counting):
        """The origin's file was written anew with other bytes."""

        def fetch(self, items):  # type: ignore[no-untyped-def]
            self.requests += 1
            return [bytes(len(item)) for item in items]

    old = make_items(1)[0]
    Disk(Counting(), tmp_path, budget_bytes=ALL).fetch([old])
    new = dataclasses.replace(old, checksum=xxhash.xxh3_64_intdigest(bytes(len(old))))
    origin = New()
    tier = Disk(origin, tmp_path, budget_bytes=ALL)
    assert bytes(tier.fetch([new])[0]) == bytes(len(new))
    assert origin.requests == 1
    assert tier.counts().damaged == 0


@pytest.mark.parametrize("label", ["cache.reserved", "cache.written", "cache.committed"])
def test_a_kill_at_any_point_leaves_a_folder_that_continues(tmp_path: Path, label: str) -> None:
    done = start("killed", tmp_path, tmp_path / "log", label, 4)
    assert done.wait() == -9
    origin = Counting()
    tier = Disk(origin, tmp_path, budget_bytes=ALL)
    whole = 5 if label == "cache.committed" else 4
    assert len(files(tmp_path)) == whole
    assert tier.used_bytes == bytes_in(tmp_path)
    read(tier, make_items(10))
    assert sum(origin.asked.values()) == 10 - whole
    assert list(tmp_path.rglob("*.partial")) == []


def test_processes_that_share_a_folder_fetch_each_item_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs = [start("disk", tmp_path / "cache", log, seed) for seed in range(3)]
    counts = [json.loads(job.communicate()[0]) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0]
    assert set(logged(log).values()) == {1}
    assert len(logged(log)) == 60
    assert sum(count["hits"] + count["misses"] for count in counts) == 3 * 2 * 60


def test_who_finds_the_folder_in_use_does_not_tidy_up(tmp_path: Path) -> None:
    other = start("hold", tmp_path, 30)
    assert other.stdout is not None
    assert other.stdout.readline() == "open\n"
    (tmp_path / "items" / "00").mkdir(parents=True)
    partial = tmp_path / "items" / "00" / f"{0:016x}.item.1.1.partial"
    partial.touch()
    Disk(Counting(), tmp_path, budget_bytes=ALL).close()
    assert partial.exists()
    other.kill()
    other.wait()
    Disk(Counting(), tmp_path, budget_bytes=ALL).close()
    assert not partial.exists()


def test_a_file_dropped_by_another_is_a_miss_and_its_bytes_are_counted_once(tmp_path: Path) -> None:
    ours, theirs = (Disk(Counting(), tmp_path, budget_bytes=600, policy=Lru()) for _ in range(2))
    read(ours, ITEMS[:4])
    read(theirs, ITEMS[:4])
    read(theirs, ITEMS[4:8])
    read(ours, ITEMS[:4])
    assert ours.used_bytes == theirs.used_bytes == bytes_in(tmp_path) <= 600


def test_storage_that_refuses_does_not_stop_the_run(tmp_path: Path) -> None:
    tier = Disk(Counting(), tmp_path, budget_bytes=ALL)
    (tmp_path / "items").write_text("a file where a folder is needed")
    read(tier, ITEMS)
    assert tier.counts().refused == len(ITEMS)
    assert tier.used_bytes == 0


def test_a_claim_is_held_by_one_and_freed_by_release(tmp_path: Path) -> None:
    folders = [SharedFolder(tmp_path, limit_bytes=0, tidy=lambda: 0) for _ in range(2)]
    claim = folders[0].claim("0123456789abcdef")
    assert claim is not None
    assert folders[1].claim("0123456789abcdef") is None
    assert not folders[1].wait("0123456789abcdef", patience_s=0.02)
    threading.Timer(0.05, claim.release).start()
    assert folders[1].wait("0123456789abcdef", patience_s=10)
    again = folders[1].claim("0123456789abcdef")
    assert again is not None
    again.release()


@pytest.mark.parametrize("policy", [Keep, Lru])
def test_threads_that_fill_and_drop_at_once_keep_the_count_exact(tmp_path: Path, policy: type[Keep | Lru]) -> None:
    tier = Disk(Counting(), tmp_path, budget_bytes=700, policy=policy())
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        order = random.Random(seed)
        try:
            for _ in range(60):
                read(tier, order.sample(ITEMS, 3))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert tier.used_bytes == bytes_in(tmp_path) <= 700
