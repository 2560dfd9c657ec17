"""Remembered checksums: never a wrong one, and no second reading of what was not touched."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash

from ropewalk.base.errors import DataError
from ropewalk.prepare import checksums, fingerprint
from ropewalk.prepare.checksums import Checksums


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(checksums, "SETTLED_NS", -(10**18))  # every file counts as settled
    path = tmp_path / "x.txt"
    path.write_text("before")
    return path


def remembered(folder: Path) -> Checksums:
    return Checksums(folder / "checksums" / "all.arrow")


def test_an_untouched_file_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = remembered(file.parent)
    found = first.of(file)
    first.save()
    assert found.checksum == xxhash.xxh3_128_hexdigest(b"before")
    monkeypatch.setattr("builtins.open", None)
    assert remembered(file.parent).of(file) == found


@pytest.mark.parametrize("times", ["kept", "new"])
def test_a_file_that_changed_is_read_again_even_when_its_times_are_set_back(file: Path, times: str) -> None:
    first = remembered(file.parent)
    first.of(file)
    first.save()
    status = file.stat()
    time.sleep(0.02)
    file.write_text("after!")
    if times == "kept":
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert remembered(file.parent).of(file).checksum == xxhash.xxh3_128_hexdigest(b"after!")


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("fresh")
    first = remembered(tmp_path)
    first.of(path)
    first.save()
    assert not (tmp_path / "checksums").exists()


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises((DataError, IsADirectoryError)):
        Checksums().of(tmp_path)


def test_the_parts_of_a_file_of_lines_are_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "PART_BYTES", 10)
    file.write_text("line\n" * 20)
    first = remembered(file.parent)
    found = first.of(file, lines=True)
    first.save()
    assert len(found.parts) == 10
    monkeypatch.setattr("builtins.open", None)
    assert remembered(file.parent).of(file, lines=True) == found


def test_a_name_that_is_no_text_is_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = Path(os.fsdecode(os.fsencode(file.parent) + b"/inv\xff\xfename.txt"))
    file.rename(named)
    first = remembered(file.parent)
    found = first.of(named)
    first.save()
    monkeypatch.setattr("builtins.open", None)
    assert remembered(file.parent).of(named) == found


def test_what_an_earlier_version_has_written_is_still_known(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = checksums._SCHEMA
    with monkeypatch.context() as earlier:
        earlier.setattr(checksums, "_SCHEMA", schema.set(0, pa.field("location", pa.string())))
        first = remembered(file.parent)
        found = first.of(file)
        first.save()
    another = file.with_name("y.txt")
    another.write_text("y")
    second = remembered(file.parent)
    second.of(another)
    second.save()
    monkeypatch.setattr("builtins.open", None)
    assert remembered(file.parent).of(file) == found
