"""Every task of a graph runs once, after what it follows, within the memory; an error keeps the rest from starting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.checkpoint.write.task_graph import SaveTask, TaskGraph, run_graph

Edges = list[tuple[set[int], int]]
"""Of each task those it follows, all before it, and the bytes that it holds."""


@st.composite
def graphs(draw: st.DrawFn) -> Edges:
    count = draw(st.integers(1, 14))
    return [
        (draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set(), draw(st.integers(0, 5)))
        for number in range(count)
    ]


@dataclass
class Witness:
    """Watches tasks from inside, and keeps its own account of what is held."""

    edges: Edges
    limit: int
    order: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    under_way: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self, number: int) -> Callable[[], None]:
        def task() -> None:
            with self.lock:
                if not self.edges[number][0] <= self.ended:
                    self.wrong.append(f"{number} before one that it follows")
                self.order.append(number)
                self.under_way.add(number)
                # What `run` holds is this or more: a task counts there until its end is noted, a moment later.
                held = sum(self.edges[n][1] for n in self.order if self.is_held(n))
                if held > self.limit and self.edges[number][1] and len(self.under_way) > 1:
                    self.wrong.append(f"{number} starts with {held} of {self.limit} held")
            with self.lock:
                self.under_way.remove(number)
                self.ended.add(number)

        return task

    def is_held(self, number: int) -> bool:
        followers = {n for n, (after, _) in enumerate(self.edges) if number in after}
        return number not in self.ended or not followers <= self.ended


@given(edges=graphs(), threads=st.integers(1, 4), limit=st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_every_task_runs_once_after_those_it_follows_and_within_the_memory(
    edges: Edges, threads: int, limit: int
) -> None:
    graph, seen = TaskGraph(), Witness(edges, limit)
    made: list[SaveTask] = []
    for number, (after, holds) in enumerate(edges):
        made.append(graph.add("kind", seen.work(number), after=[made[n] for n in sorted(after)], holds=holds))
    run_graph(graph, threads=threads, memory_bytes=limit)
    assert seen.wrong == []
    assert sorted(seen.order) == list(range(len(edges)))
    heavy = [number for number in seen.order if edges[number][1]]
    if threads == 1:
        assert heavy == sorted(heavy)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_chains_of_chunks_never_hold_more_than_the_memory(threads: int) -> None:
    """As a packed file is written: chunk i is packed at any time, and written after chunk i - 1."""
    graph, lock = TaskGraph(), threading.Lock()
    held, most, order = 0, 0, []
    before: list[SaveTask] = []

    def pack() -> None:
        nonlocal held, most
        with lock:
            held += 10
            most = max(most, held)

    def write(number: int) -> None:
        nonlocal held
        with lock:
            held -= 10
            order.append(number)

    for number in range(50):
        packed = graph.add("pack", pack, holds=10)
        before = [graph.add("write", lambda number=number: write(number), after=[packed, *before])]
    seconds = run_graph(graph, threads=threads, memory_bytes=30)
    assert order == list(range(50))
    assert most <= 30
    assert seconds.keys() == {"pack", "write"}


@given(edges=graphs(), threads=st.integers(1, 4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_error_is_raised_once_and_nothing_that_follows_it_runs(
    edges: Edges, threads: int, data: st.DataObject
) -> None:
    broken = data.draw(st.integers(0, len(edges) - 1))
    graph, ran, before = TaskGraph(), [], threading.active_count()
    made: list[SaveTask] = []

    def work(number: int) -> None:
        if number == broken:
            raise OSError("full")
        ran.append(number)

    for number, (after, holds) in enumerate(edges):
        follows = [made[n] for n in sorted(after)]
        made.append(graph.add("kind", lambda number=number: work(number), after=follows, holds=holds))
    with pytest.raises(OSError, match="full"):
        run_graph(graph, threads=threads, memory_bytes=100)
    lost = {broken}
    for number, (after, _) in enumerate(edges):
        if after & lost:
            lost.add(number)
    assert not lost & set(ran)
    assert len(ran) == len(set(ran))
    assert threading.active_count() <= before  # no thread is left behind


def test_independent_tasks_run_side_by_side() -> None:
    graph, meeting = TaskGraph(), threading.Barrier(3, timeout=60)
    for _ in range(3):
        graph.add("meet", meeting.wait)
    run_graph(graph, threads=3, memory_bytes=0)


def test_a_task_waits_for_what_happens_elsewhere() -> None:
    graph, there, seen = TaskGraph(), Future[None](), []

    def early() -> None:
        seen.append("early")
        there.set_result(None)

    graph.add("late", lambda: seen.append("late"), after=[there])
    graph.add("early", early)
    run_graph(graph, threads=2, memory_bytes=0)
    assert seen == ["early", "late"]


def test_what_fails_elsewhere_ends_the_run() -> None:
    graph, there = TaskGraph(), Future[None]()
    graph.add("late", lambda: pytest.fail("must not run"), after=[there])
    there.set_exception(ValueError("no copy"))
    with pytest.raises(ValueError, match="no copy"):
        run_graph(graph, threads=2, memory_bytes=0)


def test_what_is_larger_than_the_memory_runs_alone() -> None:
    graph, under_way, most = TaskGraph(), [], []

    def work() -> None:
        under_way.append(1)
        most.append(len(under_way))
        under_way.pop()

    for _ in range(6):
        graph.add("large", work, holds=100)
    run_graph(graph, threads=3, memory_bytes=10)
    assert most == [1] * 6
