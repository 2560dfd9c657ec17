"""Fast encoders: compared with the reference before and while they work, and replaced where they differ."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_prose import prose
from tokenizers import Regex, Tokenizer, pre_tokenizers

from ropewalk.prepare import bpe, encode, encoders
from ropewalk.prepare import tokenizer as tokenizers
from ropewalk.prepare.config import Filter, Prepare, Source
from ropewalk.prepare.config import Tokenizer as TokenizerSettings
from ropewalk.prepare.encoders import GIGATOKEN, HARD, REFERENCE, Encoded, HuggingFace, choose, open_encoder, stretch
from ropewalk.prepare.pipeline import prepare
from ropewalk.store.manifest import read_manifest
from ropewalk.store.shards import Shard

CHINESE = [f"绳索第{n}章：将麻纤维梳理、纺纱、合股，乃成长绳。\n" * 3 for n in range(30)]
ENGLISH = [prose(number) + "it's the rope-maker's 2nd hall.\n\n\tEnd." for number in range(30)]
CONTENT = tokenizers.train(iter(ENGLISH + CHINESE), vocabulary=450, markers=["<|im_start|>"]).to_str().encode()
MIXED = f"{GIGATOKEN}+{bpe.ALGORITHM}"
OPENED = {name: open_encoder(CONTENT, name) for name in (REFERENCE, GIGATOKEN, bpe.ALGORITHM, MIXED)}
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def column(*texts: str) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.text(), st.sampled_from([*HARD, *ENGLISH, *CHINESE])), max_size=4))
@pytest.mark.parametrize("name", [GIGATOKEN, bpe.ALGORITHM, MIXED])
def test_every_encoder_gives_the_tokens_of_the_reference(name: str, texts: list[str]) -> None:
    for dtype in ("uint16", "uint32"):
        made = OPENED[name].encode(column(*texts), end=3, dtype=dtype)
        right = OPENED[REFERENCE].encode(column(*texts), end=3, dtype=dtype)
        assert made.tokens.dtype == right.tokens.dtype == dtype
        assert made.tokens.tolist() == right.tokens.tolist()
        assert made.lengths.tolist() == right.lengths.tolist()


def test_the_reference_is_what_the_tokenizer_says_with_an_end_behind_each_text() -> None:
    tokenizer = Tokenizer.from_buffer(CONTENT)
    tokenizer.encode_special_tokens = True
    made = OPENED[REFERENCE].encode(column(*ENGLISH, "<|im_start|>"), end=0, dtype="uint16")
    right = [[*tokenizer.encode(text).ids, 0] for text in [*ENGLISH, "<|im_start|>"]]
    assert made.tokens.tolist() == [token for tokens in right for token in tokens]
    assert made.lengths.tolist() == list(map(len, right))


@pytest.mark.parametrize("name", OPENED)
def test_a_slice_of_a_column_is_encoded_alone(name: str) -> None:
    whole = column(*ENGLISH[:3], *CHINESE[:3])
    made = OPENED[name].encode(whole.slice(2, 2), end=0, dtype="uint16")
    right = OPENED[REFERENCE].encode(column(ENGLISH[2], CHINESE[0]), end=0, dtype="uint16")
    assert made.tokens.tolist() == right.tokens.tolist()


def test_an_encoder_that_begins_anew_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "RENEW_BYTES", 1000)
    coder = open_encoder(CONTENT, GIGATOKEN)
    for text in ENGLISH:
        made = coder.encode(column(text), end=0, dtype="uint16")
        assert made.tokens.tolist() == OPENED[REFERENCE].encode(column(text), end=0, dtype="uint16").tokens.tolist()


def test_the_choice_follows_size_and_script() -> None:
    large = encoders.FAST_BYTES
    assert choose(CONTENT, ENGLISH, corpus_bytes=large - 1).algorithm == REFERENCE
    assert choose(CONTENT, ENGLISH, corpus_bytes=large).algorithm == GIGATOKEN
    assert choose(CONTENT, [*ENGLISH, *CHINESE], corpus_bytes=large).algorithm == MIXED


def given_tokenizer(**changes: Any) -> bytes:
    tokenizer = Tokenizer.from_buffer(CONTENT)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer.to_str().encode()


@pytest.mark.parametrize(
    "pieces",
    [
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(GPT4), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        ),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"[a-z]+|."), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]),
    ],
    ids=["gpt4", "unknown-pattern", "prefix-space", "digits"],
)
def test_whatever_is_chosen_for_another_tokenizer_gives_its_tokens(pieces: Any) -> None:
    content = given_tokenizer(pre_tokenizer=pieces)
    choice = choose(content, [*ENGLISH, *CHINESE], corpus_bytes=1 << 30)
    assert bpe.ALGORITHM not in choice.algorithm
    assert "pieces are not those of GPT-2" in choice.refused[bpe.ALGORITHM]
    texts = column(*ENGLISH, *CHINESE, *HARD)
    made = open_encoder(content, choice.algorithm).encode(texts, end=0, dtype="uint16")
    assert made.tokens.tolist() == HuggingFace(content).encode(texts, end=0, dtype="uint16").tokens.tolist()


class Wrong:
    """gigatoken, but for texts with a rare word."""

    def __init__(self, content: bytes) -> None:
        self.algorithm = GIGATOKEN
        self._right = encoders.Gigatoken(content)

    def encode(self, text: pa.LargeStringArray, *, end: int, dtype: Any) -> Encoded:
        made = self._right.encode(text, end=end, dtype=dtype)
        starts = np.cumsum(made.lengths) - made.lengths
        made.tokens[starts[["quipu" in one for one in text.to_pylist()]]] += 1
        return made


def test_an_encoder_that_differs_on_the_sample_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(encoders._ENCODERS, GIGATOKEN, Wrong)
    choice = choose(CONTENT, [*ENGLISH, "a quipu"], corpus_bytes=1 << 30)
    assert choice.algorithm == bpe.ALGORITHM
    assert "gives other tokens than tokenizers" in choice.refused[GIGATOKEN]
    assert "a quipu" in choice.refused[GIGATOKEN]


@settings(deadline=None)
@given(st.lists(st.text(), min_size=1), st.integers(0, 50))
def test_a_stretch_is_a_part_of_the_text(texts: list[str], size: int) -> None:
    found = stretch(column(*texts), size=size)
    assert found in "".join(texts)
    assert len(found.encode()) <= size


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Two sources, one with a word that `Wrong` gets wrong where no sample looks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(encoders, "FAST_BYTES", 0)
    encode.opened.cache_clear()
    for name, texts in {
        "plain": ENGLISH,
        "rare": [f"{prose(n + 50)} quipu {prose(n + 90)}" for n in range(20)],
    }.items():
        Path(f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), "utf-8")
    return Prepare(
        sources=tuple(Source(name=name, paths=(f"{name}.jsonl",)) for name in ("plain", "rare")),
        filter=Filter(),
        tokenizer=TokenizerSettings(vocab_size=400, train_bytes=5000),
        validation_share=0.2,
        workers=1,
        folder="prepared",
    )


def shards(folder: Path) -> dict[str, tuple[str, list[int]]]:
    entries = read_manifest(folder).shards
    opened = {entry.file: Shard(folder / entry.file) for entry in entries}
    return {name: (shard.encoder, shard.tokens.tolist()) for name, shard in opened.items()}


def test_a_corpus_has_the_same_tokens_whoever_encodes_it(corpus: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = prepare(corpus, seed=1)
    monkeypatch.setattr(encoders, "FAST_BYTES", 1 << 40)
    slow = prepare(dataclasses.replace(corpus, folder="other"), seed=1)
    assert (fast.manifest.tokenizer.encoders, slow.manifest.tokenizer.encoders) == ((GIGATOKEN,), (REFERENCE,))
    one, other = shards(fast.folder), shards(slow.folder)
    assert {encoder for encoder, _ in one.values()} == {GIGATOKEN}
    assert {name: tokens for name, (_, tokens) in one.items()} == {name: tokens for name, (_, tokens) in other.items()}


def test_a_difference_met_on_the_way_sends_the_chunk_to_the_reference(
    corpus: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = shards(prepare(corpus, seed=1).folder)
    encode.opened.cache_clear()
    monkeypatch.setitem(encoders._ENCODERS, GIGATOKEN, Wrong)
    monkeypatch.setattr(encode, "SAMPLE_BYTES", 20)
    monkeypatch.setattr(encode, "CHECK_BYTES", 2000)
    made = prepare(dataclasses.replace(corpus, folder="other"), seed=1)
    encode.opened.cache_clear()
    assert REFERENCE in made.manifest.tokenizer.encoders
    assert any("gave other tokens" in warning for warning in made.manifest.warnings)
    assert {name: tokens for name, (_, tokens) in shards(made.folder).items()} == {
        name: tokens for name, (_, tokens) in right.items()
    }
    assert all(encoder in (REFERENCE, GIGATOKEN) for encoder, _ in shards(made.folder).values())
    assert np.any([encoder == REFERENCE for encoder, _ in shards(made.folder).values()])
