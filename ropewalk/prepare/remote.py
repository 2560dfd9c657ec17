"""Files behind URLs, by fsspec: what a URL means, and its bytes as a stream or, where the store can, at any place.

What goes wrong on the way is an OSError with a number, whatever library raised it: it says nothing about the document,
and the same command may succeed later.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ropewalk.base.errors import DataError, MissingPackage, RopewalkError

_BUFFER_BYTES = 1 << 20
_EXTRA = ("aiohttp", "s3fs")
"""What the extra `remote` installs: for HTTP and for S3."""
_TAGS = ("ETag", "etag", "Content-MD5", "md5Hash", "LastModified", "Last-Modified", "last_modified", "mtime", "created")
"""What stores call that which changes with a file, the surest first."""


def is_url(path: str) -> bool:
    """Whether a path of a recipe is a URL."""
    return "://" in path


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that a URL means."""

    urls: tuple[str, ...]
    named: bool
    """Whether the URL names them, by itself or with a pattern; else they lie in the folder that it names."""


def list_url(url: str) -> Listing:
    """The files behind a URL, a pattern with `*`, or a folder (over HTTP it must end with `/`)."""
    with _network(url):
        store, path = _store(url)
        web = _is_web(store)
        if "*" in path or (glob.has_magic(path) and not web):
            return Listing(_named(store, store.glob(path)), named=True)
        if url.endswith("/") or (not web and store.isdir(path)):
            return Listing(_named(store, store.find(path)), named=False)
        return Listing((store.unstrip_protocol(path),) if store.exists(path) else (), named=True)


def stamp_of(url: str) -> str:
    """Text that changes when the file does, as far as its store tells."""
    with _network(url):
        store, path = _store(url)
        info = store.info(path)
        tags = [str(info[tag]) for tag in _TAGS if info.get(tag)]
        return " ".join([str(info.get("size")), *tags[:1]])


def size_of(url: str) -> int | None:
    """Bytes behind a URL, None where its store does not tell."""
    with _network(url):
        store, path = _store(url)
        size = store.info(path).get("size")
        return size if isinstance(size, int) else None


def open_url(url: str, *, seek: bool) -> io.BufferedReader:
    """The bytes behind a URL. With `seek`, at any place: from a server that gives only whole files, a copy."""
    with _network(url):
        store, path = _store(url)
        if not _is_web(store):
            return _stream(store.open(path, "rb"), url, seek=seek)
        if not seek:
            # Without blocks: the answer to one request, as it comes.
            return _stream(store.open(path, "rb", block_size=0), url, seek=False)
        if gives_ranges(url):
            return _stream(store.open(path, "rb"), url, seek=True)
    copy = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - the caller closes it
    with open_url(url, seek=False) as stream:
        shutil.copyfileobj(stream, copy, _BUFFER_BYTES)
    copy.seek(0)
    return io.BufferedReader(copy, _BUFFER_BYTES)


def gives_ranges(url: str) -> bool:
    """Whether the store gives bytes from the middle of a file."""
    with _network(url):
        store, path = _store(url)
        if not _is_web(store):
            return True
        try:
            with store.open(path, "rb", cache_type="none") as file:
                file.seek(1)
                file.read(1)
        except ValueError:
            # fsspec's word for a server that answers with the whole file, or does not know its size.
            return False
        return True


def _store(url: str) -> tuple[Any, str]:
    """The file system of a URL (fsspec has no types) and the path in it."""
    from fsspec.core import url_to_fs  # recipes of local files do without

    try:
        opened: tuple[Any, str] = url_to_fs(url)  # type: ignore[no-untyped-call]
        return opened
    except ImportError as error:
        package = getattr(error.__cause__ or error, "name", None) or str(error)
        if package in _EXTRA:
            raise MissingPackage(package, f"reading {url}", "remote") from None
        raise DataError(
            f"reading {url} needs the package `{package}`; install it with: pip install {package}"
        ) from None


def _is_web(store: Any) -> bool:
    return "http" in store.protocol


def _named(store: Any, paths: list[str]) -> tuple[str, ...]:
    return tuple(store.unstrip_protocol(path) for path in sorted(paths) if not path.endswith("/"))


def _stream(file: Any, url: str, *, seek: bool) -> io.BufferedReader:
    return io.BufferedReader(_Remote(file, url, seek=seek), _BUFFER_BYTES)


class _Remote(io.RawIOBase):
    """A file of fsspec whose errors are OSErrors with a number."""

    def __init__(self, file: Any, url: str, *, seek: bool) -> None:
        self._file, self._url, self._seek = file, url, seek

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._seek

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        with _network(self._url):
            data = self._file.read(len(view))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        with _network(self._url):
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextlib.contextmanager
def _network(url: str) -> Iterator[None]:
    """Errors of any library that fsspec uses become OSErrors with a number."""
    try:
        yield
    except RopewalkError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error
    except Exception as error:
        # Stores raise the exceptions of their own libraries, which share no base.
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error
