"""Parquet: rows, labels, row groups, and files that lie."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_samples import parquet
from planning import planned

from ropewalk.prepare.read import read_records
from ropewalk.prepare.sources import divided

TEXTS = [f"text number {number} " * (number % 7) for number in range(500)]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_every_row_is_a_document(read, kind) -> None:
    records = read("x.parquet", parquet({"text": pa.array(TEXTS).cast(kind), "other": list(range(500))}))
    assert [record.data.decode() for record in records] == TEXTS
    assert [record.id for record in records] == [f"s:x.parquet:{number}" for number in range(1, 501)]


def test_row_groups_read_alone_give_the_documents_of_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(parquet({"text": TEXTS}, row_group_size=60))
    file = planned(path)
    assert len(file.parts) == 9
    assert [record for part in divided([file]) for record in read_records(part)] == list(read_records(file))


def test_labels_come_from_columns_of_any_type_and_from_nested_ones(read) -> None:
    columns = {
        "text": ["a", "b"],
        "meta": [{"url": "https://a.org", "deep": {"licence": "MIT"}}, None],
        "date": pa.array([0, None], pa.timestamp("s")),
    }
    first, second = read("x.parquet", parquet(columns), url_key="meta.url", license_key="meta.deep.licence", time="now")
    assert (first.url, first.time, first.licence) == ("https://a.org", "1970-01-01 00:00:00.000", "MIT")
    assert (second.url, second.time, second.licence) == ("", "now", "")


def test_rows_without_text_are_faults(read) -> None:
    records = read("x.parquet", parquet({"text": ["a", None, "c"]}))
    assert [(record.data, record.fault) for record in records] == [(b"a", ""), (b"", "text_not_string"), (b"c", "")]
    assert [record.fault for record in read("x.parquet", parquet({"text": [1, 2]}))] == ["text_not_string"] * 2
    (record,) = read("x.parquet", parquet({"title": ["a", "b"]}))
    assert (record.id, record.fault) == ("s:x.parquet:1-2", "no_text_key")


def test_text_that_is_no_utf8_goes_on_as_the_bytes_it_is(read) -> None:
    column = pa.array([b"good", b"\xff\xfe"]).view(pa.string())
    assert [record.data for record in read("x.parquet", parquet({"text": column}))] == [b"good", b"\xff\xfe"]


def test_a_damaged_row_group_is_one_fault_and_the_others_are_read(read) -> None:
    data = bytearray(parquet({"text": TEXTS}, row_group_size=100, compression="none", use_dictionary=False))
    group = pq.ParquetFile(io.BytesIO(bytes(data))).metadata.row_group(2).column(0)
    start = group.data_page_offset
    data[start : start + group.total_compressed_size] = b"\xff" * group.total_compressed_size
    records = read("x.parquet", bytes(data))
    assert [record.data.decode() for record in records if not record.fault] == TEXTS[:200] + TEXTS[300:]
    assert [(record.id, record.fault) for record in records if record.fault] == [("s:x.parquet:201-300", "damaged")]


def test_a_file_without_its_footer_is_one_fault(read) -> None:
    (record,) = read("x.parquet", parquet({"text": TEXTS})[:-9])
    assert (record.id, record.fault) == ("s:x.parquet:rest", "damaged")


def test_rows_that_unpack_without_end_are_stopped(read, monkeypatch) -> None:
    """A dictionary of one long text, named by many rows: a few kB that hold 300 GB."""
    monkeypatch.setattr("ropewalk.prepare.readers.item.FREE_BYTES", 10_000_000)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), pa.array(["x" * 3_000_000]))
    data = parquet({"text": column}, store_schema=False, compression="zstd")
    assert len(data) < 100_000
    *before, rest = read("x.parquet", data, memory_bytes=100_000_000)
    assert 2 < len(before) < 20
    assert (rest.fault, rest.id) == ("expansion", "s:x.parquet:rest")


def test_a_row_above_the_limit_is_a_fault(read) -> None:
    records = read("x.parquet", parquet({"text": ["a", "b" * 5000, "c"]}), document_bytes=1000)
    assert [record.fault for record in records] == ["", "too_large", ""]
    assert (records[1].value, records[1].threshold) == (5000, 1000)
