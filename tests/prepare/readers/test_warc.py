"""WARC and WET, against another library's reading of the same files, and where that library is silent."""

from __future__ import annotations

import io
import zlib

import pyarrow as pa
import pytest
from fastwarc.warc import ArchiveIterator, WarcRecordType
from format_samples import HTML, WORDS, gzipped, http_answer, warc, warc_record, wet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PAGE = f"Title\n\nHead\n\n{WORDS}"


def test_pages_are_documents_with_address_and_time_and_requests_are_not(read) -> None:
    for name, data in (("x.warc", b"".join(warc())), ("x.warc.gz", b"".join(map(gzipped, warc())))):
        page, text = read(name, data)
        assert (page.id, page.data.decode(), page.url) == (f"s:{name}:3", PAGE, "https://example.org/")
        assert (text.id, text.data.decode(), text.url) == (f"s:{name}:4", WORDS, "https://example.org/b")
        assert page.time == "2020-02-03T04:05:06Z"


def test_wet_gives_its_texts(read) -> None:
    assert [record.data.decode() for record in read("x.warc.wet.gz", gzipped(wet()))] == [
        f"{WORDS} 0",
        f"{WORDS} 1",
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(bodies=st.lists(st.binary(max_size=200), min_size=1, max_size=8), packed=st.booleans())
def test_blocks_are_those_that_another_library_finds(read, bodies, packed) -> None:
    records = [warc_record(body, kind="conversion", media="text/plain") for body in bodies]
    data = b"".join(gzipped(record) if packed else record for record in records)
    other = ArchiveIterator(io.BytesIO(data), record_types=WarcRecordType.conversion)
    theirs = [record.reader.read() for record in other]
    ours = read("x.wet.gz" if packed else "x.wet", data)
    assert len(ours) == len(theirs) == len(bodies)
    for record, body in zip(ours, theirs, strict=True):
        try:
            assert record.data.decode() == body.decode("utf-8-sig")
        except UnicodeDecodeError:
            assert record.data == body
            assert record.fault == "wrong_encoding" or body[:2] in (b"\xff\xfe", b"\xfe\xff")


def chunked(content: bytes) -> bytes:
    pieces = [content[start : start + 7] for start in range(0, len(content), 7)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def bare_deflate(content: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(content) + packer.flush()


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (chunked(HTML.encode()), {"Transfer-Encoding": "chunked"}),
        (HTML.encode(), {"Transfer-Encoding": "chunked"}),
        (gzipped(HTML.encode()), {"Content-Encoding": "gzip"}),
        (HTML.encode(), {"Content-Encoding": "gzip"}),
        (zlib.compress(HTML.encode()), {"Content-Encoding": "deflate"}),
        (bare_deflate(HTML.encode()), {"Content-Encoding": "deflate"}),
        (pa.compress(HTML.encode(), "brotli", asbytes=True), {"Content-Encoding": "br"}),
        (pa.compress(HTML.encode(), "zstd", asbytes=True), {"Content-Encoding": "zstd"}),
        (chunked(gzipped(HTML.encode())), {"Content-Encoding": "gzip", "Transfer-Encoding": "chunked"}),
        (HTML.encode("utf-16-le"), {"Content-Type": "text/html; charset=utf-16"}),
        (HTML.encode(), {"Content-Type": "application/xhtml+xml"}),
        (HTML.encode(), {"Content-Type": ""}),
    ],
)
def test_a_page_is_read_however_it_was_sent(read, content, headers) -> None:
    (record,) = read("x.warc", warc_record(http_answer(content, headers=headers)))
    assert (record.data.decode(), record.fault) == (PAGE, "")


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (http_answer(b"gone", status=404), "http_status"),
        (http_answer(b"\x89PNG", headers={"Content-Type": "image/png"}), "not_text"),
        (b"nothing like HTTP", "not_http"),
        (http_answer(b"caf\xe9"), "wrong_encoding"),
        (http_answer(gzipped(b"a" * 100)[:-9], headers={"Content-Encoding": "gzip"}), "damaged"),
        (http_answer(gzipped(b"a" * 90_000), headers={"Content-Encoding": "gzip"}), "too_large"),
        (http_answer(b"data", headers={"Content-Encoding": "mystery"}), "unsupported_compression"),
        (http_answer(b"b" * 90_000), "too_large"),
    ],
)
def test_a_page_that_is_none_is_a_fault_and_the_next_one_is_read(read, answer, fault) -> None:
    first, second = read("x.warc", warc_record(answer) + warc()[2], document_bytes=50_000)
    assert (first.fault, first.url) == (fault, "https://example.org/")
    assert second.data.decode() == PAGE


@pytest.mark.parametrize("cut", range(1, 380, 17))
def test_a_truncated_file_is_a_fault_where_another_library_is_silent(read, cut) -> None:
    """Of two pages, the last is cut; its last four bytes are an empty line that means nothing."""
    data = warc()[2] + warc()[2][:-cut]
    assert len(list(ArchiveIterator(io.BytesIO(data)))) <= 2
    first, second = read("x.warc", data)
    assert first.data.decode() == PAGE
    assert (second.id, second.fault) == (("s:x.warc:2", "") if cut <= 4 else ("s:x.warc:rest", "damaged"))


@pytest.mark.parametrize(
    "damage", [b"junk\r\n", b"WARC/1.0\r\nno length: 1\r\n\r\nbody\r\n\r\n", b"WARC/1.0\r\nContent-Length: -1\r\n\r\n"]
)
def test_bytes_that_are_no_record_are_one_fault_and_the_records_behind_are_read(read, damage) -> None:
    records = read("x.warc", warc()[2] + damage + warc()[2])
    assert [record.fault for record in records] == ["", "damaged", ""]
    assert [record.id for record in records] == ["s:x.warc:1", "s:x.warc:2", "s:x.warc:3"]
