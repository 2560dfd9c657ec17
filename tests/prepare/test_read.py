"""Hostile files: each becomes a counted record or a named error, never a crash and never a gap."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.prepare.config import Prepare, Source
from ropewalk.prepare.documents import Record, batched, raw_batch
from ropewalk.prepare.normalise import normalise
from ropewalk.prepare.read import read_records
from ropewalk.prepare.sources import InputFile, collect_files


def planned(path: Path) -> InputFile:
    return collect_files(Prepare(sources=(Source(name="s", paths=(str(path),)),))).files[0]


def cleaned(data: bytes) -> tuple[list[str], list[str], list[str]]:
    passed = normalise(raw_batch([Record("id", "s", "d", data)]))
    return (
        passed.batch["text"].to_pylist(),
        [removal.rule for removal in passed.removed],
        [edit.rule for edit in passed.edited],
    )


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line)))
def test_every_line_that_is_not_blank_is_one_record(tmp_path_factory, lines) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    expected = [number for number, line in enumerate(lines, 1) if line.strip()]
    assert [int(record.id.rsplit(":", 1)[1]) for record in read_records(planned(path))] == expected


@given(st.text(), st.booleans())
def test_a_line_gives_back_its_text(tmp_path_factory, text, escaped) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"text": text}, ensure_ascii=escaped).encode("utf-8")))
    (record,) = read_records(planned(path))
    assert record.data.decode() == text


@pytest.mark.parametrize(
    ("data", "texts", "removed", "edited"),
    [
        (b"a\r\nb\rc\n", ["a\nb\nc\n"], [], ["newlines"]),
        (b"\xef\xbb\xbfa", ["a"], [], ["byte_order_mark"]),
        (b"a\0", [], ["binary"], []),
        (b"a\xff", [], ["not_utf8"], []),
        (b"\xed\xa0\x80", [], ["not_utf8"], []),
        (b"", [], ["empty"], []),
        (b" \r\n\t", [], ["empty"], []),
        ("plain ünï".encode(), ["plain ünï"], [], []),
    ],
)
def test_normalise_edits_line_ends_and_removes_what_is_not_text(data, texts, removed, edited) -> None:
    assert cleaned(data) == (texts, removed, edited)


@given(st.binary())
def test_any_bytes_are_either_text_or_removed(data) -> None:
    texts, removed, _ = cleaned(data)
    assert len(texts) + len(removed) == 1
    assert all("\r" not in text and text.strip() for text in texts)


@given(st.lists(st.binary(max_size=50)), st.integers(1, 500))
def test_batching_keeps_every_record_in_order(data, limit) -> None:
    records = [Record(str(number), "s", "d", item) for number, item in enumerate(data)]
    assert [record for run in batched(records, limit_bytes=limit) for record in run] == records


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"nothing like gzip"])
def test_a_damaged_gzip_file_is_an_error_that_names_it(tmp_path: Path, damage) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b'{"text": "a"}\n' * 1000)))
    with pytest.raises(DataError, match=r"x.jsonl.gz is a damaged gzip file"):
        list(read_records(planned(path)))


def test_a_file_that_changes_after_it_was_hashed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("before")
    file = planned(path)
    path.write_text("after!")
    os.utime(path, ns=(0, 0))
    with pytest.raises(DataError, match="changed while it was being read"):
        list(read_records(file))


def test_a_file_that_vanishes_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("before")
    file = planned(path)
    path.unlink()
    with pytest.raises(DataError, match=r"x.txt cannot be read: No such file"):
        list(read_records(file))
