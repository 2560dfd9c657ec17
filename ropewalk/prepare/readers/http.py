"""An HTTP answer as a crawler has stored it -> status, kind, encoding and content."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

import pyarrow as pa

from .item import Budget, Fault


@dataclass(frozen=True, slots=True)
class Answer:
    """What a web server has answered."""

    status: int
    media: str
    """Such as `text/html`; empty when the server did not say."""
    charset: str
    content: bytes


def parse_answer(block: bytes, *, limit: int, budget: Budget) -> Answer:
    """The answer in `block`; Fault when it is none, or its content unpacks to more than `limit`."""
    head, _, content = block.partition(b"\r\n\r\n")
    if b"\n\n" in head:
        head, _, content = block.partition(b"\n\n")
    status, *lines = head.decode("latin-1").splitlines() or [""]
    found = re.match(r"HTTP/\d(?:\.\d)? +(\d{3})", status)
    if not found:
        raise Fault("not_http")
    headers = dict(_header(line) for line in lines if ":" in line)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        content = _joined_chunks(content)
    for coding in reversed(headers.get("content-encoding", "").lower().replace(",", " ").split()):
        content = _unpacked(content, coding, limit=limit)
        budget.spend(len(content))
    media, charset = media_type(headers.get("content-type", ""))
    return Answer(int(found[1]), media, charset, content)


def media_type(value: str) -> tuple[str, str]:
    """(media type, charset) of the value of a Content-Type header."""
    media, _, rest = value.partition(";")
    charset = re.search(r"""charset\s*=\s*["']?([\w:.-]{1,40})""", rest, re.IGNORECASE)
    return media.strip().lower(), charset[1].lower() if charset else ""


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()


def _joined_chunks(content: bytes) -> bytes:
    """The content without the sizes between its chunks. Some crawlers have removed them and left the header."""
    chunks: list[bytes] = []
    place = 0
    while found := _CHUNK.match(content, place):
        size = int(found[1], 16)
        if size == 0:
            return b"".join(chunks)
        chunks.append(content[found.end() : found.end() + size])
        place = found.end() + size
        if content[place : place + 2] == b"\r\n":
            place += 2
    if not chunks:
        return content
    raise Fault("damaged")


_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[^\r\n]{0,200}\r?\n")


def _unpacked(content: bytes, coding: str, *, limit: int) -> bytes:
    """The content without its coding. Some crawlers have removed it and left the header: then it stays as it is."""
    if coding in ("identity", "utf-8", "none") or content.lstrip()[:1] in (b"", b"<"):
        return content
    if coding in ("gzip", "x-gzip"):
        return _inflated(content, 31, limit=limit) if content.startswith(b"\x1f\x8b") else content
    if coding == "deflate":
        # The standard asks for zlib's frame; many servers send bare deflate.
        return _inflated(content, 15 if content[0] & 15 == 8 else -15, limit=limit)
    if coding in _ARROW:
        return _read_all(pa.CompressedInputStream(pa.BufferReader(content), _ARROW[coding]), limit=limit)
    raise Fault("unsupported_compression")


_ARROW = {"br": "brotli", "zstd": "zstd"}


def _inflated(content: bytes, window: int, *, limit: int) -> bytes:
    inflate = zlib.decompressobj(window)
    try:
        data = inflate.decompress(content, limit + 1)
    except zlib.error as error:
        raise Fault("damaged") from error
    if not inflate.eof and len(data) <= limit:
        raise Fault("damaged")
    return _bounded(data, limit=limit)


def _read_all(stream: pa.NativeFile, *, limit: int) -> bytes:
    try:
        data: bytes = stream.read(limit + 1)
    except OSError as error:
        # The stream lies in memory: only its bytes can be at fault.
        raise Fault("damaged") from error
    return _bounded(data, limit=limit)


def _bounded(data: bytes, *, limit: int) -> bytes:
    if len(data) > limit:
        raise Fault("too_large", value=len(data), threshold=limit)
    return data
