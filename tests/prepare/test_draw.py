"""Duplicates, split and sample as functions of the texts alone."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.prepare.deduplicate import first_equals
from ropewalk.prepare.draw import held_out, kin, sample

TEXTS = st.lists(st.text(alphabet="abc", max_size=3), min_size=1, max_size=40)


def hashes(texts: list[str]) -> pa.Array:
    return pa.array([xxhash.xxh3_128_digest(text.encode()) for text in texts], pa.binary(16))


@given(TEXTS)
def test_the_first_of_equal_texts_is_found(texts) -> None:
    assert first_equals(hashes(texts)).tolist() == [texts.index(text) for text in texts]


@given(TEXTS, st.floats(0.001, 0.999), st.integers(0, 5))
def test_both_splits_have_a_text_and_no_text_is_in_both(texts, share, seed) -> None:
    if len(set(texts)) == 1:
        with pytest.raises(DataError, match="too small"):
            held_out(hashes(texts), share=share, seed=seed)
        return
    mask = held_out(hashes(texts), share=share, seed=seed)
    validation = {text for text, chosen in zip(texts, mask, strict=True) if chosen}
    train = {text for text, chosen in zip(texts, mask, strict=True) if not chosen}
    assert validation
    assert train
    assert not validation & train


def test_the_split_has_the_share_asked_for_and_follows_the_seed() -> None:
    many = hashes([str(number) for number in range(20_000)])
    mask = held_out(many, share=0.1, seed=0)
    assert 1800 < mask.sum() < 2200  # five standard deviations: sqrt(20,000 x 0.1 x 0.9) = 42
    assert (held_out(many, share=0.1, seed=1) != mask).any()


@given(TEXTS, st.randoms())
def test_the_split_of_a_text_does_not_depend_on_order(texts, random) -> None:
    if len(set(texts)) == 1:
        return
    shuffled = random.sample(texts, len(texts))
    first = dict(zip(texts, held_out(hashes(texts), share=0.3, seed=0), strict=True))
    second = dict(zip(shuffled, held_out(hashes(shuffled), share=0.3, seed=0), strict=True))
    assert first == second


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 2000))
def test_the_sample_stays_within_its_bytes_but_is_never_empty(sizes, limit) -> None:
    lengths = np.array(sizes)
    chosen = sample(hashes([str(n) for n in range(len(sizes))]), lengths, limit_bytes=limit, seed=0)
    assert chosen.sum() == 1 or lengths[chosen].sum() <= limit
    assert chosen.any()
    assert chosen.all() or lengths.sum() > limit


def test_a_module_and_its_docstrings_fall_on_the_same_side() -> None:
    names = [f"m{number}.py" for number in range(200)]
    ids = pa.array([f"code:stdlib/{name}" for name in names] + [f"prose:docstrings/{name}" for name in names])
    texts = hashes([f"text {number}" for number in range(400)])
    mask = held_out(kin(ids, texts), share=0.3, seed=0)
    assert (mask[:200] == mask[200:]).all()
    assert 0 < mask.sum() < 400


def test_other_documents_are_drawn_by_their_text() -> None:
    texts = hashes(["one", "two"])
    assert kin(pa.array(["a:x.txt", "a:y.txt"]), texts).equals(texts)
