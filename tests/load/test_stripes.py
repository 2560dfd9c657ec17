"""Several stores: each asked as fast as it answers, the slow and the failing routed around, the overdue asked twice."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ropewalk.base.errors import DataError, StorageError
from ropewalk.load.endpoints import Endpoint, InFlight, Rate, soonest
from ropewalk.load.hedged import Hedged, Patience
from ropewalk.load.stripes import Stripes
from ropewalk.store.items import Item

MIB = 1 << 20


class Store:
    """A `Fetch` that remembers what it was asked and fails as told."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.asked: list[str] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def fetch(self, items: Sequence[Item]) -> list[bytes | memoryview]:
        self.asked += [item.file for item in items]
        if not self.gate.wait(60):
            raise AssertionError("nobody opened the gate")
        if self.error:
            raise self.error
        return [f"{self.name}{item.start}".encode() for item in items]

    def close(self) -> None:
        pass


def simulate(
    endpoints: Sequence[Endpoint],
    seconds_of: Callable[[Endpoint, int, float], float],
    *,
    until: float,
    now: float = 0.0,
) -> dict[str, int]:
    """Requests of 1 MiB answered by each endpoint when all that may be asked are asked, in virtual time.
    `seconds_of(endpoint, requests under way there, now)` is what a request takes; below 0 it fails after as long."""
    number = 0
    under_way: list[tuple[float, int, Endpoint, float]] = []
    served = dict.fromkeys((endpoint.base for endpoint in endpoints), 0)
    while now < until:
        while len(under_way) < 16 and (chosen := soonest(endpoints, MIB, now)) is not None:
            chosen.began(now)
            number += 1
            takes = seconds_of(chosen, sum(1 for entry in under_way if entry[2] is chosen) + 1, now)
            heapq.heappush(under_way, (now + abs(takes), number, chosen, takes))
        now, _, chosen, takes = heapq.heappop(under_way)
        if takes < 0:
            chosen.failed(now)
        else:
            chosen.ended(now, MIB, seconds=takes)
            served[chosen.base] += 1
    for _, _, chosen, _ in under_way:
        chosen.refused(now)
    return served


def test_mirrors_share_the_work_by_the_speed_they_show() -> None:
    # A request shares the bandwidth of its store: 80 and 20 MiB/s.
    rates = {"fast": 80.0, "slow": 20.0}
    endpoints = [Endpoint(name, Store(), in_flight=InFlight("fixed", requests=16)) for name in rates]
    served = simulate(endpoints, lambda e, crowd, _: 0.01 + crowd / rates[e.base], until=60.0)
    total = sum(served.values()) / 60.0
    assert total > 0.85 * 100, "together they deliver nearly what both can"
    assert 2.5 < served["fast"] / served["slow"] < 8


def test_a_store_that_slows_down_is_routed_around_and_found_again_when_it_recovers() -> None:
    def takes(endpoint: Endpoint, crowd: int, now: float) -> float:
        return 1.0 if endpoint.base == "b" and 20 < now < 60 else 0.05

    endpoints = [Endpoint(name, Store(), in_flight=InFlight("fixed", requests=8)) for name in "ab"]
    early = simulate(endpoints, takes, until=20.0)
    during = simulate(endpoints, takes, now=20.0, until=60.0)
    after = simulate(endpoints, takes, now=60.0, until=100.0)
    assert early["b"] > 0.4 * early["a"]
    assert during["b"] < 0.1 * during["a"]
    assert after["b"] > 0.3 * after["a"]


def test_a_failing_store_is_left_alone_and_probed_again() -> None:
    endpoints = [Endpoint(name, Store(), in_flight=InFlight("fixed", requests=4), probe_s=5.0) for name in "ab"]
    tried: list[float] = []

    def takes(endpoint: Endpoint, crowd: int, now: float) -> float:
        if endpoint.base == "b" and now < 30:
            tried.append(now)
            return -0.05
        return 0.1

    served = simulate(endpoints, takes, until=120.0)
    assert len(tried) <= 4 + 4, "the first crowd, then one probe after 5, 10, 20 s"
    assert served["b"] > 0.3 * served["a"], "found again"


def test_where_all_stores_are_down_one_is_asked_all_the_same() -> None:
    endpoints = [Endpoint(name, Store()) for name in "ab"]
    for number, endpoint in enumerate(endpoints):
        endpoint.began(0.0)
        endpoint.failed(float(number))
    assert soonest(endpoints, MIB, 1.5) is endpoints[0]


@pytest.mark.parametrize(("knee", "low", "high"), [(6, 4, 9), (24, 17, 33)])
def test_requests_in_flight_climb_to_where_the_store_delivers_no_more(knee: int, low: int, high: int) -> None:
    endpoint = Endpoint("a", Store(), in_flight=InFlight("hill-climb", requests=4, most=64))
    now, number = 0.0, 0
    under_way: list[tuple[float, int, float]] = []
    limits = []
    while number < 6000:
        while endpoint.admits(now):
            endpoint.began(now)
            number += 1
            # Beyond `knee` requests in flight, each one only waits longer.
            takes = 0.1 * max(1.0, (len(under_way) + 1) / knee)
            heapq.heappush(under_way, (now + takes, number, takes))
        now, _, takes = heapq.heappop(under_way)
        endpoint.ended(now, MIB, seconds=takes)
        limits.append(endpoint.service().limit)
    late = limits[3000:]
    assert low <= sorted(late)[len(late) // 2] <= high


def test_a_fixed_policy_stays_and_a_failure_halves_a_climbing_one() -> None:
    fixed, climbing = InFlight("fixed", requests=8), InFlight("hill-climb", requests=8)
    for number in range(1000):
        fixed.ended(float(number), MIB, busy=True)
    for policy in (fixed, climbing):
        policy.failed()
    assert (fixed.limit, climbing.limit) == (8, 4)


def test_a_rate_counts_only_the_time_in_which_something_was_under_way() -> None:
    rate = Rate(memory_s=1e9)
    for start in (0.0, 100.0, 200.0):
        rate.began(start)
        rate.began(start)
        rate.ended(start + 1, 10)
        rate.ended(start + 2, 10)
    assert rate.bytes_per_s == pytest.approx(60 / 6)
    assert rate.busy_s == 6.0


def test_files_spread_over_stores_are_read_from_the_store_that_holds_them() -> None:
    one, two = Store("one"), Store("two")
    stripes = Stripes([Endpoint("s3://one", one), Endpoint("s3://two", two)])
    items = [Item("s3://two/x", 0, 4), Item("s3://one/y", 5, 9), Item("s3://two/z", 7, 9)]
    assert stripes.fetch(items) == [b"two0", b"one5", b"two7"]
    with pytest.raises(DataError, match="s3://three/q: none of the stores holds it"):
        stripes.fetch([Item("s3://three/q", 0, 1)])
    stripes.close()


def test_a_mirror_is_asked_under_its_own_name_when_the_store_fails() -> None:
    main, mirror = Store("main"), Store("mirror")
    main.error = StorageError("main is gone")
    endpoints = [Endpoint("s3://main/c/", main), Endpoint("https://m/", mirror, known_as="s3://main/c/")]
    stripes = Stripes(endpoints)
    for number in range(4):
        assert stripes.fetch([Item("s3://main/c/x", number, 9)]) == [f"mirror{number}".encode()]
    assert set(mirror.asked) == {"https://m/x"}
    assert len(main.asked) == 1, "left alone after its failure"
    mirror.error = StorageError("mirror is gone")
    with pytest.raises(StorageError, match=r"none of 2 stores gave s3://main/c/x: .*is gone.*is gone"):
        stripes.fetch([Item("s3://main/c/x", 0, 9)])
    stripes.close()


def test_bytes_that_one_mirror_has_damaged_come_from_the_other_without_a_mark_against_the_store() -> None:
    main, mirror = Store("main"), Store("mirror")
    main.error = DataError("not what was written")
    stripes = Stripes([Endpoint("a/", main), Endpoint("b/", mirror, known_as="a/")])
    assert stripes.fetch([Item("a/x", 3, 9)]) == [b"mirror3"]
    assert [service.up for service in stripes.services()] == [True, True]
    stripes.close()


def test_no_store_has_more_requests_in_flight_than_its_policy_says() -> None:
    store = Store()
    store.gate.clear()
    stripes = Stripes([Endpoint("", store, in_flight=InFlight("fixed", requests=2))])
    threads = [threading.Thread(target=stripes.fetch, args=([Item("x", n, n + 1)],)) for n in range(5)]
    for thread in threads:
        thread.start()
    threading.Event().wait(0.05)
    assert len(store.asked) == 2
    assert stripes.services()[0].in_flight == 2
    store.gate.set()
    for thread in threads:
        thread.join()
    assert len(store.asked) == 5
    stripes.close()


def test_an_overdue_answer_is_asked_of_the_other_mirror_and_the_first_answer_wins() -> None:
    main, mirror = Store("main"), Store("mirror")
    patience = Patience(times=4.0)
    for _ in range(8):
        patience.answered(4, 0.001)
    stripes = Stripes([Endpoint("a/", main), Endpoint("b/", mirror, known_as="a/")])
    hedged = Hedged(stripes, patience=patience)
    main.gate.clear()  # of two of which nothing is known, the first is asked
    assert hedged.fetch([Item("a/x", 3, 7)]) == [b"mirror3"]
    assert (hedged.stats().hedges, hedged.stats().won) == (1, 1)
    main.gate.set()
    hedged.close()


def test_patience_knows_the_median_the_size_and_its_share() -> None:
    patience = Patience(times=3.0, most_share=0.1)
    assert patience.limit_s(MIB) is None
    for seconds in (0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 9.0, 9.0):
        patience.answered(MIB, seconds)
    assert patience.limit_s(MIB) == pytest.approx(0.3)
    assert patience.limit_s(4 * MIB) == pytest.approx(1.2)
    assert patience.limit_s(1) == pytest.approx(0.3)
    patience.asked_again()
    assert patience.limit_s(MIB) is None, "one of nine is more than a tenth"


def test_when_both_requests_fail_the_error_is_the_first_ones() -> None:
    store = Store()
    store.error = StorageError("gone")
    patience = Patience(times=0.0)
    for _ in range(8):
        patience.answered(4, 0.0)
    hedged = Hedged(store, patience=patience)
    with pytest.raises(StorageError, match="gone"):
        hedged.fetch([Item("x", 0, 4)])
    hedged.close()


def test_who_waits_for_a_request_that_has_not_begun_is_answered_though_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    store.gate.clear()
    hedged = Hedged(store, most_requests=1)
    asked, submit = threading.Semaphore(0), hedged._pool.submit

    def counted(*work: Any) -> Any:
        made = submit(*work)
        asked.release()
        return made

    monkeypatch.setattr(hedged._pool, "submit", counted)
    readers = [threading.Thread(target=hedged.fetch, args=([Item("x", at, at + 4)],)) for at in (0, 4)]
    for reader in readers:
        reader.start()
        assert asked.acquire(timeout=60)
    # One thread makes requests, and the gate is shut: the second one has not begun.
    hedged.close()
    store.gate.set()
    for reader in readers:
        reader.join(timeout=60)
        assert not reader.is_alive()
    assert len(store.asked) == 2
