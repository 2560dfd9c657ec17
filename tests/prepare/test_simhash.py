"""SimHash against its definition, and its block tables against all pairs."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.prepare.config import Near
from ropewalk.prepare.near.corpus import near_duplicates
from ropewalk.prepare.near.sketch import sets
from ropewalk.prepare.simhash import block_keys, fingerprints, tables
from tests.prepare.near_corpora import column, with_copies


def hamming(one: int, two: int) -> int:
    return (one ^ two).bit_count()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=40))
def test_a_fingerprint_is_the_majority_of_the_shingles_bit_by_bit(words: list[str]) -> None:
    width = 2
    text = " ".join(words)
    runs = [" ".join(words[start : start + width]) for start in range(max(1, len(words) - width + 1))]
    near = Near(shingle_words=width)
    # The hash of a shingle is that of the document which is this shingle alone.
    hashes = [int(sets(column([run]), np.arange(1), near).values[0]) for run in runs]
    majority = sum(1 << bit for bit in range(64) if 2 * sum(each >> bit & 1 for each in hashes) > len(hashes))
    assert fingerprints(column([text]), shingle_words=width).tolist() == [majority]


DISTANCES = st.integers(0, 4).flatmap(lambda distance: st.tuples(st.just(distance), st.integers(distance + 1, 7)))


@settings(deadline=None, max_examples=50)
@given(DISTANCES, st.integers(0, 2**32), st.integers(0, 64))
def test_block_tables_miss_no_pair_within_the_distance(limits: tuple[int, int], seed: int, flips: int) -> None:
    distance, blocks = limits
    draw = np.random.default_rng(seed)
    prints = [int(each) for each in draw.integers(1, 2**64, 20, dtype=np.uint64)]
    prints += [
        each ^ sum(1 << int(bit) for bit in draw.choice(64, min(flips, distance + 1), replace=False)) for each in prints
    ]
    prints += [1, 2, 3, 1 << 63]
    keys = block_keys(np.array(prints, np.uint64), distance=distance, blocks=blocks)
    assert len(keys) == tables(distance, blocks)
    assert keys.all()
    for one, two in itertools.combinations(range(len(prints)), 2):
        if hamming(prints[one], prints[two]) <= distance:
            assert (keys[:, one] == keys[:, two]).any()


def test_what_goes_is_within_the_distance_of_what_stays_and_nothing_close_stays() -> None:
    texts = with_copies(11, originals=150, copies=300, words=200)
    near = Near(kind="simhash", max_distance=5, blocks=8, max_compared=1000)
    prints = [int(each) for each in fingerprints(column(texts), shingle_words=5)]
    matches = near_duplicates(lambda: [column(texts[:100]), column(texts[100:])], near)
    gone = dict(zip(matches.document.tolist(), matches.partner.tolist(), strict=True))
    assert len(gone) > 20
    for document, partner, similarity in zip(gone, gone.values(), matches.similarity.tolist(), strict=True):
        assert partner not in gone
        assert hamming(prints[document], prints[partner]) == round((1 - similarity) * 64) <= 5
    staying = [row for row in range(len(texts)) if row not in gone]
    assert all(hamming(prints[one], prints[two]) > 5 for one, two in itertools.combinations(staying, 2))


def test_close_documents_have_close_fingerprints() -> None:
    texts = with_copies(4, originals=1, copies=1, words=2000)
    one, two = (int(each) for each in fingerprints(column(texts), shingle_words=1))
    other = int(fingerprints(column(with_copies(5, originals=1, copies=0, words=2000)), shingle_words=1)[0])
    assert hamming(one, two) < 12 < hamming(one, other)
