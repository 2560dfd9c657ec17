"""ZIP and TAR: every member accounted for, and nothing that an archive can do to its reader."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile
import zlib

import pytest
from format_samples import WORDS, jsonl, tarred, zipped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MEMBERS = {
    "a.txt": b"one",
    "deep/b.jsonl": jsonl([{"text": "two"}, {"text": "three"}]),
    "c.md.gz": gzip.compress(b"four"),
    "picture.png": b"\x89PNG",
    ".hidden.txt": b"hidden",
    "__MACOSX/a.txt": b"hidden",
}
FOUND = [
    ("!a.txt", b"one", ""),
    ("!deep/b.jsonl:1", b"two", ""),
    ("!deep/b.jsonl:2", b"three", ""),
    ("!c.md.gz", b"four", ""),
    ("!picture.png", b"", "passed_over"),
    ("!.hidden.txt", b"", "passed_over"),
    ("!__MACOSX/a.txt", b"", "passed_over"),
]
WRITERS = {
    "x.zip": zipped,
    "x.tar": tarred,
    "x.tgz": lambda m: gzip.compress(tarred(m)),
    "x.tar.gz": lambda m: gzip.compress(tarred(m)),
}


def told(records, name: str) -> list[tuple[str, bytes, str]]:
    assert all(record.id.startswith(f"s:{name}") for record in records)
    return [(record.id.removeprefix(f"s:{name}"), record.data, record.fault) for record in records]


@pytest.mark.parametrize("name", WRITERS)
def test_every_member_is_read_as_a_file_of_its_own(read, name) -> None:
    assert told(read(name, WRITERS[name](MEMBERS)), name) == FOUND


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@pytest.mark.filterwarnings("ignore:Duplicate name")
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a.txt", "b.txt", "a.txt!2", "a.txt#2", "a.txt:1", "%.txt", "é.txt"]),
            st.binary(max_size=9),
        )
    )
)
def test_members_of_one_name_have_ids_of_their_own(read, members) -> None:
    for name, write in (("x.zip", _zip_pairs), ("x.tar", _tar_pairs)):
        records = read(name, write(members), format="text")
        assert [record.data for record in records if not record.fault] == [data for _, data in members]
        assert len({record.id for record in records}) == max(1, len(members))


def _zip_pairs(members) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data)
    return sink.getvalue()


def _tar_pairs(members) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in members:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    return sink.getvalue()


@pytest.mark.parametrize("name", ["x.zip", "x.tar"])
@pytest.mark.parametrize("path", ["../up.txt", "/etc/passwd.txt", "a/../../b.txt", "C:\\x.txt", "..\\x.txt"])
def test_a_name_that_leads_out_of_the_archive_is_refused(read, name, path) -> None:
    first, second = read(name, WRITERS[name]({path: b"bad", "good.txt": b"good"}))
    assert (first.fault, first.data) == ("unsafe_path", b"")
    assert second.data == b"good"


def test_links_and_devices_are_refused(read) -> None:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE):
            header = tarfile.TarInfo(f"{kind!r}.txt")
            header.type, header.linkname = kind, "/etc/passwd"
            archive.addfile(header)
    assert [record.fault for record in read("x.tar", sink.getvalue())] == ["link", "link", "not_a_file", "not_a_file"]
    link = zipfile.ZipInfo("link.txt")
    link.external_attr = 0o120777 << 16
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    assert [record.fault for record in read("x.zip", sink.getvalue())] == ["link"]


def test_archives_in_archives_are_opened_up_to_the_limit(read) -> None:
    data = {"a.txt": b"deep"}
    for _ in range(3):
        data = {"in.zip": zipped(data), "out.tar": tarred(data)}
    records = read("x.zip", zipped(data), nesting=3)
    assert {record.fault for record in records} == {"too_nested"}
    assert len(records) == 8
    assert {record.data for record in read("x.zip", zipped(data), nesting=4)} == {b"deep"}
    assert records[0].id == "s:x.zip!in.zip!in.zip!in.zip:rest"


@pytest.mark.parametrize("name", WRITERS)
def test_a_bomb_is_one_fault(read, name, monkeypatch) -> None:
    monkeypatch.setattr("ropewalk.prepare.readers.item.FREE_BYTES", 1_000_000)
    members = {"a.txt": b"before", **{f"{number}.txt": bytes(3_000_000) for number in range(9)}}
    records = read(name, WRITERS[name](members), expansion=10)
    if name == "x.tar":
        assert len(records) == 10  # not packed: as large as what it holds
        return
    assert (records[0].data, records[-1].fault, records[-1].id) == (b"before", "expansion", f"s:{name}:rest")
    assert len(records) <= 3


def test_a_bomb_in_a_bomb_counts_from_the_outside(read, monkeypatch) -> None:
    monkeypatch.setattr("ropewalk.prepare.readers.item.FREE_BYTES", 100_000)
    inner = zipped({f"{number}.txt": bytes(1_000_000) for number in range(20)})
    data = zipped({f"{number}.zip": inner for number in range(20)})
    *_, rest = read("x.zip", data, expansion=100)
    assert (rest.fault, rest.id) == ("expansion", "s:x.zip:rest")
    assert rest.value > rest.threshold


def test_members_that_share_their_bytes_are_stopped(read, monkeypatch) -> None:
    """The bomb of D. Fifield (2019): every name in the directory points to the same packed zeros."""
    monkeypatch.setattr("ropewalk.prepare.readers.item.FREE_BYTES", 1_000_000)
    data = zipped({"a.txt": bytes(900_000)})
    start = data.index(b"PK\x01\x02")
    stop = data.index(b"PK\x05\x06")
    entries = data[start:stop] * 500
    end = bytearray(data[stop:])
    end[8:16] = struct.pack("<HHL", 500, 500, len(entries))
    records = read("x.zip", data[:start] + entries + bytes(end), expansion=10)
    assert sum(len(record.data) for record in records) < 3_000_000
    assert {record.fault for record in records} <= {"", "expansion", "damaged"}
    assert records[-1].fault


def test_a_member_above_the_limit_is_a_fault_and_the_next_one_is_read(read) -> None:
    for name in ("x.zip", "x.tar"):
        first, second = read(name, WRITERS[name]({"a.txt": b"a" * 5000, "b.txt": b"b"}), document_bytes=1000)
        assert (first.fault, first.value, first.id) == ("too_large", 5000, f"s:{name}!a.txt")
        assert second.data == b"b"


def test_a_locked_member_is_a_fault(read) -> None:
    data = bytearray(zipped({"a.txt": b"secret", "b.txt": b"open"}))
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + place] |= 1
    first, second = read("x.zip", bytes(data))
    assert (first.fault, second.data) == ("encrypted", b"open")


def test_a_member_with_a_wrong_checksum_is_a_fault(read) -> None:
    data = zipped({"a.txt": b"one", "b.txt": b"two"})
    checksum = struct.pack("<L", zlib.crc32(b"one"))
    first, second = read("x.zip", data.replace(checksum, b"\0\0\0\0"))
    assert (first.fault, second.data) == ("checksum", b"two")


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_a_truncated_tar_gives_the_members_before_the_cut_and_one_fault(read, ending) -> None:
    data = tarred({f"{number}.txt": f"{WORDS} {number}".encode() * 50 for number in range(40)})
    cut = data[: len(data) // 2]
    name = f"x.{ending}"
    *before, last = read(name, gzip.compress(cut) if ending == "tar.gz" else cut)
    whole = [record.data.decode() for record in before if not record.fault]
    assert whole == [f"{WORDS} {number}" * 50 for number in range(len(whole))]
    assert len(whole) > 15
    assert last.fault == "damaged"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:1024] + b"\xff" * 512 + data[1536:],  # a header in the middle
        lambda data: data + tarred({"lost.txt": b"behind the end"}),
        lambda data: data.rstrip(b"\0") + bytes(512 - len(data.rstrip(b"\0")) % 512),  # without its end
    ],
)
def test_what_the_standard_library_takes_for_the_end_of_a_tar_is_a_fault(read, damage) -> None:
    records = read("x.tar", damage(tarred({"a.txt": b"one", "b.txt": b"two"})))
    assert records[0].data == b"one"
    assert (records[-1].id, records[-1].fault) == ("s:x.tar:rest", "damaged")


@pytest.mark.parametrize("size", [b"\xff" * 12, b"\x80" + b"\xff" * 11])
def test_a_size_below_zero_or_beyond_all_bounds_is_a_fault(read, size) -> None:
    data = bytearray(tarred({"a.txt": b"one"}))
    data[124:136] = size
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    assert {record.fault for record in read("x.tar", bytes(data))} == {"damaged"}


class Pipe(io.BytesIO):
    """A sink that cannot seek: sizes are written behind the members."""

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        raise OSError


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, "streamed"])
def test_a_truncated_zip_gives_the_members_before_the_cut_and_one_fault(read, method) -> None:
    sink = Pipe() if method == "streamed" else io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED if method == "streamed" else method) as archive:
        for number in range(10):
            archive.writestr(f"{number}.txt", f"{WORDS} {number}")
    data = sink.getvalue()
    *before, rest = read("x.zip", data[: data.index(b"PK\x01\x02") - 20])
    assert [record.data.decode() for record in before] == [f"{WORDS} {number}" for number in range(9)]
    assert (rest.id, rest.fault) == ("s:x.zip:rest", "damaged")
