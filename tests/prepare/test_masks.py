"""Masked spans: the loss counts exactly the tokens that have no byte in one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_prose import prose
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from ropewalk.prepare import tokenizer as tokenizers
from ropewalk.prepare.byte_level import byte_table
from ropewalk.prepare.cuts import Spans
from ropewalk.prepare.encoders import HuggingFace
from ropewalk.prepare.masks import Masker

TRAINED = tokenizers.train((prose(number) for number in range(40)), vocabulary=400)
TEXTS = st.lists(st.text("rope hemp ü绳索\n", max_size=20), min_size=1, max_size=5)


def encoded(tokenizer: Tokenizer, texts: list[str]):
    column = pa.array(texts, pa.large_string())
    return column, HuggingFace(tokenizer.to_str().encode()).encode(column, end=0, dtype="uint16")


def counts_of(tokenizer: Tokenizer, texts: list[str], masked: list[set[int]], rows: list[int]) -> list[list[bool]]:
    """Counts by document; `masked` are bytes, given to the masker as spans of one byte."""
    column, made = encoded(tokenizer, texts)
    triples = [(row, byte, byte + 1) for row, bytes_ in zip(rows, masked, strict=True) for byte in sorted(bytes_)]
    spans = Spans(*np.array(triples, np.int64).reshape(-1, 3).T)
    counts = Masker(tokenizer).counts(column, np.array(rows), spans, made)
    return [part.tolist() for part in np.split(counts, np.cumsum(made.lengths)[:-1])]


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.data())
def test_a_token_counts_when_none_of_its_bytes_is_masked(texts: list[str], data: st.DataObject) -> None:
    masked = [data.draw(st.sets(st.integers(0, max(0, len(t.encode()) - 1)))) if t else set() for t in texts]
    rows = sorted(data.draw(st.sets(st.integers(0, 50), min_size=len(texts), max_size=len(texts))))
    found = counts_of(TRAINED, texts, masked, rows)
    table = byte_table(TRAINED)
    assert table is not None
    for text, bytes_, counts in zip(texts, masked, found, strict=True):
        place, expected = 0, []
        for token in TRAINED.encode(text).ids:
            expected.append(bytes_.isdisjoint(range(place, place + len(table[token]))))
            place += len(table[token])
        assert counts == [*expected, True]


def test_a_long_span_and_spans_side_by_side_mask_the_same() -> None:
    text = prose(3)
    column, made = encoded(TRAINED, [text])
    one = Spans(np.array([7]), np.array([10]), np.array([40]))
    many = Spans(np.full(3, 7), np.array([10, 20, 21]), np.array([20, 21, 40]))
    masker = Masker(TRAINED)
    counts = masker.counts(column, np.array([7]), one, made)
    assert counts.tolist() == masker.counts(column, np.array([7]), many, made).tolist()
    assert 0 < counts.sum() < len(counts)


@pytest.mark.parametrize("kind", ["lower-case", "words"])
def test_tokenizers_that_are_not_byte_level_are_asked_where_tokens_come_from(kind: str) -> None:
    tokenizer = Tokenizer(models.WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "lower-case":
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.train_from_iterator(["the rope ü hemp"], trainers.WordLevelTrainer(special_tokens=["?"]))
    text = "The ü rope  Hemp"
    at = text.encode().index(b"rope")
    (counts,) = counts_of(tokenizer, [text], [{at + 1}], [0])
    assert counts == [True, True, False, True, True]
