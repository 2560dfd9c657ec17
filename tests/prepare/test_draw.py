"""Duplicates, split and sample as functions of the texts alone."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.prepare.deduplicate import first_equals
from ropewalk.prepare.draw import kin, sample

TEXTS = st.lists(st.text(alphabet="abc", max_size=3), min_size=1, max_size=40)


def hashes(texts: list[str]) -> pa.Array:
    return pa.array([xxhash.xxh3_128_digest(text.encode()) for text in texts], pa.binary(16))


@given(TEXTS)
def test_the_first_of_equal_texts_is_found(texts) -> None:
    assert first_equals(hashes(texts)).tolist() == [texts.index(text) for text in texts]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 2000))
def test_the_sample_stays_within_its_bytes_but_is_never_empty(sizes, limit) -> None:
    lengths = np.array(sizes)
    chosen = sample(hashes([str(n) for n in range(len(sizes))]), lengths, limit_bytes=limit, seed=0)
    assert chosen.sum() == 1 or lengths[chosen].sum() <= limit
    assert chosen.any()
    assert chosen.all() or lengths.sum() > limit


@pytest.mark.parametrize("place", ["", ":12", ":12.2"])
def test_a_module_and_its_docstrings_belong_together(place: str) -> None:
    names = [f"m{number}.py" for number in range(20)]
    ids = pa.array([f"code:stdlib/{name}{place}" for name in names] + [f"prose:docstrings/{name}" for name in names])
    related = kin(ids, hashes([f"text {number}" for number in range(40)])).to_pylist()
    assert related[:20] == related[20:]
    assert len(set(related)) == 20


def test_other_documents_are_drawn_by_their_text() -> None:
    texts = hashes(["one", "two"])
    assert kin(pa.array(["a:x.txt", "a:y.txt"]), texts).equals(texts)
