"""Files cut into documents: nothing is lost, nothing depends on how bytes come, and ids say where a document begins."""

from __future__ import annotations

import gzip
import itertools
import random
import re
import tracemalloc
from collections.abc import Iterable, Iterator

import pytest
from format_samples import epub
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import ConfigError
from ropewalk.config.read import parse
from ropewalk.prepare.config import Prepare, Source
from ropewalk.prepare.readers import split
from ropewalk.prepare.readers.split import pieces
from ropewalk.prepare.trace import file_of

LINE_END = rb"(?:\r\n|\r|\n)"
LINES = st.sampled_from(
    [
        "",
        " ",
        "one",
        "two words here",
        "绳索很长。",
        "# Title",
        "## ",
        "---",
        "===",
        "```",
        "- a",
        "<|end|>",
        "a<|end|>b",
        "%",
        "é" * 30,
    ]
)
ENDS = st.sampled_from(["\n", "\n", "\n\n", "\r\n", "\r"])
TEXTS = st.lists(st.tuples(LINES, ENDS), max_size=30).map(lambda lines: "".join(line + end for line, end in lines))
HOW = st.sampled_from(
    [
        {"split": "blank-lines"},
        {"split": "headings"},
        {"split": "separator", "separator": "---"},
        {"split": "separator", "separator": "<|end|>"},
        {"split": "size", "split_characters": 100},
    ]
)


def source(**how: object) -> Source:
    return Source(name="s", paths=("x.txt",), **how)


def cut(data: bytes, how: dict[str, object], blocks: Iterable[bytes] = ()) -> list[bytes]:
    found = list(pieces(blocks or [data], source(**how), limit=10**9))
    assert all(piece.size == len(piece.data) for piece in found)
    return [piece.data for piece in found]


def blocks_of(data: bytes, sizes: Iterator[int]) -> Iterator[bytes]:
    place = 0
    while place < len(data):
        size = next(sizes)
        yield data[place : place + size]
        place += size


@given(TEXTS)
def test_pieces_of_a_size_are_the_text_and_no_longer_than_asked(text: str) -> None:
    found = cut(text.encode(), {"split": "size", "split_characters": 100})
    assert b"".join(found) == text.encode()
    lengths = [len(piece.decode()) for piece in found]  # which fails when a character is cut
    assert all(25 < length <= 101 for length in lengths[:-1])
    assert not lengths or 0 < lengths[-1] <= 125


@given(st.binary(max_size=600))
def test_bytes_that_are_no_text_are_not_lost_either(data: bytes) -> None:
    for how in ({"split": "size", "split_characters": 100}, {"split": "headings"}):
        assert b"".join(cut(data, how)) == data


@given(TEXTS)
def test_documents_begin_at_headings_and_lose_nothing(text: str) -> None:
    assert b"".join(cut(text.encode(), {"split": "headings"})) == text.encode()


@given(TEXTS)
def test_empty_lines_are_all_that_is_lost_between_paragraphs(text: str) -> None:
    runs = itertools.groupby(text.encode().splitlines(keepends=True), bytes.isspace)
    assert cut(text.encode(), {"split": "blank-lines"}) == [b"".join(run) for blank, run in runs if not blank]


@given(TEXTS)
def test_a_separator_is_all_that_is_lost_between_documents(text: str) -> None:
    parts = re.split(rb"<\|end\|>" + LINE_END + rb"?", text.encode())
    assert cut(text.encode(), {"split": "separator", "separator": "<|end|>"}) == [part for part in parts if part]
    runs = itertools.groupby(text.encode().splitlines(keepends=True), lambda line: line.strip() == b"---")
    assert cut(text.encode(), {"split": "separator", "separator": "---"}) == [
        b"".join(run) for ends, run in runs if not ends
    ]


@settings(deadline=None)
@given(TEXTS, HOW, st.randoms(use_true_random=False), st.sampled_from([5, 1 << 20]))
def test_cuts_do_not_depend_on_how_the_bytes_come(text, how, draw, long_line) -> None:
    data = text.encode()
    whole = list(pieces([data], source(**how), limit=10**9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "LONG_LINE_BYTES", long_line if how["split"] != "headings" else 1 << 20)
        sizes = iter(lambda: draw.randint(1, 9), 0)
        if long_line == 5 and how["split"] in ("blank-lines", "separator") and how.get("separator") != "<|end|>":
            return  # a long line is text even where it is a separator
        assert list(pieces(blocks_of(data, sizes), source(**how), limit=10**9)) == whole


@given(TEXTS, HOW)
def test_every_document_begins_in_the_line_that_its_id_names(text: str, how) -> None:
    lines = re.split(LINE_END, text.encode())
    for piece in pieces([text.encode()], source(**how), limit=10**9):
        first = re.split(LINE_END, piece.data)[0]
        assert first in lines[piece.line - 1]


MARKDOWN = """\
Before all.

# Title
## Subtitle

Text.
# Next
```
# a comment
---
```
Name
----
- item
---
a | b
---|---

=====
Over
=====
text
not a title, the line above is text
---
#hashtag
"""


def test_headings_are_those_of_markdown() -> None:
    found = [piece.splitlines()[0] for piece in cut(MARKDOWN.encode(), {"split": "headings"})]
    assert found == [b"Before all.", b"# Title", b"# Next", b"====="]


def test_an_underlined_line_is_a_heading() -> None:
    text = b"First\n=====\none\n\nSecond\n------\ntwo\n"
    assert cut(text, {"split": "headings"}) == [b"First\n=====\none\n\n", b"Second\n------\ntwo\n"]


def test_a_size_ends_at_a_paragraph_else_a_line_else_a_word_else_a_character() -> None:
    how = {"split": "size", "split_characters": 100}
    ends = {"\n\n": "x" * 70 + "\n\n", "\n": "x" * 70 + "\n", " ": "x" * 70 + " "}
    for first in ends.values():
        assert cut((first + "x" * 20 + "\n" * (first[-2:] == "\n\n") + "绳" * 90).encode(), how)[0] == first.encode()
    assert cut(("绳" * 250).encode(), how) == [("绳" * 100).encode(), ("绳" * 100).encode(), ("绳" * 50).encode()]


def test_ids_name_the_line_and_lead_back_to_the_file(read) -> None:
    text = b"one\n\n\ntwo\nstill two\n\nthree"
    found = read("x.txt", text, split="blank-lines")
    assert [(record.id, record.data) for record in found] == [
        ("s:x.txt:1", b"one\n"),
        ("s:x.txt:4", b"two\nstill two\n"),
        ("s:x.txt:7", b"three"),
    ]
    inline = read("y.txt", b"a<|endoftext|>b\nc<|endoftext|>\nd", split="separator")
    assert [(record.id, record.data) for record in inline] == [
        ("s:y.txt:1", b"a"),
        ("s:y.txt:1.2", b"b\nc"),
        ("s:y.txt:3", b"d"),
    ]
    assert {file_of(record.id) for record in inline} == {"y.txt"}


def test_packed_files_and_other_formats_are_cut_too(read) -> None:
    text = b"one\n\ntwo\n"
    for name, data in (("x.txt.gz", gzip.compress(text)), ("x.html", b"<p>one</p><p>two</p>")):
        found = read(name, data, split="blank-lines")
        assert [(record.id, record.data.strip()) for record in found] == [
            (f"s:{name}:1", b"one"),
            (f"s:{name}:3", b"two"),
        ]
    book = read("x.epub", epub(first=b"<h1>A</h1><p>one</p><p>two</p>"), split="blank-lines")
    assert len(book) > 1
    assert len({record.licence for record in book}) == 1
    assert [record.id for record in read("x.jsonl", b'{"text": "one\\n\\ntwo"}', split="blank-lines")] == [
        "s:x.jsonl:1"
    ]


def test_damage_loses_the_rest_and_a_long_piece_only_itself(read) -> None:
    draw = random.Random(1)
    text = b"\n\n".join(draw.randbytes(100).hex().encode() for _ in range(3000))
    *before, rest = read("x.txt.gz", gzip.compress(text)[:-50_000], split="blank-lines")
    assert (rest.id, rest.fault) == ("s:x.txt.gz:rest", "damaged")
    assert len(before) > 1000
    found = read("y.txt", b"one\n\n" + b"x" * 5000 + b"\n\ntwo", split="blank-lines", document_bytes=1000)
    assert [(record.id, record.fault) for record in found] == [
        ("s:y.txt:1", ""),
        ("s:y.txt:3", "too_large"),
        ("s:y.txt:5", ""),
    ]
    assert (found[1].value, found[1].threshold, len(found[1].data)) == (5001, 1000, 1000)


@pytest.mark.parametrize("how", ["blank-lines", "size", "separator"])
def test_memory_does_not_grow_with_the_file(how: str) -> None:
    block = b"a line of some words\n" * 3000 + b"\n<|endoftext|>"
    tracemalloc.start()
    for _ in pieces(itertools.repeat(block, 30), source(split=how), limit=1_000_000):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * len(block)  # of 30


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ('format = "jsonl"\nsplit = "size"', '`sources.0.split`: files of format "jsonl" hold several documents'),
        ('split = "separator"\nseparator = " "', "`sources.0.separator`: it is empty"),
        (
            'split = "separator"\nseparator = "\\n\\n"',
            '`sources.0.separator`: it lies within one line; `split = "blank-lines"`',
        ),
        ('split = "paragraphs"', "blank-lines"),
    ],
)
def test_what_cannot_be_cut_is_told(setting: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Prepare, f'[[sources]]\nname = "a"\npaths = ["a"]\n{setting}\n', "x.toml")
    assert problem in str(caught.value)
