"""The compiled pass against the plain definitions, on texts that are drawn and on those that are hard."""

from __future__ import annotations

import random
import sys
import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import UserError
from ropewalk.prepare.columns import text_buffers
from ropewalk.prepare.kernels.words import hashes_of, word_hashes
from ropewalk.prepare.statistics import MEANINGS, measure
from tests.prepare import slow_statistics as slow

WORDS = (
    *("the", "The", "of", "and", "hemp", "rope", "x", "3.14", "don't", "snake_case", "ÀÉ", "àé", "Straße", "İ", "Ⅷ"),
    *(
        "绳",
        "绳索很长",
        "ひも",
        "カナ",
        "ー",
        "ไทย",
        "ก็",
        "ខ្មែរ",
        "မြန်မာ",
        "한국어",
        "हिन्दी",
        "می‌خواهم",
        "Donau\u00addampf",
    ),
    *("lorem", "ipsum", "JavaScript", "privacy", "policy", "use", "uses", "cookies", "terms"),
    *(
        "#",
        "{",
        "}",
        "...",
        "..",
        ".",
        "!",
        "?!",
        "…",
        "。",
        "！」",
        "؟",
        "।",
        "“",
        "”",
        '."',
        ".)",
        "-",
        "•",
        "*",
        "=>",
    ),
    *("❤️", "👩‍👩‍👧", "1️⃣", "\u0301", "\u200b", "\ufeff", "\x00", "\x1c", "e\u0301", "𠀀", "\U000e0100", "\U0010ffff"),
)
GLUE = (" ", " ", " ", " ", "  ", "\n", "\n\n", "\n \n", "\t", "", "\u3000", "\u2028", "\x0c")


def rows(texts: list[str], **keywords: object) -> list[dict[str, int]]:
    return measure(pa.array(texts, pa.large_string()), **keywords).to_pylist()


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Texts of few words, so that lines, paragraphs and n-grams repeat."""
    chosen = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=6))
    parts = st.tuples(st.sampled_from(chosen), st.sampled_from(GLUE))
    return "".join(word + glue for word, glue in draw(st.lists(parts, max_size=80)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(documents(), st.text(max_size=60)), min_size=1, max_size=4))
def test_every_statistic_equals_its_plain_definition(texts) -> None:
    assert rows(texts) == [slow.measured(text) for text in texts]


HARD = {
    "empty": "",
    "one letter": "a",
    "one space": " ",
    "one line end": "\n",
    "line ends alone": "\n" * 50,
    "blank lines": " \n\t\n \n",
    "no line end": "word " * 500,
    "one long word": "x" * 20_000,
    "one long line": "rope walk " * 5_000,
    "one letter again and again": "a " * 3_000,
    "one Chinese letter": "绳" * 3_000,
    "emoji alone": "👩‍👩‍👧❤️" * 300,
    "marks alone": "\u0301" * 100,
    "stops alone": "." * 100,
    "a document of copies": "one two three four five six seven eight nine ten eleven\n" * 40,
    "paragraphs of copies": "one\ntwo\n\n" * 40 + "one\ntwo",
    "no space at all": "a.b.c,d;e" * 100,
    "carriage returns": "a\r\nb\r\n",
    "all scripts": "".join(WORDS) + " ".join(WORDS),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_texts_are_measured_like_easy_ones(name) -> None:
    assert rows([HARD[name]]) == [slow.measured(HARD[name])]


def test_prose_of_a_thousand_words_is_measured_like_the_rest() -> None:
    drawn = random.Random(0)
    texts = []
    for _ in range(20):
        chosen = drawn.choices(WORDS[:30], k=40)
        texts.append("".join(drawn.choice(chosen) + drawn.choice(GLUE[:8]) for _ in range(1000)))
    assert rows(texts) == [slow.measured(text) for text in texts]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(documents(), st.text(max_size=30)), min_size=1, max_size=6))
def test_words_have_equal_hashes_exactly_when_they_are_equal(texts) -> None:
    hashes, starts = word_hashes(*text_buffers(pa.array(texts, pa.large_string())))
    words = [slow.words_of(text) for text in texts]
    assert np.diff(starts).tolist() == [len(some) for some in words]
    flat = [word for some in words for word in some]
    assert len(set(zip(flat, hashes.tolist(), strict=True))) == len(set(flat)) == len(set(hashes.tolist()))


def test_every_character_has_the_class_that_python_gives_it() -> None:
    planes = (range(0xD800), range(0xE000, 0x34000), range(0xE0000, 0xE0200), range(0x10FFF0, sys.maxunicode + 1))
    every = [chr(code) for plane in planes for code in plane]
    kinds = ["a" + character + "b" for character in every]
    found = [len(words) for words in hashes_of(kinds)]
    for character, number in zip(every, found, strict=True):
        if slow.is_unspaced(character):
            expected = 3
        elif slow.is_start(character) or slow.is_mark(character):
            expected = 1
        else:
            expected = 2
        assert number == expected, unicodedata.name(character, hex(ord(character)))


@pytest.mark.parametrize("mark", [".", "!", "?", "。", "！", "؟", "।", "។", "။", "།", "։", "᠃", "‽"])
def test_marks_of_living_scripts_end_a_sentence(mark) -> None:
    (row,) = rows([f"A b{mark} C d{mark} \n"])
    assert (row["sentences"], row["terminal_lines"]) == (2, 1)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Pi is 3.14 and so on. Yes.", 2),
        ("See www.example.com for more", 1),
        ("e.g. this one. That one.", 2),
        ('He said "go." She went (at last!) home.', 3),
        ("Wait... What?! No", 3),
        ("你好。再见！", 2),
        ("Title\nText\n\n- item", 3),
        ("... ... ...", 0),
    ],
)
def test_sentences_are_counted_as_a_reader_would(text, sentences) -> None:
    assert rows([text])[0]["sentences"] == sentences == sum(map(slow.sentences_of, slow.lines_of(text)))


def test_a_slice_of_a_column_is_measured_as_its_own() -> None:
    texts = pa.array(["one two", "three", "four five six"], pa.large_string())
    assert measure(texts.slice(1)).equals(measure(texts).slice(1))
    assert measure(texts.slice(3)).num_rows == 0


def test_stop_words_may_be_of_any_script_and_of_several_words() -> None:
    (row,) = rows(["我们走吧 It is as well as that"], stop_words=("我们", "As Well As", "absent", "it"))
    assert row["stop_words"] == 3


@pytest.mark.parametrize("stop_words", [("...",), ("1 2 3 4 5 6 7 8 9",), tuple(map(str, range(46)))])
def test_stop_words_that_cannot_be_told_are_refused(stop_words) -> None:
    with pytest.raises(UserError, match="words"):
        rows(["text"], stop_words=stop_words)


def test_bytes_that_are_no_utf8_are_counted_and_lead_nowhere() -> None:
    for tail in (b"\xe7\xbb", b"\xf0\x9f\x98", b"\xff\xff\xff\xff", b"\xc3", b"\xf7\xbf\xbf\xbf"):
        column = pa.array([b"word " + tail], pa.large_binary()).view(pa.large_string())
        assert measure(column)["words"].to_pylist()[0] in (1, 2)


def test_every_column_has_a_meaning() -> None:
    assert list(rows([""])[0]) == list(MEANINGS) == list(slow.measured(""))
