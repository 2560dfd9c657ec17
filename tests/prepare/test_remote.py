"""Files behind URLs: the same documents as from a local file, whatever the store can do."""

from __future__ import annotations

import contextlib
import functools
import gzip
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ropewalk.base.errors import DataError, MissingPackage
from ropewalk.prepare import fingerprint
from ropewalk.prepare.config import Prepare, Source
from ropewalk.prepare.read import read_records
from ropewalk.prepare.sources import collect_files, divided, missing_paths

ROWS = [{"text": f"document {number} " * 30} for number in range(200)]


class Whole(http.server.SimpleHTTPRequestHandler):
    """Python's own server: whole files only, folders as pages of links."""

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Ranges(Whole):
    """A server that gives parts of files, as most do."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if not asked or not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()
        piece = data[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(piece) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        self.wfile.write(piece)


@contextlib.contextmanager
def served(folder: Path, handler: type[Whole]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def files_of(*paths: str, **settings: object):
    return collect_files(Prepare(sources=(Source(name="s", paths=paths, **settings),))).files


def documents(files) -> list[tuple[bytes, str]]:
    return [(record.data, record.fault) for file in files for record in read_records(file)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": [row["text"] for row in ROWS]}), tmp_path / "c.parquet", row_group_size=50)
    (tmp_path / "deep" / "d.txt").write_text("plain")
    (tmp_path / "e.bin").write_bytes(b"\0")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "f.txt").write_text("hidden")
    return tmp_path


@pytest.fixture
def memory(folder: Path) -> Iterator[str]:
    store = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            store.pipe(f"/corpus/{path.relative_to(folder).as_posix()}", path.read_bytes())
    yield "memory:///corpus"
    store.rm("/corpus", recursive=True)


def test_a_folder_in_a_store_gives_the_documents_of_the_local_one(folder: Path, memory: str) -> None:
    local, remote = files_of(str(folder)), files_of(memory)
    assert [file.name for file in remote] == [
        f"memory:///corpus/{name}" for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "deep/d.txt")
    ]
    assert [file.checksum for file in remote] == [file.checksum for file in local]
    assert documents(remote) == documents(local)


def test_globs_and_single_files_work_in_a_store(memory: str) -> None:
    assert [file.name for file in files_of(f"{memory}/*.jsonl*")] == [f"{memory}/a.jsonl", f"{memory}/b.jsonl.gz"]
    assert [file.name for file in files_of(f"{memory}/e.bin")] == [f"{memory}/e.bin"]
    missing = Prepare(sources=(Source(name="s", paths=(f"{memory}/none.txt",)),))
    assert missing_paths(missing) == [(0, f"{memory}/none.txt")]
    with pytest.raises(DataError, match=r"none.txt.*check the address"):
        collect_files(missing)


def test_files_passed_over_in_a_store_are_reported(memory: str) -> None:
    (said,) = collect_files(Prepare(sources=(Source(name="s", paths=(memory,)),))).passed_over
    assert ".bin 1" in said


@pytest.mark.parametrize("handler", [Whole, Ranges])
def test_http_gives_the_documents_of_the_local_files(folder: Path, handler, monkeypatch) -> None:
    monkeypatch.setattr(fingerprint, "PART_BYTES", 10_000)
    names = ("a.jsonl", "b.jsonl.gz", "c.parquet", "deep/d.txt")
    local = files_of(*(str(folder / name) for name in names))
    with served(folder, handler) as address:
        remote = files_of(*(f"{address}/{name}" for name in names))
        assert [file.checksum for file in remote] == [file.checksum for file in local]
        assert documents(remote) == documents(local)
        assert documents(divided(remote)) == documents(local)
        # Only a server that gives parts of files is asked for them.
        parts = len(list(divided(remote)))
    assert parts == (len(list(divided(local))) if handler is Ranges else 4)


def test_a_page_of_links_is_a_folder(folder: Path) -> None:
    with served(folder, Whole) as address:
        found = [file.name for file in files_of(f"{address}/")]
    assert [name.removeprefix(address) for name in found] == ["/a.jsonl", "/b.jsonl.gz", "/c.parquet", "/deep/d.txt"]


def test_a_file_that_changes_in_its_store_is_an_error(memory: str) -> None:
    (file,) = files_of(f"{memory}/deep/d.txt")
    fsspec.filesystem("memory").pipe("/corpus/deep/d.txt", b"changed")
    with pytest.raises(DataError, match="changed while it was being read"):
        documents([file])


def test_a_store_that_does_not_answer_is_an_error_and_not_a_fault_of_a_document(folder: Path) -> None:
    with served(folder, Whole) as address:
        files = files_of(f"{address}/a.jsonl", f"{address}/b.jsonl.gz")
    for file in files:
        with pytest.raises(DataError, match=r"source s: http.* cannot be read: .*"):
            documents([file])


@pytest.mark.parametrize(
    ("package", "error", "remedy"),
    [("s3fs", MissingPackage, r"pip install -e '\.\[remote\]'"), ("gcsfs", DataError, "pip install gcsfs")],
)
def test_a_store_whose_library_is_missing_says_what_to_install(monkeypatch, package, error, remedy) -> None:
    def fail(url: str) -> None:
        raise ImportError("told") from ModuleNotFoundError(name=package)

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    with pytest.raises(error, match=f"reading s3://bucket/x.txt needs the package `{package}`.*{remedy}"):
        files_of("s3://bucket/x.txt")
