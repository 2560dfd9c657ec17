"""Reading ahead with threads: the right bytes, in time, with errors told where they belong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from ropewalk.base.errors import StorageError
from ropewalk.load.expected import Expected, Pace, budget
from ropewalk.load.prefetch import Prefetcher
from ropewalk.store.items import Item


class Memory:
    """A `Fetch` of made-up bytes that remembers what it was asked."""

    def __init__(self, *, broken: Sequence[Item] = ()) -> None:
        self.asked: list[list[Item]] = []
        self.broken = set(broken)
        self.gate = threading.Event()
        self.gate.set()

    def fetch(self, items: Sequence[Item]) -> list[bytes | memoryview]:
        self.gate.wait()
        self.asked.append(list(items))
        for item in items:
            if item in self.broken:
                raise StorageError(f"{item.file}: bytes {item.start} are gone")
        return [content(item) for item in items]

    def close(self) -> None:
        pass


def content(item: Item) -> bytes:
    return f"{item.file}:{item.start}".encode().ljust(len(item))[: len(item)]


def items_of(batch: int) -> list[Item]:
    """Two chunks, one of them shared with the next batch."""
    return [Item("a", 16 * place, 16 * place + 16) for place in (batch, batch + 1)]


def until(done: Callable[[], bool]) -> None:
    """Returns when `done`; fails after five seconds."""
    for _ in range(5000):
        if done():
            return
        threading.Event().wait(0.001)
    raise AssertionError("never done")


def test_every_batch_gets_its_bytes_and_each_item_is_read_once() -> None:
    memory = Memory()
    prefetcher = Prefetcher(memory, items_of, budget_bytes=160, requests=3, request_bytes=32)
    for batch in range(60):
        assert prefetcher.take(batch) == {item: content(item) for item in items_of(batch)}
    prefetcher.close()
    asked = [item for items in memory.asked for item in items]
    assert len(asked) == len(set(asked)), "read twice"
    assert max(map(len, memory.asked)) == 2, "neighbours joined up to the size of a request"
    assert prefetcher.stats().batches == 60


def test_no_more_than_the_budget_is_read_ahead() -> None:
    memory = Memory()
    prefetcher = Prefetcher(memory, items_of, budget_bytes=100, requests=2)
    prefetcher.wait(0)
    until(lambda: prefetcher.describe()["held_bytes"] >= 96)
    assert prefetcher.describe()["planned_bytes"] == 96
    assert prefetcher.describe()["batches_ahead"] == 5
    prefetcher.close()


def test_one_batch_larger_than_the_budget_is_read_all_the_same() -> None:
    prefetcher = Prefetcher(Memory(), lambda batch: [Item("a", 0, 50), Item("b", batch, batch + 50)], budget_bytes=20)
    assert [len(prefetcher.take(batch)) for batch in range(5)] == [2] * 5
    prefetcher.close()


def test_several_readers_get_the_same_bytes() -> None:
    prefetcher = Prefetcher(Memory(), items_of, budget_bytes=320, requests=3)
    got: dict[int, dict[Item, bytes | memoryview]] = {}

    def reader(rank: int) -> None:
        for batch in range(rank, 90, 3):
            got[batch] = prefetcher.take(batch)

    threads = [threading.Thread(target=reader, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    prefetcher.close()
    assert got == {batch: {item: content(item) for item in items_of(batch)} for batch in range(90)}


def test_what_is_waited_for_is_fetched_from_hand_and_the_unforeseen_from_the_store() -> None:
    memory = Memory()
    prefetcher = Prefetcher(memory, items_of, budget_bytes=32)
    arrival = prefetcher.wait(0)
    assert arrival.bytes == 32
    assert arrival.began <= arrival.ended
    before = len(memory.asked)
    assert prefetcher.fetch(items_of(0)) == [content(item) for item in items_of(0)]
    assert len(memory.asked) == before
    other = Item("z", 5, 9)
    assert prefetcher.fetch([other]) == [content(other)]
    assert prefetcher.stats().direct == 1
    prefetcher.release(0)
    prefetcher.close()


def test_an_error_is_told_by_the_batch_that_needs_the_item_and_the_others_go_on() -> None:
    broken = Item("a", 48, 64)
    memory = Memory(broken=[broken])
    prefetcher = Prefetcher(memory, items_of, budget_bytes=160, requests=2)
    for batch in (0, 1):
        prefetcher.take(batch)
    with pytest.raises(StorageError, match="bytes 48 are gone"):
        prefetcher.take(2)
    memory.broken.clear()
    assert prefetcher.take(2) == {item: content(item) for item in items_of(2)}
    assert prefetcher.take(3) == {item: content(item) for item in items_of(3)}
    assert prefetcher.stats().failures >= 1
    prefetcher.close()


def test_the_end_of_the_order_is_told_by_the_first_batch_beyond_it() -> None:
    batches = [items_of(0), items_of(1)]

    def needs(batch: int) -> list[Item]:
        if batch >= len(batches):
            raise StorageError("there are 2 batches")
        return batches[batch]

    prefetcher = Prefetcher(Memory(), needs, budget_bytes=1000)
    assert [len(prefetcher.take(batch)) for batch in range(2)] == [2, 2]
    with pytest.raises(StorageError, match="there are 2 batches"):
        prefetcher.take(2)
    prefetcher.close()


def test_readers_far_from_the_plan_or_behind_it_do_not_wait() -> None:
    prefetcher = Prefetcher(Memory(), items_of, budget_bytes=96)
    prefetcher.take(0)
    assert prefetcher.wait(0) is None
    assert prefetcher.wait(10**9) is None
    prefetcher.advance(50)
    assert prefetcher.wait(20) is None
    assert prefetcher.take(50) == {item: content(item) for item in items_of(50)}
    prefetcher.close()


def test_a_reader_of_more_than_the_budget_gets_it_while_others_wait_behind_it() -> None:
    prefetcher = Prefetcher(Memory(), items_of, budget_bytes=32)
    later = threading.Thread(target=prefetcher.wait, args=(30,))
    later.start()
    for batch in range(20):
        assert prefetcher.wait(batch) is not None
    for batch in range(20):
        prefetcher.release(batch)
    later.join(timeout=60)
    assert not later.is_alive()
    prefetcher.close()


def test_a_seek_reads_from_there_on_in_both_directions() -> None:
    prefetcher = Prefetcher(Memory(), items_of, budget_bytes=160)
    for batch in (0, 1, 70, 71, 3, 4):
        if batch in (70, 3):
            prefetcher.seek(batch)
        assert prefetcher.take(batch) == {item: content(item) for item in items_of(batch)}
    prefetcher.close()


def test_closing_ends_the_threads_and_whoever_waits() -> None:
    memory = Memory()
    memory.gate.clear()
    prefetcher = Prefetcher(memory, items_of, budget_bytes=160, requests=2)
    told: list[str] = []

    def reader() -> None:
        try:
            prefetcher.take(0)
        except RuntimeError as error:
            told.append(str(error))

    thread = threading.Thread(target=reader)
    thread.start()
    until(lambda: prefetcher.describe()["requests_in_flight"] == 1)
    closing = threading.Thread(target=prefetcher.close)
    closing.start()
    thread.join()
    memory.gate.set()
    closing.join()
    assert told == ["the prefetcher is closed"]
    assert not [t.name for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_tuning_changes_budget_and_requests_while_it_reads() -> None:
    memory = Memory()
    memory.gate.clear()
    prefetcher = Prefetcher(
        memory, lambda batch: [Item("a", 100 * batch, 100 * batch + 16)], budget_bytes=64, gap_bytes=0
    )
    prefetcher.tune(requests=1)
    prefetcher.seek(0)
    prefetcher.tune(budget_bytes=160, requests=6)
    until(lambda: prefetcher.describe()["requests_in_flight"] >= 6)
    assert prefetcher.describe()["planned_bytes"] == 160
    memory.gate.set()
    assert prefetcher.take(0)
    prefetcher.close()


PACE = Pace(batch_bytes=10.0, compute_s=0.5, bytes_per_s=40.0)
"""20 bytes a second are read, 40 delivered."""


def budgets(coming: Expected, *, most: int = 1000, pace: Pace = PACE) -> list[int]:
    return [budget(100, most_bytes=most, expected=[coming], batch=batch, pace=pace) for batch in range(40)]


def test_reads_move_ahead_of_checkpoint_traffic_by_what_its_steps_read() -> None:
    found = budgets(Expected(kind="checkpoint", at=30, seconds=3.0))
    # 6 steps of 10 bytes; the spare 20 bytes a second need 3 s for them, 6 steps, twice that to be sure.
    assert found == [100] * 18 + [160] * 19 + [100] * 3


def test_traffic_known_by_its_bytes_lasts_as_long_as_they_take() -> None:
    assert budgets(Expected(kind="checkpoint", at=30, bytes=120)) == budgets(
        Expected(kind="checkpoint", at=30, seconds=3.0)
    )


def test_reading_goes_on_during_an_evaluation() -> None:
    found = budgets(Expected(kind="evaluation", at=10, seconds=2.0))
    assert found == [100] * 10 + [180] + [100] * 29


def test_a_ramp_raises_the_budget_for_good() -> None:
    found = budgets(Expected(kind="ramp", at=20, bytes=50))
    assert found[:10] == [100] * 10
    assert found[20:] == [150] * 20


def test_no_expectation_passes_the_most_that_is_allowed() -> None:
    assert max(budgets(Expected(kind="checkpoint", at=10, seconds=1000.0), most=250)) == 250


def test_a_store_without_spare_bandwidth_reads_ahead_from_the_start() -> None:
    slow = Pace(batch_bytes=10.0, compute_s=0.5, bytes_per_s=15.0)
    assert budgets(Expected(kind="checkpoint", at=30, seconds=3.0), pace=slow)[0] == 160


def test_a_prefetcher_reads_further_before_what_it_was_told_of() -> None:
    ticks = iter(range(100_000))
    prefetcher = Prefetcher(Memory(), items_of, budget_bytes=96, requests=1, clock=lambda: float(next(ticks)))
    for batch in range(10):
        prefetcher.take(batch)
    prefetcher.expect(Expected(kind="ramp", at=10, bytes=64))
    until(lambda: prefetcher.describe()["held_bytes"] >= 160)
    assert prefetcher.describe()["budget_bytes_now"] == 160
    prefetcher.close()
