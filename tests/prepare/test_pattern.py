"""Pieces marked for 64 bytes at a time are those of Hugging Face's pattern, wherever a block or a document ends."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from tokenizers import pre_tokenizers

from ropewalk.prepare import bpe
from ropewalk.prepare.byte_level import byte_letters
from ropewalk.prepare.encoders import HARD, closed
from ropewalk.prepare.kernels.lanes import LANES, bytes_between, trailing_zeros, word_at

SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
LETTERS = {letter: byte for byte, letter in enumerate(byte_letters())}
SIGNS = [
    *"abstmrelvd",
    *"  \n\t\r",
    *"''\"-=",
    *"017",
    *"é中，\u3000\u00a0½👍",
    "    ",
    "the rope ",
    "-" * 30,
    "x" * 61,
]
TEXTS = st.lists(st.sampled_from(SIGNS), max_size=60).map("".join)


def pieces(texts: list[str]) -> Counter[bytes]:
    """Those of Hugging Face."""
    found = [piece for text in texts for piece, _ in SPLIT(text)]
    return Counter(bytes(LETTERS[letter] for letter in piece) for piece in found)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_pieces_are_those_of_hugging_face(texts: list[str]) -> None:
    counts: Counter[bytes] = Counter()
    bpe.count_pieces(pa.array(texts, pa.large_string()), counts)
    assert counts == pieces(texts)


@pytest.mark.parametrize("shift", range(0, 70, 3))
def test_hard_strings_have_the_same_pieces_wherever_a_block_ends(shift: int) -> None:
    texts = ["x" * shift + text for text in HARD]
    counts: Counter[bytes] = Counter()
    bpe.count_pieces(pa.array(texts, pa.large_string()), counts)
    assert counts == pieces(texts)


@njit
def _seen(data: npt.NDArray[np.uint8], place: int) -> tuple[int, int, int, int]:
    letters = bytes_between(data, place, 0x20, 0x61, 26)
    high = bytes_between(data, place, 0, 0x80, 128)
    return letters, high, word_at(data, place), trailing_zeros(letters)


@settings(deadline=None)  # the first example compiles
@given(st.binary(min_size=LANES + 5, max_size=LANES + 5), st.integers(0, 5))
def test_bytes_side_by_side_are_told_as_one_by_one(content: bytes, place: int) -> None:
    letters, high, word, zeros = _seen(np.frombuffer(content, np.uint8), place)
    block = content[place : place + LANES]
    assert letters == sum(1 << i for i, byte in enumerate(block) if chr(byte | 0x20) in "abcdefghijklmnopqrstuvwxyz")
    assert high == sum(1 << i for i, byte in enumerate(block) if byte >= 0x80)
    assert word == int.from_bytes(block[:8], "little")
    assert zeros == (LANES if letters == 0 else (letters & -letters).bit_length() - 1)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 60_000), max_size=40), max_size=6), st.sampled_from(["uint16", "uint32"]))
def test_every_document_is_closed(documents: list[list[int]], dtype: str) -> None:
    tokens = np.array([token for document in documents for token in document], np.uint32)
    made = closed(tokens, np.array([len(document) for document in documents], np.int64), end=7, dtype=dtype)
    assert made.tokens.tolist() == [token for document in documents for token in [*document, 7]]
    assert made.lengths.tolist() == [len(document) + 1 for document in documents]
    assert made.tokens.dtype == dtype
