"""Origins: the bytes asked for, in few requests, in spite of what a store does wrong in passing."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError, StorageError
from ropewalk.store.items import Item
from ropewalk.store.origin import Origin, Reading, is_url, joined, open_origin

DATA = random.Random(0).randbytes(300_000)
QUICK = Reading(first_wait_s=0.001, attempts=4)


class Store:
    """A server of one file that answers range requests, after the faults it was given."""

    def __init__(self, data: bytes) -> None:
        self.faults: list[str] = []
        self.requests = 0
        self.awake = threading.Event()
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._headers(200, len(data))

            def do_GET(self) -> None:
                store.requests += 1
                fault = store.faults.pop(0) if store.faults else ""
                if self.path != "/file":
                    self._headers(404, 0)
                    return
                if fault.isdigit():
                    self._headers(int(fault), 0)
                    return
                if fault == "hang":
                    store.awake.wait(60)
                asked = self.headers.get("Range")
                if not asked or fault == "no-ranges":
                    self._headers(200, len(data))
                    self.wfile.write(data)
                    return
                first, last = map(int, asked.removeprefix("bytes=").split("-"))
                part = data[first : last + 1]
                if fault == "flip":
                    part = bytes([part[0] ^ 1]) + part[1:]
                if fault == "short":
                    part = part[: len(part) // 2]
                self._headers(206, len(part) + (10 if fault == "cut" else 0))
                self.wfile.write(part)
                self.close_connection = fault == "cut"

            def _headers(self, status: int, length: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(length))
                self.send_header("Accept-Ranges", "bytes")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/file"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(DATA)
    yield store
    store.close()


@pytest.fixture
def local(tmp_path: Path) -> str:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return str(path)


def item(file: str, start: int, stop: int) -> Item:
    return Item(file, start, stop, checksum=xxhash.xxh3_64_intdigest(DATA[start:stop]))


ranges = st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, 5000)), max_size=12).map(
    lambda pairs: [(start, min(len(DATA), start + length)) for start, length in pairs]
)


@settings(max_examples=60, deadline=None)
@given(ranges=ranges, gap=st.sampled_from([0, 100, 50_000]), most=st.sampled_from([1000, 20_000, 1 << 20]))
def test_every_item_gets_its_own_bytes_however_ranges_are_joined(
    ranges: list[tuple[int, int]], gap: int, most: int
) -> None:
    with fsspec.open("memory://ropewalk-origin/file", "wb") as file:
        file.write(DATA)
    items = [item("memory://ropewalk-origin/file", *pair) for pair in ranges]
    origin = Origin(Reading(gap_bytes=gap, request_bytes=most))
    assert [bytes(data) for data in origin.fetch(items)] == [DATA[start:stop] for start, stop in ranges]
    for request in joined(items, Reading(gap_bytes=gap, request_bytes=most)):
        assert request.stop - request.start <= max(most, max(map(len, items)))


def test_local_ranges_are_joined_over_a_page_alone(local: str) -> None:
    items = [item(local, start, start + 100) for start in (0, 4000, 20_000)]
    assert [(request.start, request.stop) for request in joined(items, Reading())] == [(0, 4100), (20_000, 20_100)]


def test_a_local_file_and_a_file_url_give_the_same_bytes(local: str) -> None:
    for file in (local, f"file://{local}"):
        assert [bytes(data) for data in Origin().fetch([item(file, 7, 900), item(file, 0, 5)])] == [
            DATA[7:900],
            DATA[:5],
        ]


def test_neighbours_are_one_request_and_distant_ranges_are_not(store: Store) -> None:
    items = [item(store.url, start, start + 100) for start in (0, 300, 150, 200_000)]
    origin = Origin(Reading(gap_bytes=100))
    assert [bytes(data) for data in origin.fetch(items)] == [DATA[i.start : i.stop] for i in items]
    assert store.requests == origin.stats().requests == 2
    assert origin.stats().bytes == 400 + 100


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("503", "status"), ("429", "status"), ("short", "short"), ("cut", "short"), ("flip", "damaged")],
)
def test_passing_faults_are_retried_and_counted_by_cause(store: Store, fault: str, cause: str) -> None:
    store.faults = [fault, fault]
    origin = Origin(QUICK)
    assert bytes(origin.fetch([item(store.url, 1000, 2000)])[0]) == DATA[1000:2000]
    assert origin.stats().retries == {cause: 2}
    assert origin.stats().failures == 0


def test_a_store_that_hangs_is_asked_again(store: Store) -> None:
    store.faults = ["hang"]
    origin = Origin(Reading(timeout_s=1.0, first_wait_s=0.001))
    assert bytes(origin.fetch([item(store.url, 0, 10)])[0]) == DATA[:10]
    assert set(origin.stats().retries) == {"timeout"}
    store.awake.set()


def test_waits_double_with_jitter_up_to_a_limit(store: Store) -> None:
    store.faults = ["500"] * 5
    waits: list[float] = []
    origin = Origin(Reading(first_wait_s=1, longest_wait_s=4, attempts=6), sleep=waits.append, seed=1)
    origin.fetch([item(store.url, 0, 10)])
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, [1, 2, 4, 4, 4], strict=True))
    assert len(set(waits)) == 5


def test_a_store_that_keeps_failing_is_named_with_the_range_and_the_status(store: Store) -> None:
    store.faults = ["503"] * 4
    origin = Origin(QUICK)
    with pytest.raises(StorageError, match=r"/file: bytes 5 to 15: 4 attempts failed, .*status 503"):
        origin.fetch([item(store.url, 5, 15)])
    assert (origin.stats().retries, origin.stats().failures) == ({"status": 3}, 1)


def test_a_server_without_ranges_is_said_to_be_one(store: Store) -> None:
    store.faults = ["no-ranges"] * 4
    with pytest.raises(StorageError, match="does this server answer range requests"):
        Origin(QUICK).fetch([item(store.url, 5, 15)])


def test_refusals_are_not_retried(store: Store, tmp_path: Path) -> None:
    store.faults = ["403"]
    origin = Origin(QUICK)
    with pytest.raises(DataError, match="check its permissions"):
        origin.fetch([item(store.url, 5, 15)])
    with pytest.raises(DataError, match="no such file"):
        origin.fetch([item(store.url + "-gone", 5, 15)])
    with pytest.raises(DataError, match="no such file"):
        origin.fetch([item(str(tmp_path / "gone"), 5, 15)])
    assert origin.stats().retries == {}


def test_a_damaged_or_shortened_local_file_is_named_at_once(local: str) -> None:
    damaged = Item(local, 5, 15, checksum=1, name="paper-7")
    with pytest.raises(DataError, match=r"bytes 5 to 15 \(document paper-7\): not what was written"):
        Origin(sleep=_never).fetch([damaged])
    with pytest.raises(DataError, match="shorter than when it was written"):
        Origin(sleep=_never).fetch([Item(local, len(DATA) - 5, len(DATA) + 5)])


def test_size_content_and_names_are_those_of_the_store(store: Store, local: str) -> None:
    origin = Origin(QUICK)
    assert origin.size(store.url) == origin.size(local) == len(DATA)
    store.faults = ["500"]
    assert origin.read(store.url) == origin.read(local) == DATA
    for name in ("a/one", "two"):
        with fsspec.open(f"memory://ropewalk-names/{name}", "wb") as file:
            file.write(b"x")
    assert origin.names("memory://ropewalk-names") == ["a/one", "two"]
    assert origin.names(str(Path(local).parent)) == ["file"]


def test_many_threads_get_their_own_bytes(store: Store) -> None:
    origin = Origin(QUICK)
    wrong: list[int] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(10):
            start = draw.randrange(len(DATA) - 1000)
            got = origin.fetch([item(store.url, start, start + 1000), item(store.url, 0, 10)])
            if [bytes(data) for data in got] != [DATA[start : start + 1000], DATA[:10]]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert origin.stats().items == 4 * 10 * 2


def test_an_unknown_kind_of_store_is_named() -> None:
    with pytest.raises(DataError, match=r'"floppy://"'):
        open_origin("floppy://disk/1")


def test_paths_and_urls_are_told_apart() -> None:
    assert is_url("s3://bucket/key")
    assert not is_url("/data/s3")
    assert not is_url("file:///data")


def _never(seconds: float) -> None:
    raise AssertionError("nothing to wait for")
