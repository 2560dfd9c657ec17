"""Shingle hashes against strings: what a kernel reads from bytes is what Python reads from text."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ropewalk.prepare.config import Near
from ropewalk.prepare.near.sketch import Sets, sets, sketch
from tests.prepare.near_reference import jaccard, shingles

ALPHABET = "abAB01 _.,'-\n\t\x00éÉñßЖжİ\u0301\u200d\u00ad的一是了、。ひカกข\u0e31ຂ🙂𠀀٣Ａ"
TEXTS = st.text(st.sampled_from(ALPHABET), max_size=60) | st.text(
    st.characters(codec="utf-8", exclude_characters="\u212a"), max_size=30
)


def column(*texts: str) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def sets_of(*texts: str, width: int = 5) -> list[set[int]]:
    found = sets(column(*texts), np.arange(len(texts)), Near(shingle_words=width))
    return [set(found.values[a:b].tolist()) for a, b in zip(found.bounds, found.bounds[1:], strict=False)]


@settings(deadline=None)
@given(TEXTS, TEXTS, st.integers(1, 6))
@example("a b", "a b c d e f g h", 5)
@example("的一é b", "é的一, b", 1)
@example("a🙂é的\u0301b", "eight8ch eight8chars", 2)
def test_sets_have_the_sizes_and_the_common_part_of_sets_of_strings(one: str, two: str, width: int) -> None:
    expected = shingles(one, width), shingles(two, width)
    found = sets_of(one, two, width=width)
    assert [len(each) for each in found] == [len(each) for each in expected]
    assert len(found[0] & found[1]) == len(expected[0] & expected[1])


@settings(deadline=None)
@given(st.lists(TEXTS, max_size=8), st.integers(1, 4))
def test_a_set_is_sorted_and_does_not_depend_on_its_neighbours(texts: list[str], width: int) -> None:
    near = Near(shingle_words=width)
    together = sets(column("x", *texts, "y").slice(1, len(texts)), np.arange(len(texts)), near)
    for row, text in enumerate(texts):
        alone = sets(column(text), np.arange(1), near).values
        assert together.values[together.bounds[row] : together.bounds[row + 1]].tolist() == alone.tolist()
        assert alone.tolist() == sorted(set(alone.tolist()))


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=8), st.data())
def test_sets_of_some_rows_are_those_rows_of_all_sets(texts: list[str], data: st.DataObject) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=10)), np.int64)
    every = sets_of(*texts)
    found: Sets = sets(column(*texts), rows, Near())
    got = [set(found.values[a:b].tolist()) for a, b in zip(found.bounds, found.bounds[1:], strict=False)]
    assert got == [every[row] for row in rows]


def test_case_and_punctuation_make_no_difference_and_words_do() -> None:
    one, same, other = sets_of(
        "The quick, brown FOX jumps!", "the QUICK brown fox (jumps)", "the quick brown fox jumped"
    )
    assert one == same
    assert not one & other


def test_a_chinese_shingle_is_a_run_of_characters_across_punctuation() -> None:
    (found,) = sets_of("秦川雄帝宅，函谷壯皇居。")
    assert len(found) == 10 - 5 + 1
    assert found == sets_of("秦川雄帝宅函谷壯皇居")[0]


@pytest.mark.parametrize("nothing", ["", " \n", "—…!?", "\u0301", "🙂"])
def test_a_document_without_words_has_no_shingle_and_no_key(nothing: str) -> None:
    assert sets_of(nothing) == [set()]
    assert not sketch(column(nothing), Near()).keys.any()


def test_a_million_repeats_of_one_line_make_a_small_set() -> None:
    (found,) = sets_of("spam and eggs\n" * 300_000)
    assert len(found) == 3


def test_jaccard_of_the_reference_is_what_it_says() -> None:
    one, two = shingles("a b c d e f", 5), shingles("a b c d e g", 5)
    assert jaccard(one, two) == pytest.approx(1 / 3)
