"""Where bytes come from first: local files, or any store that fsspec knows, read by ranges.

Ranges of one file that lie near each other become one request, because a request to a store costs what hundreds of
kilobytes cost (20 ms at 100 MB/s are 2 MB). What a store does wrong in passing (5xx, a timeout, too few bytes, bytes
that do not have their checksum) is asked for again after a while, counted by its cause; what it says for good (no such
file, no permission) is an error at once.
"""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ropewalk.base.errors import DataError, MissingPackage, StorageError
from ropewalk.base.files import check_regular, read_regular

from .items import Item

_EXTRA = ("aiohttp", "s3fs")
"""Packages that the extra `remote` brings."""
_SCHEME_MARK = "://"
_PAGE_BYTES = 4096
_PASSING_STATUS = (408, 425, 429)
"""Answers below 500 that mean «later», not «no»."""


def is_url(place: str) -> bool:
    """Whether `place` is behind fsspec rather than a local path."""
    return _SCHEME_MARK in place and not place.startswith("file://")


def is_inside(name: str) -> bool:
    """Whether `name`, relative to a folder or URL, stays below it."""
    parts = name.split("/")
    return "\0" not in name and not is_url(name) and all(part not in ("", "..") for part in parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How an origin is asked."""

    gap_bytes: int = 1 << 16
    """Ranges of a remote file at most this far apart are read together; what lies between is thrown away. Local ranges
    are joined over a page of 4 KiB: a call costs 2 us, as much as copying that."""
    request_bytes: int = 16 << 20
    """Largest request that joining makes; one longer item is still one request."""
    attempts: int = 5
    """How often a range is asked for before it is an error."""
    first_wait_s: float = 0.1
    """Longest wait before the second attempt; doubles with each. The wait is drawn evenly between half of it and it,
    so that many readers do not come back in one instant."""
    longest_wait_s: float = 10.0
    """Where doubling ends."""
    timeout_s: float = 60.0
    """Time one round of requests may take, in stores whose requests can be given up (HTTP, S3, GCS)."""


@dataclass(slots=True)
class Stats:
    """What an origin has done since it was opened."""

    items: int = 0
    requests: int = 0
    bytes: int = 0
    """Received, with the gaps."""
    retries: dict[str, int] = field(default_factory=dict)
    """Ranges asked for again, by cause: `status`, `timeout`, `short`, `damaged`, `connection`."""
    failures: int = 0
    """Ranges given up."""
    seconds: float = 0.0
    """Spent in requests, over all threads."""


@dataclass(frozen=True, slots=True)
class _Request:
    """Items of one file that are read together."""

    file: str
    start: int
    stop: int
    places: tuple[int, ...]
    """Numbers of the items that it serves."""


class Origin:
    """A `Fetch` of local paths and URLs. Safe to call from several threads; `sleep` and `seed` are for tests."""

    def __init__(
        self, reading: Reading | None = None, *, sleep: Callable[[float], None] = time.sleep, seed: int | None = None
    ) -> None:
        self._reading = reading or Reading()
        self._sleep = sleep
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._stats = Stats()

    def fetch(self, items: Sequence[Item]) -> list[bytes | memoryview]:
        """The bytes of each item in the order asked, checked. DataError for what is not there or not what was written,
        StorageError for a store that does not answer."""
        found: list[bytes | memoryview | None] = [None if len(item) else b"" for item in items]
        requests = joined(items, self._reading)
        attempt = 1
        while requests:
            answers = self._ask(requests)
            again: list[_Request] = []
            for request, answer in zip(requests, answers, strict=True):
                trouble = self._distribute(request, answer, items, found)
                if trouble is None:
                    continue
                if attempt >= self._reading.attempts:
                    self._count_failure()
                    raise _given_up(request.file, request.start, request.stop, trouble, attempt)
                self._count_retry(trouble)
                again.append(request)
            requests = again
            if requests:
                self._wait(attempt)
                attempt += 1
        with self._lock:
            self._stats.items += len(items)
        return [data for data in found if data is not None]

    def size(self, file: str) -> int:
        """Bytes in `file`."""
        if not is_url(file):
            try:
                return check_regular(Path(local_path(file))).st_size
            except OSError as error:
                raise _refused(file, error) from None
        size = self._patiently(file, lambda: _filesystem(file).size(_inside(file)))
        if size is None:
            raise DataError(f"{file}: its store does not say how long it is; copy the file to one that does")
        return int(size)

    def read(self, file: str) -> bytes:
        """The whole of a small file, such as an index."""
        if not is_url(file):
            try:
                return read_regular(Path(local_path(file)))
            except OSError as error:
                raise _refused(file, error) from None
        return bytes(self._patiently(file, lambda: _filesystem(file).cat_file(_inside(file))))

    def names(self, folder: str) -> list[str]:
        """Names of all files below `folder`, relative to it, sorted; none when there is no such folder."""
        if not is_url(folder):
            root = local_path(folder)
            return sorted(
                os.path.relpath(os.path.join(parent, name), root)
                for parent, _, names in os.walk(root)
                for name in names
            )
        root = _inside(folder).rstrip("/")
        found = self._patiently(folder, lambda: _filesystem(folder).find(root))
        return sorted(name[len(root) :].lstrip("/") for name in found if name.startswith(root))

    def stats(self) -> Stats:
        """A copy of the counts."""
        with self._lock:
            return dataclasses.replace(self._stats, retries=dict(self._stats.retries))

    def close(self) -> None:
        """Nothing is held: files are opened for a request, connections belong to fsspec."""

    def _ask(self, requests: list[_Request]) -> list[bytes | Exception]:
        """One round: the bytes, or what went wrong, of each request."""
        began = time.perf_counter()
        answers: list[bytes | Exception] = [b""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            scheme = urlsplit(request.file).scheme if is_url(request.file) else request.file
            groups.setdefault(scheme, []).append(number)
        for numbers in groups.values():
            asked = [requests[number] for number in numbers]
            got = (_read_remote if is_url(asked[0].file) else _read_local)(asked, self._reading.timeout_s)
            for number, answer in zip(numbers, got, strict=True):
                answers[number] = answer
        with self._lock:
            self._stats.requests += len(requests)
            self._stats.bytes += sum(len(answer) for answer in answers if isinstance(answer, bytes))
            self._stats.seconds += time.perf_counter() - began
        return answers

    def _distribute(
        self,
        request: _Request,
        answer: bytes | Exception,
        items: Sequence[Item],
        found: list[bytes | memoryview | None],
    ) -> Exception | None:
        """Hands the answer to its items; returns trouble that may pass, raises what will not."""
        if isinstance(answer, Exception):
            if not _may_pass(answer):
                self._count_failure()
                raise _refused(request.file, answer)
            return answer
        wanted = request.stop - request.start
        if len(answer) != wanted:
            short = _Short(f"{len(answer)} bytes came instead of {wanted}" + _ranges_hint(len(answer), wanted))
            if not is_url(request.file):
                self._count_failure()
                raise _given_up(request.file, request.start, request.stop, short, 1)
            return short
        view = memoryview(answer)
        for place in request.places:
            item = items[place]
            data = answer if len(item) == wanted else view[item.start - request.start : item.stop - request.start]
            try:
                found[place] = item.checked(data)
            except DataError as error:
                # A local disk gives the same bytes again; a network may have changed them on the way.
                if not is_url(item.file):
                    self._count_failure()
                    raise
                return error
        return None

    def _patiently(self, file: str, ask: Callable[[], Any]) -> Any:
        """What `ask` returns, asked again while its trouble may pass."""
        attempt = 1
        while True:
            try:
                return ask()
            except Exception as error:
                if not _may_pass(error):
                    raise _refused(file, error) from None
                if attempt >= self._reading.attempts:
                    self._count_failure()
                    raise _given_up(file, None, None, error, attempt) from None
                self._count_retry(error)
            self._wait(attempt)
            attempt += 1

    def _wait(self, attempt: int) -> None:
        longest = min(self._reading.first_wait_s * 2 ** (attempt - 1), self._reading.longest_wait_s)
        with self._lock:
            drawn = self._random.uniform(longest / 2, longest)
        self._sleep(drawn)

    def _count_retry(self, trouble: Exception) -> None:
        cause = _cause(trouble)
        with self._lock:
            self._stats.retries[cause] = self._stats.retries.get(cause, 0) + 1

    def _count_failure(self) -> None:
        with self._lock:
            self._stats.failures += 1


def open_origin(place: str = "", *, reading: Reading | None = None) -> Origin:
    """An origin; when `place` is given, what its URL needs is known to be installed."""
    if is_url(place):
        _filesystem(place)
    return Origin(reading)


def joined(items: Sequence[Item], reading: Reading) -> list[_Request]:
    """The requests that read `items`: sorted by file and place, neighbours together; empty items need none."""
    requests: list[_Request] = []
    needed = [number for number, item in enumerate(items) if len(item)]
    for place in sorted(needed, key=lambda n: (items[n].file, items[n].start, items[n].stop)):
        item = items[place]
        last = requests[-1] if requests else None
        gap = reading.gap_bytes if is_url(item.file) else min(reading.gap_bytes, _PAGE_BYTES)
        if (
            last
            and last.file == item.file
            and item.start - last.stop <= gap
            and max(last.stop, item.stop) - last.start <= reading.request_bytes
        ):
            stop = max(last.stop, item.stop)
            requests[-1] = _Request(last.file, last.start, stop, (*last.places, place))
        else:
            requests.append(_Request(item.file, item.start, item.stop, (place,)))
    return requests


def local_path(file: str) -> str:
    """The path of a local file, also when it is written as `file://`."""
    return file.removeprefix("file://")


def _read_local(requests: Sequence[_Request], timeout_s: float) -> list[bytes | Exception]:
    """Requests of one local file; `timeout_s` is for stores that can be given up, a disk cannot."""
    try:
        # A pipe in place of the file is not waited for: it cannot be read at an offset.
        descriptor = os.open(local_path(requests[0].file), os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return [error] * len(requests)
    try:
        return [_pread(descriptor, request.start, request.stop) for request in requests]
    finally:
        os.close(descriptor)


def _pread(descriptor: int, start: int, stop: int) -> bytes | Exception:
    """All bytes of a range that the file has: one pread may give fewer than asked."""
    try:
        data = os.pread(descriptor, stop - start, start)
        while len(data) < stop - start:
            more = os.pread(descriptor, stop - start - len(data), start + len(data))
            if not more:
                break
            data += more
        return data
    except OSError as error:
        return error


def _read_remote(requests: Sequence[_Request], timeout_s: float) -> list[bytes | Exception]:
    """Requests of files of one store, in flight together where the store can."""
    from fsspec.asyn import AsyncFileSystem, sync

    filesystem = _filesystem(requests[0].file)
    paths = [_inside(request.file) for request in requests]
    starts = [request.start for request in requests]
    stops = [request.stop for request in requests]
    try:
        if isinstance(filesystem, AsyncFileSystem):
            got = sync(  # type: ignore[no-untyped-call]
                filesystem.loop, filesystem._cat_ranges, paths, starts, stops, on_error="return", timeout=timeout_s
            )
        else:
            got = filesystem.cat_ranges(paths, starts, stops, on_error="return")
    except Exception as error:
        # A whole round that fails (a timeout, no route) fails for each of its requests; the caller decides.
        return [error] * len(requests)
    return [answer if isinstance(answer, Exception) else bytes(answer) for answer in got]


def _filesystem(url: str) -> Any:
    from fsspec.core import url_to_fs

    scheme = urlsplit(url).scheme
    try:
        return url_to_fs(url)[0]  # type: ignore[no-untyped-call]
    except ValueError:
        raise DataError(f'{url}: fsspec knows no store as "{scheme}://"; correct the address') from None
    except ImportError as error:
        package = getattr(error.__cause__ or error, "name", None) or str(error)
        if package in _EXTRA:
            raise MissingPackage(package, f"reading {url}", "remote") from None
        raise DataError(
            f"reading {url} needs the package `{package}`; install it with: pip install {package}"
        ) from None


def _inside(url: str) -> str:
    """The name of `url` within its file system."""
    return str(_filesystem(url)._strip_protocol(url))


class _Short(Exception):
    """A range came with another number of bytes than asked."""


def _ranges_hint(came: int, wanted: int) -> str:
    return "; does this server answer range requests?" if came > wanted else ""


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _may_pass(error: Exception) -> bool:
    """Whether asking again may help. File systems wrap what happened in exceptions of their own: all but the clear
    refusals are taken for passing trouble."""
    status = _status(error)
    if status is not None and 400 <= status < 500:
        return status in _PASSING_STATUS
    refusals = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, DataError, MissingPackage)
    mistakes = (TypeError, AttributeError, NotImplementedError, NameError)
    return not isinstance(error, refusals + mistakes)


def _cause(trouble: Exception) -> str:
    if isinstance(trouble, DataError):
        return "damaged"
    if isinstance(trouble, _Short) or type(trouble).__name__ == "ClientPayloadError":
        return "short"
    if isinstance(trouble, TimeoutError) or "Timeout" in type(trouble).__name__:
        return "timeout"
    return "status" if _status(trouble) is not None else "connection"


def _refused(file: str, error: Exception) -> Exception:
    """What a store says for good, in the user's words; our own mistakes keep their type."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{file}: no such file; correct its name or restore it")
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return DataError(f"{file}: cannot be read: {_said(error)}; check its permissions or your credentials")
    if isinstance(error, OSError) or _status(error) is not None:
        return DataError(f"{file}: cannot be read: {_said(error)}")
    return error


def _given_up(file: str, start: int | None, stop: int | None, trouble: Exception, attempts: int) -> Exception:
    where = file if start is None else f"{file}: bytes {start} to {stop}"
    if isinstance(trouble, DataError):
        return DataError(f"{trouble} ({attempts} attempts gave the same)")
    if isinstance(trouble, _Short) and not is_url(file):
        return DataError(f"{where}: {trouble}; the file is shorter than when it was written, restore it from a copy")
    return StorageError(
        f"{where}: {attempts} attempts failed, the last one by: {_said(trouble)}; check the store and the network, "
        "then run the same command again"
    )


def _said(error: BaseException) -> str:
    status = _status(error)
    text = str(error) or type(error).__name__
    return f"status {status} ({text})" if status is not None else text
