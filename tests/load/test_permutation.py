"""Keyed permutations, an index at a time."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.load.permutation import permuted, places, rows_in_turn, unpermuted

TOGETHER = 32


def all_of(size: int, key: int) -> list[int]:
    return permuted(np.arange(size), size, key).tolist()


def splitmix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def plain(index: int, size: int, key: int) -> int:
    """The network written with Python's integers."""
    bits = max(4, (size - 1).bit_length())
    right_bits, left_bits = bits // 2, bits - bits // 2
    while True:
        left, right = divmod(index, 2**right_bits)
        for number in range(1, 9):
            key_of_round = splitmix((key + number * 0x9E3779B97F4A7C15) % 2**64)
            if number % 2:
                left ^= splitmix((key_of_round + right) % 2**64) % 2**left_bits
            else:
                right ^= splitmix((key_of_round + left) % 2**64) % 2**right_bits
        index = left * 2**right_bits + right
        if index < size:
            return index


@pytest.mark.parametrize("key", [0, 1, 2**63 - 1])
def test_every_size_up_to_300_is_permuted_one_to_one(key: int) -> None:
    assert [size for size in range(1, 301) if sorted(all_of(size, key)) != list(range(size))] == []


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 2000), key=st.integers(0, 2**63 - 1))
def test_any_key_permutes_one_to_one_and_the_inverse_undoes_it(size: int, key: int) -> None:
    result = permuted(np.arange(size), size, key)
    assert sorted(result.tolist()) == list(range(size))
    assert unpermuted(result, size, key).tolist() == list(range(size))


@settings(max_examples=200, deadline=None)
@given(size=st.integers(2, 2**62), key=st.integers(0, 2**63 - 1), data=st.data())
def test_the_kernel_is_the_network_as_one_would_write_it(size: int, key: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    result = permuted(np.array([index]), size, key)
    assert result.tolist() == [plain(index, size, key)]
    assert unpermuted(result, size, key).tolist() == [index]


@pytest.mark.parametrize("size", [2, 3, 5, 7, 12, 16, 33])
def test_every_index_goes_to_every_place_equally_often(size: int) -> None:
    keys = 2000
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), all_of(size, key)] += 1
    expected = keys / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    # Five deviations of the chi-square distribution above its mean: one failure in a million for a fair shuffle.
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_no_index_keeps_its_place_under_all_keys() -> None:
    found = {index: {all_of(1000, key)[index] for key in range(20)} for index in (0, 1, 999)}
    assert [index for index, seen in found.items() if len(seen) < 15] == []


def test_a_huge_permutation_takes_no_memory() -> None:
    permuted(np.array([0]), 2, key=5)
    tracemalloc.start()
    result = permuted(np.array([0, 1, 2**40]), 2**45 + 12345, key=5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (result < 2**45 + 12345).all()
    assert peak < 100_000


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 3000),
    block=st.integers(0, 40),
    together=st.integers(1, 40),
    key=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 9),
)
def test_shuffled_blocks_are_read_one_to_one(size: int, block: int, together: int, key: int, epoch: int) -> None:
    found = places(np.arange(size), size, block=block, together=together, key=key, epoch=epoch)
    assert sorted(found.tolist()) == list(range(size))


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_shuffled_blocks_are_read_from_a_bounded_number_of_blocks_at_a_time(epoch: int) -> None:
    block, blocks = 16, 500
    size = block * blocks + 5
    order = np.argsort(places(np.arange(size), size, block=block, together=TOGETHER, key=3, epoch=epoch))
    together = TOGETHER * block
    touched = [len(np.unique(order[at : at + together] // block)) for at in range(0, size - together, together)]
    # Two groups at most, one of them the last, which is nearly twice as large. Rows drawn from everywhere would touch
    # 320 blocks.
    assert max(touched) <= 3 * TOGETHER
    assert len(np.unique(order[:together] // (block * TOGETHER))) > 8


def read_in(size: int, block: int, epoch: int) -> list[int]:
    """The rows of an epoch in the order in which they are read."""
    found, epochs = rows_in_turn(epoch * size, size, size=size, block=block, together=TOGETHER, key=3)
    assert set(epochs.tolist()) == {epoch}
    return found.tolist()


@pytest.mark.parametrize("block", [0, 16])
def test_rows_in_turn_and_their_places_are_inverse(block: int) -> None:
    for epoch in (0, 1, 5):
        rows = read_in(1234, block, epoch)
        found = places(np.array(rows), 1234, block=block, together=TOGETHER, key=3, epoch=epoch)
        assert found.tolist() == list(range(1234))
    every_third = rows_in_turn(5, 700, stride=3, size=1234, block=block, together=TOGETHER, key=3)[0]
    assert every_third.tolist() == (read_in(1234, block, 0) + read_in(1234, block, 1))[5 : 5 + 2100 : 3]


def test_shuffled_blocks_meet_others_in_every_epoch() -> None:
    assert len({tuple(sorted(read_in(4000, 16, epoch)[: TOGETHER * 16])) for epoch in range(4)}) == 4


def test_rows_that_fill_no_block_are_not_always_read_last() -> None:
    size = 4010
    found = [read_in(size, 16, epoch).index(size - 1) for epoch in range(40)]
    assert min(found) < size // 4
    assert max(found) > 3 * size // 4
