"""Our byte-pair kernel gives the tokens of Hugging Face's tokenizers, whatever the vocabulary and the text."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_prose import prose
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from ropewalk.prepare import bpe
from ropewalk.prepare import tokenizer as tokenizers
from ropewalk.prepare.byte_level import byte_letters
from ropewalk.prepare.encoders import HARD
from ropewalk.prepare.kernels.bpe import LONG_BYTES, PIECE_LIMIT, SHORT_BYTES
from ropewalk.prepare.kernels.merges import NONE, UNKNOWN, Tables
from ropewalk.prepare.kernels.runs import RUN_BYTES

LETTERS = byte_letters()
SIGNS = [
    "a",
    "b",
    "s",
    "t",
    "l",
    "A",
    " ",
    " ",
    "\n",
    "'",
    "1",
    "é",
    "è",
    "ß",
    "中",
    "串",
    "文",
    "，",
    "\u3000",
    "👍",
    "🏽",
    "-",
]
TEXTS = st.lists(st.sampled_from(SIGNS), max_size=40).map("".join)


def random_tokenizer(seed: int, *, merges: int = 400) -> Tokenizer:
    """A vocabulary of random merges over the bytes of SIGNS: many join parts of different characters."""
    draw = random.Random(seed)
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)}
    usual = [LETTERS[byte] for sign in SIGNS for byte in sign.encode()]
    pairs: list[tuple[str, str]] = []
    while len(pairs) < merges:
        left, right = draw.choice(usual), draw.choice(usual)
        if len(left + right) <= 9 and left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            pairs.append((left, right))
            usual.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def encoder_of(tokenizer: Tokenizer) -> bpe.BytePairEncoder:
    tables = bpe.tables_of(tokenizer.to_str().encode())
    assert isinstance(tables, Tables), tables
    return bpe.BytePairEncoder(tables)


def documents(encoder: bpe.BytePairEncoder, texts: list[str]) -> list[list[int]]:
    """The tokens of each text and the end of text, which is 77."""
    tokens, lengths = encoder.encode(pa.array(texts, pa.large_string()), end=77)
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]


def expected(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False).ids, 77]


RANDOM = [(tokenizer := random_tokenizer(seed), encoder_of(tokenizer)) for seed in range(6)]
TRAINED = tokenizers.train((prose(n) + "it's 绳索，麻绳。\n\n  x = 'y'" for n in range(40)), vocabulary=420)
TRAINED.encode_special_tokens = True
TRAINED_ENCODER = encoder_of(TRAINED)
KINDS = bpe.character_kinds()
HAN = "不人一有花天云山风月春日无来"
HAN_SIGNS = [*HAN, *HAN, "，", "。", "，", "\n", "\n", "(", ")", "'", "s", " ", "1", "\u3000", "é", "龘", "𠀀"]
HAN_TEXTS = st.lists(st.sampled_from(HAN_SIGNS), max_size=120).map("".join)


def verses(seed: int, *, length: int = 400) -> str:
    draw = random.Random(seed)
    weights = [*range(len(HAN), 0, -1), 3, 3, 1, 1, 1]
    return "".join(draw.choices([*HAN, "，", "。\n", "(", "！", "……"], weights, k=length))


TRAINED_ON_HAN = tokenizers.train(map(verses, range(40)), vocabulary=700)
TRAINED_ON_HAN.encode_special_tokens = True
HAN_ENCODER = encoder_of(TRAINED_ON_HAN)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(RANDOM) - 1), st.lists(TEXTS, min_size=1, max_size=4))
def test_random_vocabularies_encode_as_hugging_face_does(number: int, texts: list[str]) -> None:
    tokenizer, encoder = RANDOM[number]
    assert documents(encoder, texts) == [expected(tokenizer, text) for text in texts]


@settings(max_examples=300, deadline=None)
@given(st.lists(HAN_TEXTS, min_size=1, max_size=4))
def test_characters_that_often_merge_are_encoded_as_hugging_face_does(texts: list[str]) -> None:
    assert documents(HAN_ENCODER, texts) == [expected(TRAINED_ON_HAN, text) for text in texts]


def test_a_vocabulary_of_han_joins_whole_characters() -> None:
    tables = bpe.tables_of(TRAINED_ON_HAN.to_str().encode())
    assert isinstance(tables, Tables)
    merges = json.loads(TRAINED_ON_HAN.to_str())["model"]["merges"]
    made = [bytes(map(LETTERS.index, left + right)) for left, right in merges]
    joining = [text for text in made if _is_text(text) and len(text.decode()) > 1]
    assert np.count_nonzero(tables.joins != NONE) == len(joining) > 200


@pytest.mark.parametrize("length", [RUN_BYTES // 3 - 1, RUN_BYTES // 3, RUN_BYTES // 3 + 1, 5 * RUN_BYTES])
def test_text_is_encoded_alike_however_many_runs_it_takes(length: int) -> None:
    texts = [verses(seed, length=length) for seed in range(100, 104)]
    for tokenizer, encoder in ((TRAINED_ON_HAN, HAN_ENCODER), (TRAINED, TRAINED_ENCODER), RANDOM[0]):
        assert documents(encoder, texts) == [expected(tokenizer, text) for text in texts]


def test_tokens_are_the_same_in_either_type() -> None:
    texts = pa.array(["it's 绳索，麻绳。\n\n  x = 'y'", "", "麻绳\n绳索绳索，" * 90, prose(1)], pa.large_string())
    wide, wide_lengths = TRAINED_ENCODER.encode(texts, end=77)
    expected_tokens, expected_lengths = wide.tolist(), wide_lengths.tolist()
    narrow, lengths = TRAINED_ENCODER.encode(texts, end=77, dtype="uint16")
    assert (narrow.dtype, narrow.tolist(), lengths.tolist()) == (np.uint16, expected_tokens, expected_lengths)


def test_random_vocabularies_do_join_parts_of_characters() -> None:
    joining = [token for token in RANDOM[0][0].get_vocab() if not _is_text(bytes(map(LETTERS.index, token)))]
    assert len(joining) > 350


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.text(), TEXTS), min_size=1, max_size=4))
def test_any_text_is_encoded_as_hugging_face_does_or_left(texts: list[str]) -> None:
    for text, tokens in zip(texts, documents(TRAINED_ENCODER, texts), strict=True):
        assert tokens in ([], expected(TRAINED, text))


@pytest.mark.parametrize("text", HARD)
def test_hard_strings_are_encoded_as_hugging_face_does_or_left(text: str) -> None:
    (tokens,) = documents(TRAINED_ENCODER, [text])
    usual = len(text) < PIECE_LIMIT and not any(KINDS[ord(sign)] == UNKNOWN for sign in text)
    assert tokens == expected(TRAINED, text) or (not usual and tokens == [])


@pytest.mark.parametrize("sign", ["a", "é", "中", " ", "\u3000", "-"])
@pytest.mark.parametrize("length", [PIECE_LIMIT - 1, PIECE_LIMIT, PIECE_LIMIT + 1, 5 * PIECE_LIMIT])
def test_a_long_piece_is_encoded_or_left_and_its_neighbours_do_not_mind(sign: str, length: int) -> None:
    texts = ["before 中", sign * length, "after it's"]
    found = documents(TRAINED_ENCODER, texts)
    assert found[1] in ([], expected(TRAINED, texts[1]))
    assert [found[0], found[2]] == [expected(TRAINED, texts[0]), expected(TRAINED, texts[2])]
    if length * len(sign.encode()) <= PIECE_LIMIT:
        assert found[1]


def test_what_is_remembered_changes_nothing() -> None:
    texts = [prose(number, words=300) for number in range(20)]
    encoder = encoder_of(TRAINED)
    first = documents(encoder, texts)
    assert documents(encoder, texts) == first == [expected(TRAINED, text) for text in texts]


def test_a_slice_of_a_column_is_encoded_alone() -> None:
    texts = [prose(number) for number in range(6)]
    tokens, lengths = TRAINED_ENCODER.encode(pa.array(texts, pa.large_string()).slice(2, 3), end=77)
    assert np.split(tokens, np.cumsum(lengths)[:-1])[1].tolist() == expected(TRAINED, texts[3])
    tokens, lengths = TRAINED_ENCODER.encode(pa.array([], pa.large_string()), end=77)
    assert (len(tokens), len(lengths)) == (0, 0)


def test_every_character_is_of_the_kind_that_hugging_face_knows() -> None:
    assert bpe.same_kinds(np.arange(0x110000), KINDS)


def test_a_wrong_kind_is_noticed() -> None:
    kinds = KINDS.copy()
    kinds[ord("中")] = kinds[ord("-")]
    assert not bpe.same_kinds(np.arange(0x110000), kinds)


def changed(**changes: Any) -> bytes:
    tree = json.loads(TRAINED.to_str())
    for place, value in changes.items():
        where = tree["model"] if place in tree["model"] else tree
        where[place] = value
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ignore_merges": True}, "ignore_merges"),
        ({"dropout": 0.1}, "dropout"),
        ({"byte_fallback": True}, "byte_fallback"),
        ({"end_of_word_suffix": "</w>"}, "end_of_word_suffix"),
        ({"type": "Unigram"}, "type"),
        ({"pre_tokenizer": None}, "pieces"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}}, "pieces"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}}, "pieces"),
        ({"normalizer": json.loads(normalizers.NFC().__getstate__())}, "normalises"),
        ({"added_tokens": [{"id": 1, "content": "x", "special": False}]}, "added tokens"),
        ({"merges": json.loads(TRAINED.to_str())["model"]["merges"][:1] * 2}, "same pair"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_with_the_reason(changes: dict[str, Any], why: str) -> None:
    refusal = bpe.tables_of(changed(**changes))
    assert isinstance(refusal, str)
    assert why in refusal


@pytest.mark.parametrize("length", [1, SHORT_BYTES, SHORT_BYTES + 1, LONG_BYTES, LONG_BYTES + 1, PIECE_LIMIT])
def test_pieces_of_every_length_are_encoded_alike_when_they_come_back(length: int) -> None:
    draw = random.Random(length)
    texts = ["".join(draw.choices("abstlA", k=length)) + " a" * 80 for _ in range(20)]
    texts += [" " * length + "a" + " a" * 80, "\n" + " " * length + "b" + " a" * 80, "-" * length + " a" * 80]
    for tokenizer, encoder in RANDOM:
        wanted = [expected(tokenizer, text) for text in texts]
        assert documents(encoder, texts) == documents(encoder, texts) == wanted
