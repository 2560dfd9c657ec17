"""JSON lines, packed and not, whole and in parts."""

from __future__ import annotations

import bz2
import gzip
import json
import random
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning import planned

from ropewalk.prepare import fingerprint
from ropewalk.prepare.config import Limits
from ropewalk.prepare.read import read_records
from ropewalk.prepare.sources import divided

_DRAW = random.Random(1)
LINES = b"".join(json.dumps({"text": _DRAW.randbytes(100).hex()}).encode() + b"\n" for _ in range(3000))
PACKED = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress, "bz2": bz2.compress}


@pytest.mark.parametrize("ending", PACKED)
def test_packed_lines_give_the_documents_of_plain_ones(read, ending) -> None:
    plain = [record.data for record in read("x.jsonl", LINES)]
    assert [record.data for record in read(f"x.jsonl.{ending}", PACKED[ending](LINES))] == plain
    twice = [record.data for record in read(f"x.jsonl.{ending}", PACKED[ending](LINES) * 2)]
    assert twice == plain + plain


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize("cut", [0.5, 0.9, 0.999])
def test_a_truncated_file_gives_the_documents_before_the_cut_and_one_fault(read, ending, cut) -> None:
    packed = PACKED[ending](LINES)
    *before, rest = read(f"x.jsonl.{ending}", packed[: int(len(packed) * cut)])
    assert (rest.id, rest.fault) == (f"s:x.jsonl.{ending}:rest", "damaged")
    assert [record.id for record in before] == [f"s:x.jsonl.{ending}:{number}" for number in range(1, len(before) + 1)]
    assert not any(record.fault for record in before)
    # bzip2 has blocks of 900 kB, which this file does not fill; the others must give what they have.
    assert ending == "bz2" or len(before) > 3000 * cut * 0.6


def test_junk_behind_a_whole_gzip_file_loses_no_document(read) -> None:
    *before, rest = read("x.jsonl.gz", gzip.compress(LINES) + b"junk")
    assert (len(before), rest.fault) == (3000, "damaged")


def test_a_file_that_is_not_what_its_ending_says_is_one_fault(read) -> None:
    for ending in PACKED:
        (record,) = read(f"x.jsonl.{ending}", b"nothing like it at all" * 100)
        assert record.fault == "damaged"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lines=st.lists(st.sampled_from([b"", b" ", b'{"text": "abc"}', b"[", b"x" * 90, b"\xff\xfe"])),
    size=st.integers(1, 60),
)
def test_parts_give_the_documents_of_the_whole(tmp_path: Path, monkeypatch, lines, size) -> None:
    monkeypatch.setattr(fingerprint, "PART_BYTES", size)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    file = planned(path)
    parts = list(divided([file]))
    assert sum(part.bytes for part in parts) == file.bytes
    assert [record for part in parts for record in read_records(part)] == list(read_records(file))


def test_there_are_no_more_parts_than_asked_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(fingerprint, "PART_BYTES", 100)
    monkeypatch.setattr(fingerprint, "MOST_PARTS", 7)
    path = tmp_path / "x.jsonl"
    path.write_bytes(LINES)
    file = planned(path)
    assert 3 < len(file.parts) <= 7
    assert [record for part in divided([file]) for record in read_records(part)] == list(read_records(file))


def test_a_gigantic_line_is_one_fault_and_is_never_held(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text": "before"}\n')
        file.truncate(300_000_000)  # a hole: zeros that take no room
        file.seek(0, 2)
        file.write(b'\n{"text": "behind"}\n')
    tracemalloc.start()
    records = list(read_records(planned(path, limits=Limits(document_bytes=1_000_000))))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000
    assert [(record.data, record.fault) for record in (records[0], records[2])] == [(b"before", ""), (b"behind", "")]
    assert (records[1].fault, records[1].value, records[1].threshold) == ("too_large", 300_000_000 - 19, 1_000_000)
    assert len(records[1].data) <= 1000


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"[" * 100_000, "too_deep"),
        (b'{"a":' * 100_000, "too_deep"),
        (b'{"text": "\xff"}', "not_utf8"),
        (b"{broken", "not_json"),
        (b'{"text": ' + b"9" * 10_000 + b"}", "not_json"),
        (b'"text"', "not_object"),
        (b'{"title": "a"}', "no_text_key"),
        (b'{"text": 5}', "text_not_string"),
    ],
)
def test_a_hostile_line_is_a_fault_and_the_next_one_is_read(read, line, fault) -> None:
    first, second = read("x.jsonl", line + b'\n{"text": "next"}')
    assert (first.fault, first.data) == (fault, line)
    assert second.data == b"next"


def test_labels_are_found_under_their_keys_and_stand_in_for_what_is_missing(read) -> None:
    rows = [
        {"body": {"text": "a"}, "meta": {"url": "https://a.org", "when": 1999}, "rights": "MIT"},
        {"body": {"text": "b"}, "meta": {"url": ["not", "text"]}},
        {"body.text": "c", "meta": None},
    ]
    keys = {"text_key": "body.text", "url_key": "meta.url", "time_key": "meta.when", "license_key": "rights"}
    data = "\n".join(map(json.dumps, rows)).encode()
    records = read("x.jsonl", data, **keys, time="2001", license="unknown")
    assert [(record.data, record.url, record.time, record.licence) for record in records] == [
        (b"a", "https://a.org", "1999", "MIT"),
        (b"b", "", "2001", "unknown"),
        (b"c", "", "2001", "unknown"),
    ]


def test_the_same_input_gives_the_same_records(read) -> None:
    data = LINES + b"\n\xff\n{" + LINES[:1000]
    assert read("x.jsonl", data) == read("x.jsonl", data)
