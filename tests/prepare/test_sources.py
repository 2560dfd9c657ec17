"""Which files a recipe means, and what is said about those it cannot mean."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from ropewalk.base.errors import DataError
from ropewalk.prepare.config import Prepare, Source
from ropewalk.prepare.read import read_records
from ropewalk.prepare.sources import collect_files, missing_paths


def one(*paths: str, **options: object) -> Prepare:
    return Prepare(sources=(Source(name="s", paths=paths, **options),))


def names(settings: Prepare) -> list[str]:
    return [file.name for file in collect_files(settings).files]


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.md", "b/1.txt", "b/.hidden.md", "b/.git/x.md", "b/x.bin", "b/lines.jsonl", "a.TXT"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")


def test_folders_globs_and_files_give_each_file_once_in_order_of_name() -> None:
    assert names(one("b/*.md", "b", "a.TXT", "./b/1.txt")) == ["a.TXT", "b/1.txt", "b/2.md", "b/lines.jsonl"]


def test_files_passed_over_in_a_folder_are_reported() -> None:
    (said,) = collect_files(one("b")).passed_over
    assert "passed over in b by their endings: 1 file (" in said
    assert ".bin 1" in said


def test_the_format_decides_what_is_taken_and_how_it_is_read() -> None:
    assert {file.name: file.reader for file in collect_files(one("b")).files}["b/lines.jsonl"] == "jsonl"
    assert names(one("b", format="jsonl")) == ["b/lines.jsonl"]
    assert "b/x.bin" in names(one("b", format="text"))
    assert {file.reader for file in collect_files(one("b", format="text")).files} == {"text"}


def test_every_path_without_a_file_is_found_and_named_with_a_remedy() -> None:
    Path("void").mkdir()
    settings = Prepare(
        sources=(
            Source(name="one", paths=("b", "nowhere.txt")),
            Source(name="two", paths=("*.none", "void", "python:libs")),
        )
    )
    assert missing_paths(settings) == [(0, "nowhere.txt"), (1, "*.none"), (1, "void"), (1, "python:libs")]
    with pytest.raises(DataError) as caught:
        collect_files(settings)
    first, second, third, fourth = str(caught.value).splitlines()
    assert 'source one: "nowhere.txt": no such file' in first
    assert "check the pattern" in second
    assert "holds no file" in third
    assert "`python:stdlib`" in fourth


def test_an_unreadable_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match=r"source s: a.TXT cannot be read: Permission denied; repair"):
        collect_files(one("a.TXT"))


def test_a_folder_that_cannot_be_opened_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("b/locked").mkdir()
    Path("b/locked/x.txt").write_text("{}")
    scandir = os.scandir

    def refuse(path: str | Path = ".") -> object:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for path in ("b", "b/locked", "b/**/*.txt", "b/l*/x.txt"):
        with pytest.raises(DataError, match=r"source s: b/locked/? cannot be read: Permission denied; repair"):
            collect_files(one(path))


def test_linked_folders_are_followed_once_around_and_files_named_as_walked() -> None:
    Path("far/deep").mkdir(parents=True)
    Path("far/deep/x.txt").write_text("{}")
    Path("b/link").symlink_to("../far")
    Path("far/deep/up").symlink_to("..")
    Path("b/again").symlink_to(".")
    Path("b/file.md").symlink_to("../a.TXT")
    taken = ["b/1.txt", "b/2.md", "b/file.md", "b/lines.jsonl", "b/link/deep/x.txt"]
    assert names(one("b")) == taken
    assert [file.location for file in collect_files(one("b")).files] == taken


def test_dangling_links_and_pipes_are_passed_over_and_told() -> None:
    Path("b/gone.txt").symlink_to("nowhere.txt")
    Path("b/loop.txt").symlink_to("loop.txt")
    os.mkfifo("b/pipe.txt")
    for path in ("b", "b/*"):
        found = collect_files(one(path))
        assert [file.name for file in found.files if file.name != "b/x.bin"] == ["b/1.txt", "b/2.md", "b/lines.jsonl"]
        assert found.passed_over[-1] == (
            f"source s: passed over in {path}: 3 names without a file behind "
            "(links that lead nowhere 2, pipes, sockets or devices 1), such as b/gone.txt"
        )
    for path in ("b/pipe.txt", "b/gone.txt"):
        with pytest.raises(DataError, match="neither a file nor a folder, or a link that leads nowhere"):
            collect_files(one(path))


def test_the_standard_library_is_sources_without_installed_packages() -> None:
    found = names(one("python:stdlib"))
    assert {"stdlib/ast.py", "stdlib/asyncio/base_events.py"} <= set(found)
    assert not any("site-packages" in name for name in found)
    assert all((Path(sysconfig.get_path("stdlib")) / name.removeprefix("stdlib/")).exists() for name in found)


def test_python_prose_is_one_document_a_topic_and_one_a_module() -> None:
    files = {file.name: file for file in collect_files(one("python:prose")).files}
    (module,) = read_records(files["docstrings/textwrap.py"])
    text = module.data.decode()
    assert text.startswith("textwrap\n\nText wrapping and filling.")
    assert "\ntextwrap.TextWrapper.fill\n\nfill(text : string) -> string" in text
    topics = {record.id: record.data.decode() for record in read_records(files["topics"])}
    assert '"assert" statement' in topics["s:topics/assert"]
    assert not any("/test/" in name for name in files)


@pytest.mark.parametrize(
    ("name", "packing", "reader"),
    [
        ("a.md", "", "text"),
        ("a.JSONL.GZ", "gzip", "jsonl"),
        ("a.txt.zst", "zstd", "text"),
        ("a.xml.bz2", "bz2", "xml"),
        ("CC-MAIN-1.warc.wet.gz", "gzip", "warc"),
        ("a.tar.gz", "gzip", "tar"),
        ("a.tgz", "gzip", "tar"),
        ("a.zip", "", "zip"),
        ("a.epub", "", "epub"),
        ("a.json", "", "text"),
        ("a.unknown", "", "text"),
        ("noending", "", "text"),
    ],
)
def test_the_ending_decides_how_a_named_file_is_read(name: str, packing: str, reader: str) -> None:
    Path(name).write_bytes(b"x")
    (file,) = collect_files(one(name)).files
    assert (file.packing, file.reader) == (packing, reader)


def test_a_format_takes_its_own_endings_in_a_folder_and_any_file_that_is_named() -> None:
    for name in ("c/a.json", "c/a.jsonl", "c/a.parquet", "c/a.txt", "c/a.zip"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(b"x")
    assert names(one("c", format="chat")) == ["c/a.json", "c/a.jsonl", "c/a.parquet", "c/a.zip"]
    assert names(one("c", format="parquet")) == ["c/a.parquet", "c/a.zip"]
    assert {file.reader for file in collect_files(one("c/*.txt", format="latex")).files} == {"latex"}
    assert {file.reader for file in collect_files(one("c/a.txt", format="chat")).files} == {"jsonl"}


def test_a_name_that_is_no_text_is_told_as_well_as_can_be() -> None:
    Path(os.fsdecode(b"b/caf\xe9.txt")).write_text("coffee")
    assert "b/caf\ufffd.txt" in names(one("b"))
    assert [record.data for file in collect_files(one("b/caf*")).files for record in read_records(file)] == [b"coffee"]


def test_what_a_file_is_follows_what_its_documents_depend_on_and_nothing_else() -> None:
    def identity(**options: object) -> dict[str, object]:
        return collect_files(one("a.TXT", **options)).files[0].identity()

    assert identity() == identity(weight=2.0) == identity()
    assert identity() != identity(license="MIT")
    assert identity() != identity(text_key="body")
    before = identity()
    Path("a.TXT").write_text("other")
    assert identity() != before
