"""SimHash against its definition, its tables against the chances they promise, its findings against exact Jaccard."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.prepare.config import Near, Prepare, Source
from ropewalk.prepare.near.corpus import near_duplicates
from ropewalk.prepare.near.sketch import algorithm, sets, sketch
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.simhash import fingerprints, table_keys
from tests.prepare.near_corpora import LATIN, column, with_copies
from tests.prepare.near_reference import jaccard, shingles

SIMHASH = Near(kind="simhash")
ONE_WORD = (150, 600, 2000)


def number(words: np.ndarray) -> int:
    """A fingerprint as one whole number."""
    return sum(int(word) << 64 * place for place, word in enumerate(words))


def hamming(one: int, two: int) -> int:
    return (one ^ two).bit_count()


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=30), st.sampled_from([64, 512]))
def test_a_fingerprint_is_the_majority_of_the_different_shingles_bit_by_bit(words: list[str], bits: int) -> None:
    width = 2
    text = " ".join(words)
    runs = {" ".join(words[start : start + width]) for start in range(max(1, len(words) - width + 1))}
    # The hash of a shingle is the fingerprint of the document which is this shingle alone.
    hashes = [number(fingerprints(column([run]), shingle_words=width, bits=bits)[0]) for run in runs]
    majority = sum(1 << bit for bit in range(bits) if 2 * sum(each >> bit & 1 for each in hashes) > len(hashes))
    assert number(fingerprints(column([text]), shingle_words=width, bits=bits)[0]) == majority


def test_the_words_of_a_shingle_are_hashes_of_their_own() -> None:
    texts = [" ".join(LATIN[place : place + 5]) for place in range(1000)]
    prints = [number(each) for each in fingerprints(column(texts), shingle_words=5, bits=512)]
    first = [int(each) for each in sets(column(texts), np.arange(1000), Near()).values]
    assert [each & (1 << 64) - 1 for each in prints] == first
    distances = [hamming(one, two) for one, two in itertools.pairwise(prints)]
    assert abs(np.mean(distances) - 256) < 2  # 999 pairs of 512 fair bits: the mean's deviation is 0.36
    assert 8 < np.std(distances) < 15  # 11.3 when the bits are independent of each other


@pytest.mark.parametrize("distance", [10, 40, 70])
def test_tables_propose_as_many_pairs_as_the_settings_say(distance: int) -> None:
    draw = np.random.default_rng(distance)
    prints = draw.integers(0, 2**64, (2000, 8), dtype=np.uint64)
    flips = np.zeros((2000, 512), np.uint64)
    for row in flips:
        row[draw.choice(512, distance, replace=False)] = 1
    places = np.arange(64, dtype=np.uint64)
    others = prints ^ (flips.reshape(2000, 8, 64) << places).sum(axis=2, dtype=np.uint64)
    one, two = (table_keys(each, tables=SIMHASH.tables, table_bits=SIMHASH.table_bits) for each in (prints, others))
    assert one.all()
    shared = (one == two).any(axis=0).mean()
    assert abs(shared - SIMHASH.shares(distance)) < 0.05  # 2,000 pairs: four deviations
    # A key of one table is none of another, and unlike documents share next to nothing.
    assert not (one[:-1] == one[1:]).any()
    assert (one[:, :-1] == one[:, 1:]).mean() < 1e-4


def one_word_apart(seed: int, words: int, pairs: int) -> tuple[list[str], list[str]]:
    draw = random.Random(seed)
    originals = [draw.choices(LATIN, k=words) for _ in range(pairs)]
    changed = [list(each) for each in originals]
    for each in changed:
        each[draw.randrange(4, words - 4)] = "changed"
    return [" ".join(each) for each in originals], [" ".join(each) for each in changed]


@pytest.mark.parametrize("words", ONE_WORD)
def test_the_defaults_find_pairs_that_differ_in_one_word(words: int) -> None:
    originals, changed = one_word_apart(words, words, 100)
    matches = near_duplicates(lambda: [column(originals), column(changed)], SIMHASH)
    pairs = {tuple(sorted(pair)) for pair in zip(matches.document.tolist(), matches.partner.tolist(), strict=True)}
    assert pairs <= {(row, row + 100) for row in range(100)}
    assert len(pairs) >= 0.95 * 100
    share = (words - 4 - 5) / (words - 4 + 5)
    assert SIMHASH.recall(share) > 0.99


def test_what_the_defaults_remove_resembles_what_stays() -> None:
    texts = mixed_copies()
    each = [shingles(text, 5) for text in texts]
    matches = near_duplicates(lambda: [column(texts)], SIMHASH)
    alike = [jaccard(each[a], each[b]) >= 0.8 for a, b in zip(matches.document, matches.partner, strict=True)]
    assert len(alike) > 150
    assert np.mean(alike) >= 0.95


def mixed_copies() -> list[str]:
    """Documents of 60 to 900 words, each with a copy: up to a twentieth of its words is replaced, J is 0.6 to 1."""
    draw = random.Random(8)
    documents = []
    for _ in range(400):
        words = draw.choices(LATIN, k=draw.randint(60, 900))
        copy = list(words)
        for _ in range(draw.randint(0, len(words) // 20)):
            copy[draw.randrange(len(copy))] = draw.choice(LATIN)
        documents += [words, copy]
    draw.shuffle(documents)
    return [" ".join(document) for document in documents]


def test_what_goes_is_within_the_distance_of_what_stays_and_nothing_close_stays() -> None:
    texts = with_copies(11, originals=150, copies=300, words=200)
    # At most 8 of 64 bits, and so many tables that a pair is missed with a chance of 1e-10.
    near = Near(kind="simhash", fingerprint_bits=64, max_distance=8, tables=200, table_bits=16, max_compared=1000)
    prints = [number(each) for each in fingerprints(column(texts), shingle_words=5, bits=64)]
    matches = near_duplicates(lambda: [column(texts[:100]), column(texts[100:])], near)
    gone = dict(zip(matches.document.tolist(), matches.partner.tolist(), strict=True))
    assert len(gone) > 20
    for document, partner, similarity in zip(gone, gone.values(), matches.similarity.tolist(), strict=True):
        assert partner not in gone
        assert hamming(prints[document], prints[partner]) == round((1 - similarity) * 64) <= 8
    staying = [row for row in range(len(texts)) if row not in gone]
    assert all(hamming(prints[one], prints[two]) > 8 for one, two in itertools.combinations(staying, 2))


def test_every_setting_takes_effect() -> None:
    text = column(with_copies(2, originals=3, copies=0))
    rows = np.arange(3)
    assert sketch(text, Near(kind="simhash", tables=7)).keys.shape == (7, 3)
    assert (sketch(text, Near(kind="simhash", table_bits=23)).keys != sketch(text, SIMHASH).keys).any()
    assert sets(text, rows, Near(kind="simhash", fingerprint_bits=128)).values.shape == (6,)
    names = [algorithm(Near(kind="simhash", **each)) for each in ({}, {"tables": 7}, {"table_bits": 23})]
    names.append(algorithm(Near(kind="simhash", fingerprint_bits=128, max_distance=16)))
    assert len(set(names)) == 4
    far = Near(kind="simhash", max_distance=0)
    one, two = one_word_apart(1, 150, 20)
    assert len(near_duplicates(lambda: [column(one + two)], far).document) == 0


def test_settings_that_would_miss_most_pairs_are_refused() -> None:
    ((key, what),) = Near(kind="simhash", tables=1).check()
    assert key == "tables"
    assert "1 tables of 24 bits find only 18% of the pairs" in what
    assert list(Near(kind="simhash", tables=24).check()) == []
    ((key, what),) = Near(kind="simhash", fingerprint_bits=64).check()
    assert key == "max_distance"
    assert "70 of 64 bits are more than a quarter" in what
    assert list(Near(kind="simhash", fingerprint_bits=128, max_distance=16).check()) == []


def test_a_prepare_run_removes_the_copy_and_says_how_close_it_was(settings: Prepare) -> None:
    folder = Path(settings.folder)
    (one,), (two,) = one_word_apart(9, 150, 1)
    source = folder.parent / "pair.jsonl"
    source.write_text("".join(json.dumps({"text": text.replace("w", "word")}) + "\n" for text in (one, two)))
    near = Near(kind="simhash", max_removed_share=1.0)
    changed = dataclasses.replace(
        settings,
        sources=(*settings.sources, Source(name="pair", paths=(str(source),))),
        deduplicate=dataclasses.replace(settings.deduplicate, near=near),
    )
    done = prepare(changed, seed=1)
    rows = pq.read_table(done.folder / "ledger.parquet").to_pylist()
    (row,) = [each for each in rows if each["rule"] == "simhash"]
    assert row["threshold"] == 1 - 70 / 512
    assert row["threshold"] <= row["value"] < 1
