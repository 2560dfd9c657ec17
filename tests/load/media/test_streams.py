"""Random numbers of a sample: Philox as published, and independent of who else draws."""

from __future__ import annotations

import numpy as np
import pytest

from ropewalk.load.media.streams import Drawn, philox

# Counter, key and result of the known-answer tests that accompany the paper (Random123, philox4x32 10).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_numbers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = tuple(np.uint32(word) for word in counter)
    assert tuple(philox(words, np.uint64(key[0] | key[1] << 32))) == expected


def drawn(documents: list[int], epochs: list[int], seed: int = 7) -> Drawn:
    return Drawn(seed, np.array(documents, np.uint64), np.array(epochs, np.int64))


def test_a_sample_draws_the_same_in_any_batch_and_other_stages_draw_others() -> None:
    together = drawn([5, 2**63 + 9, 11], [0, 3, 3]).uniforms("crop", blocks=3)
    alone = drawn([2**63 + 9], [3]).uniforms("crop", blocks=2)
    assert (together[1, :2] == alone[0]).all()
    assert not np.isin(drawn([5], [0]).uniforms("flip"), together).any()
    assert not np.isin(drawn([5], [1]).uniforms("crop"), together).any()
    assert not np.isin(drawn([5], [0], seed=8).uniforms("crop"), together).any()


def test_numbers_fill_the_unit_interval_evenly_and_do_not_correlate() -> None:
    values = drawn(list(range(50_000)), [0] * 50_000).uniforms("crop")[:, 0]
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    # Chi-square with 99 degrees of freedom: 160 is exceeded once in ten thousand.
    assert ((counts - 2000) ** 2 / 2000).sum() < 160
    assert np.abs(np.corrcoef(values.T) - np.eye(4)).max() < 0.02
