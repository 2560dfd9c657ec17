"""Small files come from a mirror when the first store is down, damaged or empty, under the names of the first."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ropewalk.base.errors import DataError, StorageError
from ropewalk.store.items import Item
from ropewalk.store.mirrored import MirroredOrigin
from ropewalk.store.origin import Reading

DEAD = "http://127.0.0.1:9/corpora"
QUICK = Reading(attempts=2, first_wait_s=0.001, timeout_s=5.0)


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    (tmp_path / "mirror" / "one").mkdir(parents=True)
    (tmp_path / "mirror" / "one" / "manifest.json").write_bytes(b"0123456789")
    return tmp_path / "mirror"


def test_a_mirror_answers_for_a_store_that_is_down(mirror: Path, caplog: pytest.LogCaptureFixture) -> None:
    origin = MirroredOrigin([(DEAD, str(mirror))], reading=QUICK)
    file = f"{DEAD}/one/manifest.json"
    with caplog.at_level(logging.WARNING):
        assert origin.read(file) == b"0123456789"
        assert origin.size(file) == 10
        assert origin.names(f"{DEAD}/one") == ["manifest.json"]
        assert origin.names(DEAD) == ["one/manifest.json"]
        found = origin.fetch([Item(file, 3, 5), Item(str(mirror / "one/manifest.json"), 0, 1), Item(file, 0, 2)])
    assert [bytes(data) for data in found] == [b"34", b"0", b"01"]
    assert [record.message.count("a mirror is asked") for record in caplog.records] == [1], "told once"
    # Two attempts, once: from then on the mirror is asked first.
    assert origin.stats().failures == 1


def test_a_file_that_one_store_lacks_comes_from_the_other(mirror: Path, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    origin = MirroredOrigin([(str(tmp_path / "first"), str(mirror))], reading=QUICK)
    assert origin.read(f"{tmp_path}/first/one/manifest.json") == b"0123456789"
    assert origin.names(f"{tmp_path}/first") == ["one/manifest.json"]


def test_what_no_store_gives_is_told_with_all_of_them(mirror: Path, tmp_path: Path) -> None:
    origin = MirroredOrigin([(DEAD, str(mirror))], reading=QUICK)
    with pytest.raises(StorageError, match=r"none of 2 stores gave .*127\.0\.0\.1:9.*mirror/none\.json"):
        origin.read(f"{DEAD}/none.json")
    with pytest.raises(DataError, match=r"elsewhere\.json"):
        origin.read(f"{tmp_path}/elsewhere.json")
    assert origin.names(f"{tmp_path}/elsewhere") == []
