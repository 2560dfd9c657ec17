"""MinHash signatures against the probabilities they promise, and against the numbers that files already hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ropewalk.prepare.config import Near
from ropewalk.prepare.kernels.minhash import hash_functions
from ropewalk.prepare.near.sketch import algorithm, sketch
from tests.prepare.near_corpora import column


def pairs_of_similarity(shared: int, own: int, count: int) -> tuple[list[str], list[str]]:
    """Documents of one-word shingles: `shared` words in both of a pair, `own` in each alone."""
    both = [[f"s{pair}x{word}" for word in range(shared)] for pair in range(count)]
    left = [" ".join([*words, *(f"l{pair}x{word}" for word in range(own))]) for pair, words in enumerate(both)]
    right = [" ".join([*words, *(f"r{pair}x{word}" for word in range(own))]) for pair, words in enumerate(both)]
    return left, right


@pytest.mark.parametrize(("shared", "own"), [(8, 1), (40, 5), (60, 15), (20, 10), (3, 3), (200, 400)])
def test_pairs_are_proposed_as_often_as_the_curve_says(shared: int, own: int) -> None:
    near = Near(shingle_words=1, bands=8, rows=3)
    count = 1500
    left, right = (sketch(column(side), near).keys for side in pairs_of_similarity(shared, own, count))
    found = int((left == right).any(axis=0).sum())
    expected = near.recall(shared / (shared + 2 * own))
    # Five standard deviations of a binomial count.
    assert abs(found - count * expected) <= 5 * math.sqrt(count * expected * (1 - expected)) + 1


@pytest.mark.parametrize(("shared", "own"), [(40, 5), (20, 10), (10, 45)])
def test_rows_agree_with_the_jaccard_similarity_and_independently(shared: int, own: int) -> None:
    near = Near(shingle_words=1, bands=64, rows=1)
    count = 600
    left, right = (sketch(column(side), near).keys for side in pairs_of_similarity(shared, own, count))
    agreeing = (left == right).sum(axis=0)
    similarity = shared / (shared + 2 * own)
    variance = 64 * similarity * (1 - similarity)
    assert abs(agreeing.mean() - 64 * similarity) <= 5 * math.sqrt(variance / count)
    # Dependent functions would spread the counts; the variance of a variance of 600 draws is about 2 / 600.
    assert agreeing.var() / variance == pytest.approx(1, abs=5 * math.sqrt(2 / count))


def test_a_key_depends_on_the_set_of_shingles_alone() -> None:
    near = Near(shingle_words=1)
    one, two, three = sketch(column(["a b c", "c b a b a", "a b d"]), near).keys.T
    assert (one == two).all()
    assert not (one == three).all()


def test_hash_functions_are_permutations_and_differ() -> None:
    flips, factors = hash_functions(256)
    assert (factors % 2 == 1).all()
    assert len(set(zip(flips.tolist(), factors.tolist(), strict=True))) == 256
    assert hash_functions(80)[1].tolist() == factors[:80].tolist()


def test_the_algorithm_is_the_one_that_files_name() -> None:
    # Keys are kept for years: whoever changes them changes the algorithm's name, and then these numbers.
    keys = sketch(
        column(["The quick brown fox jumps over the lazy dog", "秦川雄帝宅，函谷壯皇居。", "short"]), Near()
    ).keys
    assert algorithm(Near()).startswith("minhash-1 bands=16 rows=5 shingle_words=5 words-1/unicode-")
    assert [f"{key:016x}" for key in np.bitwise_xor.reduce(keys, axis=0)] == [
        "fb82265a688b5fda",
        "2c6f7d2bbce89f5f",
        "ebc9a89775be7f2f",
    ]
