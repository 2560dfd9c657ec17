"""Numbers for people, seeds for machines, problems in words."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.base.clock import Stopwatch
from ropewalk.base.errors import ConfigError, MissingPackage, Problem, RopewalkError, storage_error
from ropewalk.base.progress import Eta, Silent, amount, counted, duration, span
from ropewalk.base.seeds import seed_for


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.44, "0.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7800, "2 h 10 min"),
    ],
)
def test_durations_read_naturally_also_at_the_edges(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.01, 0.04, "0.1 seconds"),
        (4, 9.2, "4 to 9.2 seconds"),
        (63, 252, "1.1 to 4.2 minutes"),
        (31, 88, "31 to 88 seconds"),
        (60, 240, "1 to 4 minutes"),
        (3000, 6000, "0.8 to 1.7 hours"),
        (86400 * 4.04, 86400 * 123.4, "4 to 120 days"),
    ],
)
def test_an_interval_has_one_unit_and_few_digits(low: float, high: float, text: str) -> None:
    assert span(low, high) == text


def test_one_thing_has_no_s() -> None:
    assert [counted(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (950, "950 B"),
        (0.25, "0.25 B"),
        (999.9, "1 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_999, "1 MB"),
        (-4.56e6, "-4.56 MB"),
        (1.5e15, "1.5 PB"),
        (3.2e20, "320 EB"),
    ],
)
def test_amounts_have_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert amount(value, "B") == text


def test_an_amount_without_unit_ends_at_its_prefix() -> None:
    assert [amount(950), amount(12_300), amount(4.56e6)] == ["950", "12.3 k", "4.56 M"]


@given(st.floats(1, 1e23))
def test_no_amount_is_written_with_an_exponent(value: float) -> None:
    number, *prefix = amount(value).split()
    assert "e" not in number
    factor = 1000 ** " kMGTPEZ".index(prefix[0]) if prefix else 1
    assert float(number) * factor == pytest.approx(value, rel=0.006)


def test_the_time_left_follows_the_pace_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    eta = Eta(total=200)
    assert eta.seconds(100) is None
    now[0] += 10
    assert eta.seconds(150) == 10
    assert eta.seconds(250) == 0
    assert Eta(None).seconds(3) is None


def test_the_time_left_forgets_a_slow_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    eta = Eta(total=100)
    assert eta.seconds(0) is None
    now[0] += 60  # a compiler, and the first step
    assert eta.seconds(1) == 99 * 60
    for done in range(2, 100):
        now[0] += 1
        left = eta.seconds(done)
        assert done < 22 or left == 100 - done
    now[0] += 100  # the last step waits
    assert 0 < eta.seconds(99) < 10


def test_the_time_left_is_right_when_workers_finish_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    eta = Eta(total=96)
    assert eta.seconds(0) is None
    for wave in range(12):  # eight workers, a minute a task
        now[0] = 60.0 * (wave + 1)
        for worker in range(8):
            now[0] += 0.1
            left = eta.seconds(8 * wave + worker + 1)
        assert 0.45 * 60 * (11 - wave) <= left <= 1.1 * 60 * (11 - wave)


def test_the_time_left_begins_anew_where_work_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    eta = Eta(total=10_000)
    for done in range(1031):
        now[0] = float(done)
        eta.seconds(done)
    assert eta.seconds(500) is None
    for done in range(501, 2000):
        now[0] += 1
        assert eta.seconds(done) == 10_000 - done


def test_the_time_left_follows_a_change_of_pace() -> None:
    now = [0.0]
    eta = Eta(total=10_000, clock=lambda: now[0])
    for done in range(4001):
        now[0] += 0.1
        eta.seconds(done)
    for done in range(4001, 4400):  # longer rows from here on: a step takes ten times as long
        now[0] += 1
        left = eta.seconds(done)
    assert left == pytest.approx(10_000 - done, rel=0.01)
    assert eta.rate == pytest.approx(1.0, rel=0.01)


def test_the_pace_of_a_million_steps_is_kept_in_a_few_marks() -> None:
    now = [0.0]
    eta = Eta(total=1e6, clock=lambda: now[0])
    for done in range(20_000):
        now[0] += 0.3
        eta.seconds(done)
    assert len(eta._marks) < 100


def test_a_stopwatch_adds_up_by_name_and_forgets_what_was_taken() -> None:
    watch = Stopwatch()
    for name in ("data", "step", "data"):
        with watch(name):
            pass
    taken = watch.take()
    assert set(taken) == {"data", "step"}
    assert all(seconds >= 0 for seconds in taken.values())
    assert watch.take() == {}


def test_silence_hears_everything() -> None:
    progress = Silent()
    progress.begin("task", 3, "rows")
    progress.advance(1)
    progress.end()
    progress.say("word")


def test_seeds_never_change_between_versions_and_machines() -> None:
    assert seed_for(0) == 4246866556266386882
    assert seed_for(7, "order", 3) == 8324420176566547342
    assert seed_for(2**63, "wörter") == 8754358754391405515


@given(st.lists(st.tuples(st.integers(0, 9), st.text("ab", max_size=2), st.integers(0, 9)), unique=True))
def test_different_names_give_different_seeds_of_63_bits(names: list[tuple[int, str, int]]) -> None:
    seeds = [seed_for(seed, *rest) for seed, *rest in names]
    assert len(set(seeds)) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_every_error_is_of_one_tree_and_says_what_to_do() -> None:
    error = ConfigError([Problem("a.toml:3", "bad", "fix it"), Problem("", "worse")])
    assert str(error) == "a.toml:3: bad; fix it\nworse"
    assert isinstance(error, RopewalkError)
    assert error.exit_code == 2
    assert "pip install -e '.[ray]'" in str(MissingPackage("ray", "the cluster engine", "ray"))
    assert storage_error(FileNotFoundError(2, "No such file"), doing="reading x") is None
