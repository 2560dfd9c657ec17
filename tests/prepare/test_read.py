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
from ropewalk.prepare.documents import Record, batched
from ropewalk.prepare.read import read_records
from ropewalk.prepare.sources import InputFile, collect_files


def planned(path: Path) -> InputFile:
    return collect_files(Prepare(sources=(Source(name="s", paths=(str(path),)),))).files[0]


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line)))
def test_every_line_that_is_not_blank_is_one_record(tmp_path_factory, lines) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    expected = [f"s:{path}:{number}" for number, line in enumerate(lines, 1) if line.strip()]
    records = list(read_records(planned(path)))
    assert [record.id for record in records] == (expected or [f"s:{path}"])
    assert expected or [record.fault for record in records] == ["no_documents"]


@given(st.text(), st.booleans())
def test_a_line_gives_back_its_text(tmp_path_factory, text, escaped) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"text": text}, ensure_ascii=escaped).encode("utf-8")))
    (record,) = read_records(planned(path))
    assert record.data.decode() == text


@given(st.lists(st.binary(max_size=50)), st.integers(1, 500))
def test_batching_keeps_every_record_in_order(data, limit) -> None:
    records = [Record(str(number), "s", "d", item) for number, item in enumerate(data)]
    assert [record for run in batched(records, limit_bytes=limit) for record in run] == records


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
