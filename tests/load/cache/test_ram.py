"""Memory as a tier: the right bytes, one fetch an item, never a byte over the budget."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.load.cache.policies import Keep, Lru, MostImportant, Once, Policy
from ropewalk.load.cache.ram import Ram
from ropewalk.store.items import Item

from .origins import Counting, make_items, truth

ITEMS = make_items(20)
BYTES = sum(map(len, ITEMS))


def policies() -> list[Policy]:
    value = {item.key: float(number % 5) for number, item in enumerate(ITEMS)}
    return [Keep(), Lru(), Once(), MostImportant(value.__getitem__)]


@given(
    st.sampled_from(range(4)),
    st.integers(0, BYTES + 50),
    st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=6), max_size=30),
)
def test_every_policy_gives_the_true_bytes_within_the_budget(which: int, budget: int, batches: list[list[int]]) -> None:
    origin = Counting()
    ram = Ram(origin, budget_bytes=budget, policy=policies()[which])
    for batch in batches:
        asked = [ITEMS[number] for number in batch]
        assert [bytes(data) for data in ram.fetch(asked)] == [truth(item) for item in asked]
        assert ram.used_bytes <= budget
    counts = ram.counts()
    assert counts.misses == sum(origin.asked.values())
    assert counts.hits + counts.misses == sum(map(len, batches))
    assert counts.kept - counts.dropped == len(ram)


def test_keep_asks_for_each_held_item_once_and_never_lets_go() -> None:
    origin = Counting()
    ram = Ram(origin, budget_bytes=BYTES)
    for _ in range(3):
        ram.fetch(ITEMS)
    assert set(origin.asked.values()) == {1}
    assert ram.used_bytes == BYTES


def test_lru_drops_what_was_used_the_longest_ago() -> None:
    items = [Item("same", start, start + 10) for start in (0, 10, 20)]
    origin = Counting()
    ram = Ram(origin, budget_bytes=20, policy=Lru())
    for number in (0, 1, 0, 2, 0, 1):
        ram.fetch([items[number]])
    assert origin.asked == {0: 1, 10: 2, 20: 1}


def test_a_more_important_item_replaces_a_lesser_one_and_never_the_reverse() -> None:
    items = [Item("same", start, start + 10) for start in (0, 10, 20)]
    value = {items[0].key: 1.0, items[1].key: 3.0, items[2].key: 2.0}
    policy = MostImportant(value.__getitem__)
    origin = Counting()
    ram = Ram(origin, budget_bytes=20, policy=policy)
    for number in (0, 1, 2, 0, 1, 2):
        ram.fetch([items[number]])
    assert origin.asked == {0: 2, 10: 1, 20: 1}
    value[items[1].key] = 0.5
    policy.refresh()
    ram.fetch([items[0]])
    ram.fetch([items[1]])
    assert origin.asked == {0: 3, 10: 2, 20: 1}


def test_threads_that_ask_at_once_cause_one_fetch() -> None:
    gate = threading.Event()
    origin = Counting(gate=gate)
    ram = Ram(origin, budget_bytes=0, policy=Once())
    got: list[list[bytes]] = []
    threads = [threading.Thread(target=lambda: got.append([bytes(d) for d in ram.fetch(ITEMS)])) for _ in range(6)]
    for thread in threads:
        thread.start()
    while origin.requests == 0:
        pass
    # All six are inside `fetch` before the origin answers: the first leads, the others join or have yet to look.
    while sum(thread.is_alive() for thread in threads) < 6:
        pass
    threading.Event().wait(0.05)
    gate.set()
    for thread in threads:
        thread.join()
    assert got == [[truth(item) for item in ITEMS]] * 6
    assert set(origin.asked.values()) == {1}


def test_a_failed_fetch_is_told_to_its_caller_and_the_next_one_succeeds() -> None:
    origin = Counting()
    origin.failing = 1
    ram = Ram(origin, budget_bytes=BYTES)
    with pytest.raises(OSError, match="away"):
        ram.fetch(ITEMS[:3])
    assert [bytes(data) for data in ram.fetch(ITEMS[:3])] == [truth(item) for item in ITEMS[:3]]


def test_who_joined_a_fetch_that_fails_asks_again_on_its_own() -> None:
    gate = threading.Event()

    class FirstFails(Counting):
        def fetch(self, items):  # type: ignore[no-untyped-def]
            first = self.requests == 0
            data = super().fetch(items)
            if first:
                raise OSError("the origin is away")
            return data

    origin = FirstFails(gate=gate)
    ram = Ram(origin, budget_bytes=BYTES)
    failed: list[str] = []

    def lead() -> None:
        try:
            ram.fetch(ITEMS[:2])
        except OSError as error:
            failed.append(str(error))

    leader = threading.Thread(target=lead)
    leader.start()
    while origin.requests == 0:
        pass
    got: list[bytes] = []
    joiner = threading.Thread(target=lambda: got.extend(bytes(data) for data in ram.fetch(ITEMS[1:3])))
    joiner.start()
    while origin.requests == 1:
        pass
    gate.set()
    leader.join()
    joiner.join()
    assert failed == ["the origin is away"]
    assert got == [truth(item) for item in ITEMS[1:3]]


def test_a_file_written_anew_is_not_answered_from_memory() -> None:
    ram = Ram(Counting(), budget_bytes=1000)
    old, new = Item("f", 0, 10, 1), Item("f", 0, 10, 2)
    ram.fetch([old])
    ram.fetch([new])
    assert ram.counts().misses == 2


def test_a_view_into_a_large_read_is_kept_as_its_own_bytes() -> None:
    class Joined(Counting):
        def fetch(self, items):  # type: ignore[no-untyped-def]
            whole = memoryview(b"".join(truth(item) for item in items) + bytes(10_000))
            return [whole[item.start : item.stop] for item in items]

    ram = Ram(Joined(), budget_bytes=BYTES)
    assert all(type(data) is bytes for data in ram.fetch(ITEMS))


def test_the_pinned_arena_gives_the_true_bytes() -> None:
    pytest.importorskip("torch")
    ram = Ram(Counting(), budget_bytes=BYTES // 2, pin=True)
    for _ in range(2):
        assert [bytes(data) for data in ram.fetch(ITEMS)] == [truth(item) for item in ITEMS]
    assert 0 < ram.used_bytes <= BYTES // 2
