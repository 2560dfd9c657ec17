"""Waiting is split by cause without a rest."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.load.stalls import CAUSES, Stalls, Times, binding_cause, warning

MOMENTS = st.lists(st.integers(0, 1000), min_size=4, max_size=4).map(sorted)


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@settings(deadline=None)
@given(moments=MOMENTS, began=st.integers(0, 1000), waited=st.integers(0, 1000))
def test_every_instant_of_waiting_has_the_stage_that_the_batch_was_in(
    moments: list[int], began: int, waited: int
) -> None:
    stalls = Stalls(clock=Clock())
    ended = max(began + waited, moments[-1])
    stalls.waited(began, ended, Times(*map(float, moments)))
    # Brute force: ask at every instant which stage the batch was in; after the copy it is being handed over.
    instants = np.arange(began, ended)
    stage = np.minimum(np.searchsorted(moments, instants, side="right"), 3)
    figures = stalls.take()
    for number, cause in enumerate(CAUSES):
        assert figures[f"{cause}_s"] == (stage == number).sum()
    assert figures["wait_s"] == ended - began


def test_busy_seconds_count_whether_or_not_a_step_waits() -> None:
    stalls = Stalls(clock=Clock())
    stalls.waited(10.0, 10.0, Times(1.0, 3.0, 6.0, 7.0), bytes=100, tokens=50)
    stalls.waited(20.0, 20.0, Times(11.0, 12.0, 13.0, math.nan), bytes=1, tokens=2)
    figures = stalls.take()
    assert [figures[f"{stage}_busy_s"] for stage in ("fetch", "prepare", "copy")] == [3.0, 4.0, 1.0]
    assert (figures["wait_s"], figures["batches"], figures["bytes"], figures["tokens"]) == (0.0, 2.0, 101.0, 52.0)


def test_taking_starts_a_new_account() -> None:
    clock = Clock()
    stalls = Stalls(clock=clock)
    clock.now = 4.0
    stalls.waited(0.0, 4.0, Times(0.0, 4.0, 4.0))
    assert stalls.take()["elapsed_s"] == 4.0
    clock.now = 5.0
    after = stalls.take()
    assert after.pop("elapsed_s") == 1.0
    assert set(after.values()) == {0.0}


@pytest.mark.parametrize(
    ("times", "cause", "word"),
    [
        (Times(9.0, 9.5, 10.0), "queue", "prefetch_bytes"),
        (Times(0.0, 9.0, 10.0), "fetch", "store"),
        (Times(0.0, 1.0, 10.0), "prepare", "load.threads"),
        (Times(0.0, 1.0, 2.0, 10.0), "copy", "device"),
    ],
)
def test_a_warning_names_the_cause_and_a_remedy(times: Times, cause: str, word: str) -> None:
    clock = Clock()
    stalls = Stalls(clock=clock)
    stalls.waited(0.0, 10.0, times)
    clock.now = 20.0
    figures = stalls.take()
    text = warning(figures)
    assert binding_cause(figures) == cause
    assert text is not None
    assert all(part in text for part in (f"`{cause}`", "50%", word, "ropewalk doctor data"))


def test_little_waiting_is_no_warning() -> None:
    clock = Clock()
    stalls = Stalls(clock=clock)
    stalls.waited(0.0, 1.0, Times(0.0, 1.0, 1.0))
    clock.now = 20.0
    assert warning(stalls.take()) is None
