"""Near-duplicates against all pairs of a plain reference; stars, caps, chunks, files."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.prepare.config import Deduplicate, Near
from ropewalk.prepare.near.corpus import near_duplicates
from ropewalk.prepare.near.files import open_sets, open_sketch, write_sets, write_sketch
from ropewalk.prepare.near.match import Matches, canonical_ranks, capped, match
from ropewalk.prepare.near.propose import Proposed, propose
from ropewalk.prepare.near.sketch import bands, sets, sketch
from tests.prepare.near_corpora import HAN, column, cut, with_copies
from tests.prepare.near_reference import jaccard, shingles, stars

NEAR = Near()


def found(matches: Matches) -> dict[int, tuple[int, float]]:
    rows = zip(matches.document, matches.partner, matches.similarity, strict=True)
    return {int(document): (int(partner), float(similarity)) for document, partner, similarity in rows}


def longest_first(texts: list[str]) -> list[int]:
    return sorted(range(len(texts)), key=lambda row: (-len(texts[row].encode()), row))


def near(texts: list[str], settings: Near = NEAR) -> dict[int, tuple[int, float]]:
    return found(near_duplicates(lambda: [column(texts)], settings))


def in_one_bucket(texts: list[str], ranks: np.ndarray, settings: Near) -> Matches:
    """What `match` says when everything is proposed to be compared with everything."""
    rows = np.arange(len(texts))
    proposed = Proposed(rows, np.array([0, len(texts)]), np.array([0, len(texts)]))
    return match(proposed, [sets(column(texts), rows, settings)], ranks, settings)


SMALL = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=14).map(" ".join), min_size=2, max_size=12)


@settings(deadline=None)
@given(SMALL, st.sampled_from([0.2, 0.5, 0.8, 1.0]), st.integers(1, 3), st.data())
def test_stars_are_those_of_all_pairs(texts: list[str], threshold: float, width: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(texts))))
    ranks = np.argsort(order)
    matches = in_one_bucket(texts, ranks, Near(threshold=threshold, shingle_words=width, max_compared=100))
    assert found(matches) == stars([shingles(text, width) for text in texts], order, threshold)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("vocabulary", "joint"), [(None, " "), (HAN, "")], ids=["latin", "han"])
def test_what_goes_is_exactly_what_all_pairs_say(seed: int, vocabulary: list[str] | None, joint: str) -> None:
    kind = {"vocabulary": vocabulary, "joint": joint} if vocabulary else {}
    texts = with_copies(seed, originals=60, copies=60, **kind)
    expected = stars([shingles(text, 5) for text in texts], longest_first(texts), 0.8)
    # With 64 bands of 5 rows a pair of similarity 0.8 is missed with a chance of 1e-11.
    assert near(texts, Near(bands=64)) == expected
    assert len(expected) > 10


@pytest.mark.parametrize("joint", [" ", ""])
def test_default_bands_find_97_percent_of_pairs_and_nothing_false_goes(joint: str) -> None:
    kind = {} if joint else {"vocabulary": HAN, "joint": joint}
    texts = with_copies(7, originals=400, copies=800, **kind)
    each = [shingles(text, 5) for text in texts]
    gone = near(texts)
    by_shingle: dict[tuple[str, ...], list[int]] = {}
    for row, own in enumerate(each):
        for shingle in own:
            by_shingle.setdefault(shingle, []).append(row)
    sharing = {pair for rows in by_shingle.values() for pair in itertools.combinations(rows, 2)}
    pairs = [(a, b) for a, b in sharing if jaccard(each[a], each[b]) >= 0.8]
    assert len(pairs) > 200
    assert sum(a in gone or b in gone for a, b in pairs) >= 0.97 * len(pairs)
    for document, (partner, similarity) in gone.items():
        assert partner not in gone
        assert similarity == jaccard(each[document], each[partner]) >= 0.8


def test_a_chain_of_small_changes_does_not_wipe_out_its_end() -> None:
    words = [f"w{number}" for number in range(400)]
    chain = [" ".join(words[start : start + 200]) for start in range(0, 201, 10)]
    gone = near(chain, Near(bands=64))
    each = [shingles(text, 5) for text in chain]
    # A transitive closure would keep one, though the ends have nothing in common.
    assert all(jaccard(one, two) >= 0.8 for one, two in itertools.pairwise(each))
    assert jaccard(each[0], each[-1]) == 0
    assert len(chain) - len(gone) >= 5
    assert all(jaccard(each[row], each[partner]) >= 0.8 for row, (partner, _) in gone.items())


CORPUS = with_copies(3, originals=40, copies=60, words=40)


@functools.cache
def whole() -> dict[int, tuple[int, float]]:
    return near(CORPUS)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, len(CORPUS)), max_size=8), st.sampled_from([10_000_000, 1_000]))
def test_the_result_depends_neither_on_chunks_nor_on_memory(edges: list[int], memory: int) -> None:
    tight = dataclasses.replace(NEAR, memory_bytes=memory)
    assert found(near_duplicates(lambda: cut(CORPUS, edges), tight)) == whole()


def test_the_best_document_stays_whatever_its_place() -> None:
    text = with_copies(1, originals=1, copies=0)[0]
    texts = [text + " tail", text, text + " tail end"]
    sketches = [sketch(column(texts), NEAR)]
    proposed = propose(sketches, bands=bands(NEAR), memory_bytes=NEAR.memory_bytes)
    all_sets = [sets(column(texts), rows, NEAR) for rows in proposed.by_chunk()]
    by_priority = canonical_ranks(np.array([1, 0, 1]), -np.array([len(each) for each in texts]))
    matches = match(proposed, all_sets, by_priority, NEAR)
    assert {document: partner for document, (partner, _) in found(matches).items()} == {0: 1, 2: 1}


def test_canonical_ranks_take_the_first_column_then_the_next_then_the_place() -> None:
    priority, size = np.array([1, 0, 0, 1, 0]), np.array([9, 5, 7, 9, 7])
    assert canonical_ranks(priority, -size).tolist() == [3, 2, 0, 4, 1]


def test_a_bucket_of_unlike_documents_costs_no_more_than_the_cap_allows() -> None:
    texts = [f"d{number} " + " ".join(f"u{number}x{word}" for word in range(8)) for number in range(500)]
    copies = texts[:3]
    matches = in_one_bucket([*texts, *copies], np.arange(503), dataclasses.replace(NEAR, max_compared=10))
    assert matches.compared <= 503 * 10
    assert found(matches) == {500: (0, 1.0), 501: (1, 1.0), 502: (2, 1.0)}


def test_a_bucket_of_copies_is_compared_once_each() -> None:
    texts = [with_copies(1, originals=1, copies=0)[0]] * 1000
    matches = near_duplicates(lambda: [column(texts)], NEAR)
    assert matches.compared == len(matches.document) == 999


def test_documents_without_words_are_not_alike() -> None:
    assert near(["", "", "...", "...", " "]) == {}
    assert near(["", "", "...", "...", " "], Near(kind="simhash")) == {}


def test_documents_that_stay_in_any_case_are_partners_and_never_go() -> None:
    text = with_copies(1, originals=1, copies=0)[0]
    texts = [text, text, text + " and more", "other words altogether in this one"]
    rows = np.arange(4)
    proposed = Proposed(rows, np.array([0, 4]), np.array([0, 4]))
    matches = match(proposed, [sets(column(texts), rows, NEAR)], np.array([3, 2, 0, 1]), NEAR, fixed=2)
    assert {document: partner for document, (partner, _) in found(matches).items()} == {2: 0}


def test_a_source_over_its_cap_keeps_its_least_similar_documents_and_raises_an_alarm() -> None:
    matches = Matches(np.array([1, 2, 3, 8]), np.array([0, 0, 0, 7]), np.array([0.9, 0.8, 1.0, 0.85]))
    sources = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1])
    kept, alarms = capped(matches, sources, ["web", "books"], max_removed_share=0.5)
    assert kept.document.tolist() == [1, 3, 8]
    assert kept.partner.tolist() == [0, 0, 7]
    assert [(alarm.source, alarm.documents, alarm.matched, alarm.removed) for alarm in alarms] == [("web", 4, 3, 2)]
    assert "source `web`: 3 of 4 documents" in str(alarms[0])


def test_a_cap_that_is_not_reached_changes_nothing() -> None:
    matches = Matches(np.array([1]), np.array([0]), np.array([0.9]))
    kept, alarms = capped(matches, np.zeros(2, np.int64), ["web"], max_removed_share=0.5)
    assert (kept.document.tolist(), alarms) == ([1], [])


def test_files_give_back_what_was_written(tmp_path: Path) -> None:
    text = column(CORPUS)
    keys, some = sketch(text, NEAR), sets(text, np.array([3, 5]), NEAR)
    write_sketch(tmp_path / "keys.arrow", keys, NEAR)
    write_sets(tmp_path / "sets.arrow", some, NEAR)
    stored = open_sketch(tmp_path / "keys.arrow", NEAR)
    assert stored.documents == len(CORPUS)
    assert all((stored.band(band) == keys.band(band)).all() for band in range(16))
    again = open_sets(tmp_path / "sets.arrow", NEAR)
    assert (again.values == some.values).all()
    assert again.bounds.tolist() == some.bounds.tolist()


def test_stages_over_files_find_what_one_call_finds(tmp_path: Path) -> None:
    chunks = cut(CORPUS, [0, 13, 50])
    for number, text in enumerate(chunks):
        write_sketch(tmp_path / f"keys-{number}.arrow", sketch(text, NEAR), NEAR)
    stored = [open_sketch(tmp_path / f"keys-{number}.arrow", NEAR) for number in range(len(chunks))]
    proposed = propose(stored, bands=bands(NEAR), memory_bytes=NEAR.memory_bytes)
    for number, (text, rows) in enumerate(zip(chunks, proposed.by_chunk(), strict=True)):
        write_sets(tmp_path / f"sets-{number}.arrow", sets(text, rows, NEAR), NEAR)
    files = [open_sets(tmp_path / f"sets-{number}.arrow", NEAR) for number in range(len(chunks))]
    ranks = canonical_ranks(-np.array([len(text.encode()) for text in CORPUS]))
    assert found(match(proposed, files, ranks, NEAR, scratch=tmp_path)) == whole()


def test_a_file_of_another_algorithm_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.arrow"
    write_sketch(path, sketch(column(["a b c"]), NEAR), NEAR)
    with pytest.raises(DataError, match=r"keys.arrow: this sketch was made by .*rows=5.*need .*rows=4"):
        open_sketch(path, Near(rows=4))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"keys.arrow: this result of a prepare stage is damaged"):
        open_sketch(path, NEAR)
    with pytest.raises(DataError, match="this file is missing"):
        open_sketch(tmp_path / "none.arrow", NEAR)


def test_settings_that_would_miss_most_pairs_are_refused() -> None:
    assert list(Near().check()) == []
    assert list(Near(kind="simhash").check()) == []
    ((key, what),) = Near(threshold=0.5).check()
    assert key == "bands"
    assert "find only 40% of the pairs at threshold 0.5" in what
    assert "146 bands of 5 find 99 %" in what
    assert list(Near(threshold=0.5, bands=146).check()) == []
    assert [key for key, _ in Near(kind="simhash", tables=1).check()] == ["tables"]
    assert Deduplicate().near == Near()
