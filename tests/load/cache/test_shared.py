"""Jobs that prepare for each other: each item once an epoch, bounded, whoever dies and in whatever order they read."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ropewalk.base.errors import RunConflict
from ropewalk.load.cache.shared import Shared
from ropewalk.store.items import Item

from .origins import Counting, logged, make_items, truth

ROOT = Path(__file__).parents[3]
ITEMS = make_items(24)
PATIENCE_S = 30.0


def double(item: Item, data: bytes | memoryview, epoch: int) -> bytes:
    """A preparation whose result is larger and differs by epoch."""
    return bytes(data) * 2 + bytes([epoch])


def prepared(item: Item, epoch: int) -> bytes:
    return truth(item) * 2 + bytes([epoch])


def area(
    folder: Path, origin: Counting, *, job: int, jobs: int = 2, room: int = 1 << 20, patience: float = PATIENCE_S
) -> Shared:
    return Shared(folder, origin, prepare=double, job=job, jobs=jobs, budget_bytes=room, patience_s=patience)


def read(shared: Shared, items: list[Item], *, epoch: int) -> None:
    assert [bytes(data) for data in shared.get(items, epoch=epoch)] == [prepared(item, epoch) for item in items]


def run_together(*tasks) -> None:  # type: ignore[no-untyped-def]
    """Runs the tasks in threads of their own and raises what they raise."""
    errors: list[BaseException] = []

    def guarded(task) -> None:  # type: ignore[no-untyped-def]
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("room", [700, 2000, 1 << 20])
def test_jobs_in_one_order_prepare_each_item_once_an_epoch_within_the_room(tmp_path: Path, room: int) -> None:
    origin = Counting()
    jobs = [area(tmp_path, origin, job=job, room=room) for job in range(2)]

    def train(job: Shared) -> None:
        for epoch in range(3):
            for first in range(0, len(ITEMS), 4):
                read(job, ITEMS[first : first + 4], epoch=epoch)
                assert job.staged_bytes <= room

    run_together(*(lambda job=job: train(job) for job in jobs))
    assert set(origin.asked.values()) == {3}
    counts = [job.counts() for job in jobs]
    assert sum(count.prepared for count in counts) == sum(count.taken for count in counts) == 3 * 24
    assert [count.alone for count in counts] == [0, 0]
    assert jobs[0].staged_bytes == 0


def test_the_work_of_a_batch_is_shared_among_jobs_in_step(tmp_path: Path) -> None:
    origin = Counting()
    jobs = [area(tmp_path, origin, job=job) for job in range(2)]
    barrier = threading.Barrier(2)

    class InStep(Counting):
        def fetch(self, items):  # type: ignore[no-untyped-def]
            if self.requests == 0:
                barrier.wait(60)
            return super().fetch(items)

    for job in jobs:
        job._fetch = InStep()
    run_together(*(lambda job=job: read(job, ITEMS[:8], epoch=0) for job in jobs))
    assert [job.counts().prepared for job in jobs] == [4, 4]


def test_jobs_in_different_orders_never_hold_each_other_up(tmp_path: Path) -> None:
    origin = Counting()
    jobs = [area(tmp_path, origin, job=job, room=900, patience=60) for job in range(2)]
    orders = [ITEMS, ITEMS[::-1]]

    def train(job: Shared, order: list[Item]) -> None:
        for epoch in range(2):
            for first in range(0, len(order), 4):
                read(job, order[first : first + 4], epoch=epoch)

    run_together(*(lambda j=j, o=o: train(j, o) for j, o in zip(jobs, orders, strict=True)))
    assert jobs[0].staged_bytes <= 900
    assert all(count <= 4 for count in origin.asked.values())


def test_a_job_that_is_expected_finds_all_that_was_prepared_before_it_came(tmp_path: Path) -> None:
    origin = Counting()
    early = area(tmp_path, origin, job=0)
    read(early, ITEMS, epoch=0)
    late = area(tmp_path, origin, job=1)
    read(late, ITEMS, epoch=0)
    assert set(origin.asked.values()) == {1}
    assert early.staged_bytes == 0


def test_what_a_job_that_left_had_yet_to_read_makes_room(tmp_path: Path) -> None:
    origin = Counting()
    stays, leaves = (area(tmp_path, origin, job=job, room=1000) for job in range(2))
    read(stays, ITEMS[:4], epoch=0)
    assert stays.staged_bytes > 0
    leaves.close()
    read(stays, ITEMS[4:], epoch=0)
    assert stays.counts().alone == 20
    assert stays.counts().waited_s < PATIENCE_S / 2


def test_a_job_that_comes_back_takes_what_is_there_and_stages_nothing_in_vain(tmp_path: Path) -> None:
    origin = Counting()
    stays, leaves = (area(tmp_path, origin, job=job) for job in range(2))
    read(stays, ITEMS[:8], epoch=0)
    read(leaves, ITEMS[:8], epoch=0)
    leaves.close()
    back = area(tmp_path, origin, job=1)
    read(back, ITEMS[4:8], epoch=0)
    assert back.staged_bytes == 0
    read(stays, ITEMS[8:12], epoch=0)
    read(back, ITEMS[8:12], epoch=0)
    assert back.counts().taken == 4


def test_a_damaged_result_is_prepared_again(tmp_path: Path) -> None:
    origin = Counting()
    one, two = (area(tmp_path, origin, job=job) for job in range(2))
    read(one, ITEMS[:3], epoch=0)
    path = sorted((tmp_path / "staged").iterdir())[1]
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    read(two, ITEMS[:3], epoch=0)
    assert sum(origin.asked.values()) == 4


def test_an_item_that_never_fits_is_prepared_by_each(tmp_path: Path) -> None:
    origin = Counting()
    jobs = [area(tmp_path, origin, job=job, room=50) for job in range(2)]
    for job in jobs:
        read(job, ITEMS[:3], epoch=0)
    assert [job.counts().alone for job in jobs] == [3, 3]


def test_a_failed_preparation_gives_its_claims_back(tmp_path: Path) -> None:
    origin = Counting()
    jobs = [area(tmp_path, origin, job=job) for job in range(2)]
    origin.failing = 1
    with pytest.raises(OSError, match="away"):
        read(jobs[0], ITEMS[:3], epoch=0)
    read(jobs[1], ITEMS[:3], epoch=0)
    assert jobs[1].counts().waited_s < PATIENCE_S / 2


def test_two_processes_may_not_be_the_same_job(tmp_path: Path) -> None:
    area(tmp_path, Counting(), job=0)
    with pytest.raises(RunConflict, match="job 0 of 2"):
        area(tmp_path, Counting(), job=0)


def start_jobs(folder: Path, *, epochs: int, die_at: list[tuple[str, int]]) -> list[subprocess.Popen[str]]:
    jobs = []
    for number, (label, skip) in enumerate(die_at):
        arguments = [number, len(die_at), folder / "area", folder / "log", epochs, label, skip]
        command = [sys.executable, "-m", "tests.load.cache.worker", "job", *map(str, arguments)]
        jobs.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == "seated\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("\n")
        job.stdin.flush()
    return jobs


def test_two_processes_fetch_and_prepare_each_item_once_an_epoch(tmp_path: Path) -> None:
    jobs = start_jobs(tmp_path, epochs=2, die_at=[("never", 0)] * 2)
    results = [json.loads(job.communicate()[0]) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert [result["alone"] for result in results] == [0, 0]
    for log in ("log", "log.prepared"):
        assert set(logged(tmp_path / log).values()) == {2}
        assert len(logged(tmp_path / log)) == 40


@pytest.mark.parametrize(("label", "skip"), [("batch", 4), ("staging.reserved", 0), ("staging.written", 0)])
def test_a_job_killed_at_any_point_stops_nobody(tmp_path: Path, label: str, skip: int) -> None:
    jobs = start_jobs(tmp_path, epochs=2, die_at=[("never", 0), ("never", 0), (label, skip)])
    outputs = [job.communicate()[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, -9]
    assert [json.loads(output)["left"] <= 3000 for output in outputs[:2]] == [True, True]
