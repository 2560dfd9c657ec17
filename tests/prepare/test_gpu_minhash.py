"""Keys made on a GPU are those of the CPU kernel, whatever the text; the way they are made is written here in numpy,
position by position, and compared with the CPU kernel everywhere."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import ConfigError
from ropewalk.prepare.config import Near
from ropewalk.prepare.kernels.minhash import hash_functions
from ropewalk.prepare.kernels.words import MARK, START, UNSEGMENTED, characters
from ropewalk.prepare.near import device
from ropewalk.prepare.near.sketch import sketch

NEAR = Near(bands=4, rows=3, shingle_words=3, threshold=0.4)
PIECES = [
    *"abcZ09 .,-_\n\0",
    *("é", "É", "ß", "Ω", "İ", "Ⅷ", "—", "中", "文", "𠀀", "ก", "\u0e31", "\u0301", "\u00ad", "\u200d", "😀"),
    *("aaaaaaaa", "bbbbbbbbbbbbbbbb", "Zeppelin12", "        "),
]
TEXTS = st.lists(st.lists(st.sampled_from(PIECES), max_size=40).map("".join), max_size=8)
MASK = (1 << 64) - 1


def column(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def word_starts(text: str) -> list[int]:
    """Characters at which a word begins: each looks back over marks at one character, and at nothing else."""
    classes = characters().classes

    def bits(character: str) -> int:
        if character < "\x80":
            return START if character.isalnum() else 0
        return int(classes[ord(character)])

    def goes_on(place: int) -> bool:
        while place > 0 and bits(text[place - 1]) & MARK:
            place -= 1
        before = bits(text[place - 1]) if place > 0 else 0
        return bool(before & START and not before & UNSEGMENTED)

    return [
        place
        for place, character in enumerate(text)
        if bits(character) & START
        and not bits(character) & MARK
        and (not goes_on(place) or bits(character) & UNSEGMENTED)
    ]


def word_hash(text: str) -> int:
    """The hash of the word at the beginning of `text`, which holds no other: runs of eight bytes of ASCII, and wide
    characters one by one."""
    classes, folds = characters()
    state, length, place = 0, 0, 0
    while place < len(text):
        character = text[place]
        if character < "\x80":
            if not character.isalnum():
                break
            run = 1
            while run < 8 and place + run < len(text) and text[place + run] < "\x80" and text[place + run].isalnum():
                run += 1
            part, size = int.from_bytes(text[place : place + run].lower().encode(), "little"), run
        else:
            if not int(classes[ord(character)]) & (START | MARK):
                break
            lower = folds[ord(character)] if ord(character) < len(folds) else ord(character)
            part, size = int(lower) | 1 << 63, 1
        state = (state ^ part) * 0x9E3779B97F4A7C15 & MASK
        state ^= state >> 32
        length += size
        place += size
    hashed = (state ^ length) * 0xFF51AFD7ED558CCD & MASK
    return hashed ^ hashed >> 32


def shingle_hashes(words: list[int], width: int) -> list[int]:
    """Polynomials of `width` words each, or one of all of them and their number."""

    def mixed(value: int) -> int:
        value = (value ^ value >> 32) * 0xC4CEB9FE1A85EC53 & MASK
        return (value ^ value >> 32) or 1

    def rolled(some: list[int]) -> int:
        return sum(word * pow(0xD1342543DE82EF95, len(some) - 1 - i, 1 << 64) for i, word in enumerate(some)) & MASK

    if 0 < len(words) < width:
        return [mixed(rolled(words) + len(words) & MASK)]
    return [mixed(rolled(words[i : i + width])) for i in range(len(words) - width + 1)]


def keys_by_positions(text: str, near: Near) -> list[int]:
    starts = word_starts(text)
    words = [word_hash(text[a:b]) for a, b in itertools.pairwise([*starts, len(text)])]
    shingles = np.array(shingle_hashes(words, near.shingle_words), np.uint64).astype(np.uint32)
    if not len(shingles):
        return [0] * near.bands
    flip, factor = hash_functions(near.bands * near.rows)
    signature = ((shingles[:, None] ^ flip) * factor).min(axis=0)
    keys = []
    for band in signature.reshape(near.bands, near.rows):
        key = 0x9E3779B97F4A7C15
        for value in band:
            key = (key ^ int(value)) * 0xFF51AFD7ED558CCD & MASK
            key ^= key >> 32
        keys.append(key or 1)
    return keys


@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_all_positions_at_once_give_the_keys_of_one_pass(texts: list[str]) -> None:
    expected = np.array([keys_by_positions(text, NEAR) for text in texts], np.uint64).reshape(len(texts), NEAR.bands).T
    np.testing.assert_array_equal(sketch(column(texts), NEAR).keys, expected)


def test_a_gpu_is_taken_where_there_is_one_and_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpus", lambda: 1)
    monkeypatch.setattr(device, "_installed", lambda: True)
    assert device.placed(Near(), text_bytes=9_000_000_000, processes=2).device == "cuda"
    assert device.placed(Near(), text_bytes=9_000_000_000, processes=4).device == "cpu"
    assert device.placed(Near(kind="simhash"), text_bytes=9_000_000_000, processes=1).device == "cpu"
    assert device.placed(Near(device="cuda"), text_bytes=1, processes=4).device == "cuda"
    monkeypatch.setattr(device, "gpus", lambda: 0)
    assert device.placed(Near(), text_bytes=9_000_000_000, processes=1).device == "cpu"
    with pytest.raises(ConfigError, match=r"prepare\.deduplicate\.near.*no GPU.*auto"):
        device.placed(Near(device="cuda"), text_bytes=1, processes=1)


def on_gpu(texts: list[str], near: Near) -> None:
    made = sketch(column(texts), dataclasses.replace(near, device="cuda")).keys
    np.testing.assert_array_equal(made, sketch(column(texts), near).keys)


@pytest.mark.gpu
@pytest.mark.skipif(not device.gpus(), reason="no CUDA device")
class TestOnAGpu:
    """Bit by bit the keys of the CPU."""

    @settings(max_examples=100, deadline=None)
    @given(TEXTS)
    def test_any_text(self, texts: list[str]) -> None:
        on_gpu(texts, NEAR)

    @pytest.mark.parametrize("near", [Near(), Near(shingle_words=1), Near(bands=40, rows=4, shingle_words=13)])
    def test_long_and_short_documents_together(self, near: Near) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
        assert files
        texts = [path.read_text("utf-8", errors="replace") for path in files]
        on_gpu(["", *texts, "one word", "".join(texts), "中文" * 5000, "", "\u0301"], near)

    def test_several_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ropewalk.prepare.gpu import minhash

        monkeypatch.setattr(minhash, "BATCH_BYTES", 1000)
        on_gpu([f"document {n} " * (n % 90) for n in range(500)], NEAR)
