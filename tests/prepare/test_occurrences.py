"""The histogram of repeats and its warning."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.prepare.occurrences import EDGES, occurrences


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), max_size=80))
def test_bars_add_up_to_the_corpus(rows: list[tuple[int, int]]) -> None:
    groups, sizes = np.array([row[0] for row in rows], np.int64), np.array([row[1] for row in rows], np.int64)
    bars = occurrences(groups, sizes).bars
    times = Counter(groups.tolist())
    for bar in bars:
        inside = {
            group for group, count in times.items() if bar.least <= count and (bar.most is None or count <= bar.most)
        }
        assert bar.documents == len(inside)
        assert bar.copies == sum(times[group] for group in inside)
        assert bar.bytes == sum(size for group, size in rows if group in inside)
    assert [bar.least for bar in bars] == list(EDGES)
    assert sum(bar.bytes for bar in bars) == sizes.sum()


def test_a_tenth_of_the_text_seen_a_hundred_times_raises_the_warning() -> None:
    # The example of Hernandez et al.: 0.1 % of the documents, 100 times each, beside nine times as many single ones.
    groups = np.concatenate([np.repeat(np.arange(10), 100), 10 + np.arange(9000)])
    found = occurrences(groups, np.full(len(groups), 500))
    assert found.harmful_share == 0.1
    assert found.warning.startswith("10% of the text are documents that occur 10 times or more")


def test_few_repeats_and_rare_ones_raise_none() -> None:
    everything_four_times = occurrences(np.repeat(np.arange(1000), 4), np.full(4000, 100))
    one_a_thousand_times = occurrences(
        np.concatenate([np.zeros(1000, np.int64), np.arange(1, 10_000)]), np.full(10_999, 9)
    )
    assert everything_four_times.warning == ""
    assert one_a_thousand_times.warning == ""
    assert occurrences(np.empty(0, np.int64), np.empty(0, np.int64)).warning == ""
