"""Sampling by importance: unbiased, repeatable, held in memory where it counts, packed where it does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.load.cache.importance import (
    Importance,
    combined,
    draw,
    make_regions,
    publish,
    published,
    read_draws,
    write_draws,
)
from ropewalk.load.cache.packages import Packages
from ropewalk.load.cache.sampled import HighRegion, Sampled

from .origins import Counting, make_items, truth

ITEMS = make_items(60)
SIZES = np.array([len(item) for item in ITEMS], np.int64)


def importance(samples: int = 60, seed: int = 0) -> np.ndarray:
    """A few samples of high loss, many of low."""
    return np.random.default_rng(seed).lognormal(sigma=1.5, size=samples)


def test_importance_is_the_smoothed_loss_written_out() -> None:
    tracked = Importance(4, smoothing=0.75)
    assert tracked.values().tolist() == [1, 1, 1, 1]
    tracked.update(np.array([0, 1, 0]), np.array([4.0, 2.0, 8.0]))
    tracked.update(np.array([1, 2]), np.array([np.nan, np.inf]))
    expected = 0.75 * 4 + 0.25 * 8
    assert tracked.values().tolist() == [expected, 2, (expected + 2) / 2, (expected + 2) / 2]


@given(st.lists(st.floats(0, 100), min_size=2, max_size=30), st.floats(0.05, 1), st.integers(0, 3000))
def test_probabilities_sum_to_one_and_weights_are_bounded(values: list[float], floor: float, room: int) -> None:
    regions = make_regions(np.array(values), SIZES[: len(values)], high_bytes=room, floor=floor)
    assert regions.probability.sum() == pytest.approx(1)
    assert regions.weights.max() <= 1 / floor * (1 + 1e-9)
    assert len(np.unique(regions.probability[~regions.high])) <= 1
    assert SIZES[: len(values)][regions.high].sum() <= room
    if regions.high.any() and not regions.high.all():
        assert np.array(values)[regions.high].min() >= np.array(values)[~regions.high].max()


@pytest.mark.parametrize("packed", [False, True])
def test_the_expected_weighted_mean_is_the_plain_mean(packed: bool) -> None:
    regions = make_regions(importance(), SIZES, high_bytes=1500)
    losses = np.random.default_rng(1).normal(size=60) * np.where(regions.high, 5, 1) + 3
    line = np.random.default_rng(2).permutation(np.flatnonzero(~regions.high)) if packed else None
    means = []
    for epoch in range(4000):
        draws = draw(regions, count=20, seed=5, epoch=epoch, line=line)
        means.append((losses[draws.given] * draws.weights).mean())
    error = np.std(means) / np.sqrt(len(means))
    assert abs(np.mean(means) - losses.mean()) < 4 * error
    # Drawing by importance without the weights misses by far more than that: the test can tell.
    assert abs(losses @ regions.probability - losses.mean()) > 20 * error


def test_each_sample_is_drawn_as_often_as_its_probability_says() -> None:
    regions = make_regions(importance(), SIZES, high_bytes=1500)
    line = np.flatnonzero(~regions.high)
    counts = np.zeros(60)
    for epoch in range(3000):
        drawn = draw(regions, count=30, seed=1, epoch=epoch, line=line).given
        counts += np.bincount(drawn, minlength=60)
        alone = np.bincount(draw(regions, count=30, seed=1, epoch=epoch).given, minlength=60)
        assert (np.abs(alone - 30 * regions.probability) < 1).all()
    expected = 3000 * 30 * regions.probability
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max())


def test_draws_are_a_function_of_seed_and_epoch() -> None:
    regions = make_regions(importance(), SIZES, high_bytes=1500)
    line = np.flatnonzero(~regions.high)
    first, again, other = (draw(regions, count=50, seed=s, epoch=3, line=line) for s in (7, 7, 8))
    assert all((a == b).all() for a, b in zip(*map(dataclasses.astuple, (first, again)), strict=True))
    assert (first.given != other.given).any()


def test_low_samples_stand_in_only_for_low_ones_and_none_twice() -> None:
    regions = make_regions(importance(), SIZES, high_bytes=1500)
    draws = draw(regions, count=40, seed=0, epoch=0, line=np.flatnonzero(~regions.high))
    assert (regions.high[draws.asked] == regions.high[draws.given]).all()
    assert (draws.asked == draws.given)[regions.high[draws.asked]].all()
    low = draws.given[~regions.high[draws.given]]
    assert len(set(low.tolist())) == len(low)
    assert 0 < draws.substituted <= len(low)


def test_jobs_are_combined_by_rank_whatever_the_scale_of_their_losses() -> None:
    values = np.array([3.0, 1.0, 2.0, 2.0])
    assert combined([values]).tolist() == [1.0, 0.0, 0.5, 0.5]
    assert combined([values, 1000 * values, np.log(values)]).tolist() == pytest.approx([1.0, 0.0, 0.5, 0.5])
    assert combined([values, -values]).tolist() == [0.5] * 4


def test_jobs_find_what_the_others_published_and_pass_over_what_is_damaged(tmp_path: Path) -> None:
    for job in range(3):
        publish(tmp_path, importance(seed=job), job=job)
    path = tmp_path / "importance-1.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    publish(tmp_path, importance(7), job=3)
    found = published(tmp_path, samples=60)
    assert [values.tolist() for values in found] == [importance(seed=0).tolist(), importance(seed=2).tolist()]


def test_a_recorded_epoch_is_read_again_exactly(tmp_path: Path) -> None:
    regions = make_regions(importance(), SIZES, high_bytes=1500)
    draws = draw(regions, count=50, seed=7, epoch=3, line=np.flatnonzero(~regions.high))
    write_draws(tmp_path / "epoch", draws)
    again = read_draws(tmp_path / "epoch")
    assert all((a == b).all() for a, b in zip(*map(dataclasses.astuple, (draws, again)), strict=True))
    content = bytearray((tmp_path / "epoch").read_bytes())
    content[100] ^= 1
    (tmp_path / "epoch").write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        read_draws(tmp_path / "epoch")
    with pytest.raises(DataError, match="no such"):
        read_draws(tmp_path / "other")


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=60, max_size=60), min_size=1, max_size=4), st.integers(100, 2000))
def test_packages_hold_every_low_sample_once_through_any_change(
    tmp_path_factory: pytest.TempPathFactory, changes: list[list[bool]], size: int
) -> None:
    folder = tmp_path_factory.mktemp("packages")
    packages = Packages(Counting(), ITEMS, folder, package_bytes=size, memory_bytes=1000)
    for epoch, change in enumerate(changes):
        low = np.array(change)
        line = packages.arrange(low, epoch=epoch)
        assert sorted(line.tolist()) == np.flatnonzero(low).tolist()
        for sample in line.tolist():
            assert bytes(packages.get(sample)) == truth(ITEMS[sample])
    # A package that is kept is at least half alive: what lies packed is at most twice what is low, and a package more.
    packed = sum(path.stat().st_size for path in folder.glob("*.package"))
    assert packed <= 2 * SIZES[low].sum() + size + 200
    packages.close()
    assert list(folder.iterdir()) == []


def test_a_package_is_collected_once_and_then_read_in_one_piece(tmp_path: Path) -> None:
    origin = Counting()
    packages = Packages(origin, ITEMS, tmp_path, package_bytes=1000, memory_bytes=1000)
    for epoch in range(3):
        for sample in packages.arrange(np.ones(60, np.bool_), epoch=epoch).tolist():
            packages.get(sample)
    counts = packages.counts()
    assert set(origin.asked.values()) == {1}
    written = len(list(tmp_path.iterdir()))
    assert counts.packages_written == written == origin.requests
    # The last package of an epoch may be the first of the next and still be in memory.
    assert 2 * written - 2 <= counts.packages_read <= 2 * written


def test_a_damaged_package_is_collected_again(tmp_path: Path) -> None:
    origin = Counting()
    packages = Packages(origin, ITEMS, tmp_path, package_bytes=1000, memory_bytes=0)
    line = packages.arrange(np.ones(60, np.bool_), epoch=0).tolist()
    for sample in line:
        packages.get(sample)
    first, second, *_ = sorted(tmp_path.iterdir())
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    second.unlink()
    assert [bytes(packages.get(sample)) for sample in line] == [truth(ITEMS[sample]) for sample in line]
    assert packages.counts().damaged == 2


def test_the_whole_cache_gives_the_true_bytes_and_reads_little(tmp_path: Path) -> None:
    origin = Counting()
    high = HighRegion(origin, ITEMS, budget_bytes=int(SIZES.sum() * 0.2))
    packages = Packages(origin, ITEMS, tmp_path / "packages", package_bytes=1000, memory_bytes=1000)
    cache = Sampled(ITEMS, high, packages, seed=1)
    for epoch in range(4):
        values = importance() * np.random.default_rng(epoch).uniform(0.9, 1.1, 60)
        draws = cache.begin(epoch, values, count=60, record=tmp_path / f"{epoch}.draws")
        for first in range(0, 60, 8):
            samples = draws.given[first : first + 8]
            expected = [truth(ITEMS[sample]) for sample in samples.tolist()]
            assert [bytes(data) for data in cache.fetch(samples)] == expected
        assert high.ram.used_bytes <= high.budget_bytes
    assert sum(origin.asked.values()) < 2 * 60 < 4 * 60
    again = Sampled(ITEMS, high, packages)
    replayed = read_draws(tmp_path / "0.draws").given
    assert [bytes(data) for data in again.fetch(replayed)] == [truth(ITEMS[sample]) for sample in replayed.tolist()]
