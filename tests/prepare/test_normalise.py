"""Raw bytes -> text, against the plain definition of each rule."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.prepare.normalise import normalise

BYTES = st.one_of(
    st.binary(max_size=12),
    st.lists(
        st.sampled_from([b"\r", b"\n", b" ", b"a", b"\0", b"\xef\xbb\xbf", "绳".encode(), b"\xff"]), max_size=8
    ).map(b"".join),
)


def reference(data: bytes) -> tuple[str, str | None, list[tuple[str, int]]]:
    """(text, rule, edits) of one document, written as plainly as can be."""
    edits = []
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
        edits.append(("byte_order_mark", 3))
    if b"\0" in data:
        return "", "binary", []
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "", "not_utf8", []
    if not text.strip():
        return "", "empty", []
    if "\r" in text:
        edits.append(("newlines", text.count("\r\n")))
    return text.replace("\r\n", "\n").replace("\r", "\n"), None, edits


def rows(documents: list[bytes]) -> list[tuple[str, str | None, list[tuple[str, int]]]]:
    found = normalise(pa.array(documents, pa.large_binary()))
    edits = found.edits.column(len(documents)).to_pylist()
    listed = [[(edit["rule"], edit["bytes"]) for edit in document] for document in edits]
    return list(zip(found.text.to_pylist(), found.rule.to_pylist(), listed, strict=True))


@pytest.mark.parametrize(
    ("data", "text", "rule", "edited"),
    [
        (b"a\r\nb\rc\n", "a\nb\nc\n", None, ["newlines"]),
        (b"\xef\xbb\xbfa", "a", None, ["byte_order_mark"]),
        (b"a\0", "", "binary", []),
        (b"a\xff", "", "not_utf8", []),
        (b"\xed\xa0\x80", "", "not_utf8", []),
        (b"", "", "empty", []),
        (b" \r\n\t", "", "empty", []),
        ("plain ünï".encode(), "plain ünï", None, []),
    ],
)
def test_line_ends_and_marks_are_edited_and_what_is_not_text_is_removed(data, text, rule, edited) -> None:
    ((found, why, edits),) = rows([data])
    assert (found, why, [name for name, _ in edits]) == (text, rule, edited)


@given(st.lists(BYTES, max_size=6))
def test_every_document_ends_as_the_reference_says_whatever_stands_beside_it(documents) -> None:
    assert rows(documents) == [reference(document) for document in documents]


@given(st.lists(BYTES, min_size=3, max_size=6))
def test_a_slice_of_a_column_is_read_as_the_slice(documents) -> None:
    column = pa.array(documents, pa.large_binary()).slice(1, len(documents) - 2)
    assert normalise(column).text.to_pylist() == [reference(document)[0] for document in documents[1:-1]]


def test_white_space_is_what_python_calls_so() -> None:
    every = [chr(code) for code in range(0x3100)]
    found = normalise(pa.array([character.encode() for character in every], pa.large_binary())).rule.to_pylist()
    assert [rule == "empty" for rule in found[1:]] == [not character.strip() for character in every[1:]]
