"""Fates: nothing is lost, nothing is counted twice, and a sum that is wrong fails."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.prepare.documents import Edits, edits_of
from ropewalk.prepare.fates import Fates, Removal


def fates(sizes: list[int], sources: list[int] | None = None) -> Fates:
    return Fates(
        source=np.array(sources or [0] * len(sizes), np.int64), sources=["a", "b"], sizes=np.array(sizes, np.int64)
    )


def removal(rows: list[int], rule: str = "r") -> Removal:
    return Removal(rows=np.array(rows, np.int64), rule=rule)


def test_a_document_that_goes_twice_fails() -> None:
    some = fates([1, 2, 3])
    with pytest.raises(DataError, match="removed a document twice"):
        some.close("s", removals=[removal([1]), removal([1], "other")])
    some.close("s", removals=[removal([1])])
    with pytest.raises(DataError, match="removed a document twice"):
        some.close("t", removals=[removal([1])])


def test_bytes_that_no_rule_took_fail() -> None:
    with pytest.raises(DataError, match="bytes in, but"):
        fates([10, 10]).close(
            "s",
            edits=[Edits.of(np.array([0]), "cut", np.array([3]))],
            sizes=np.array([6, 10]),
        )


def test_a_removed_row_says_why_and_the_others_are_null() -> None:
    some = fates([5, 6, 7], [0, 1, 1])
    some.close(
        "filter",
        removals=[
            Removal(
                rows=np.array([2]),
                rule=pa.array(["min_words"]),
                value=np.array([1.5]),
                threshold=np.array([2.0]),
                partner=pa.array(["x"]),
                jaccard=np.array([0.9]),
            )
        ],
    )
    rows = some.removed().to_pylist()
    nothing = dict.fromkeys(("stage", "rule", "value", "threshold", "partner", "jaccard"))
    assert rows[:2] == [nothing, nothing]
    assert rows[2] == {
        "stage": "filter", "rule": "min_words", "value": 1.5, "threshold": 2.0, "partner": "x", "jaccard": 0.9
    }  # fmt: skip
    assert some.rules() == [("filter", "min_words", 1)]
    assert [step.removed for step in some.counts("b")] == [{"min_words": 1}]
    assert [step.removed_bytes for step in some.counts("b")] == [{"min_words": 7}]
    assert some.counts("a")[0].documents_out == 1


@given(st.lists(st.lists(st.integers(0, 19), max_size=6, unique=True), max_size=5), st.integers(0, 100))
def test_counts_join_up_whatever_is_removed(stages: list[list[int]], seed: int) -> None:
    random = np.random.default_rng(seed)
    some = Fates(source=random.integers(0, 2, 20), sources=["a", "b"], sizes=random.integers(0, 50, 20))
    gone: set[int] = set()
    for number, rows in enumerate(stages):
        fresh = [row for row in rows if row not in gone]
        gone |= set(fresh)
        some.close(f"s{number}", removals=[removal(fresh, f"r{number}")])
    assert int(some.left.sum()) == 20 - len(gone)
    for name in ("a", "b"):
        steps = some.counts(name)
        for before, after in itertools.pairwise(steps):
            assert (before.documents_out, before.bytes_out) == (after.documents_in, after.bytes_in)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc"), st.integers(0, 9)), max_size=20))
def test_edits_survive_the_column(changes: list[tuple[int, str, int]]) -> None:
    parts = [Edits.of(np.array([row]), rule, np.array([size])) for row, rule, size in changes]
    column = Edits.joined(parts).column(10)
    expected = [[{"rule": rule, "bytes": size} for place, rule, size in changes if place == row] for row in range(10)]
    assert column.to_pylist() == expected
    assert edits_of(column.slice(3, 4)).column(4).to_pylist() == expected[3:7]
