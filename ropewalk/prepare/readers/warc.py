"""WARC and WET -> one document a page: the answers of web servers, and text that was made of them.

Requests, metadata and revisits are no documents. Not by a library: `fastwarc` 1.1 takes a file that ends in the middle
of a record, or of a gzip member, for a whole one, and what it has not read is gone without a word.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import NamedTuple

from .caps import capped
from .http import media_type, parse_answer
from .item import KEPT_BYTES, Exhausted, Fault, Input, Item
from .rows import label
from .streams import BLOCK_BYTES
from .web import decoded, page_text

_DOCUMENTS = {"response", "resource", "conversion"}
_PAGES = {"text/html", "application/xhtml+xml"}
_TEXTS = {"text/plain", "text/markdown"}
_MOST_HEADER_BYTES = 1 << 16


class _Record(NamedTuple):
    headers: dict[str, str]
    block: bytes
    fault: Fault | None = None


def warc(given: Input) -> Iterator[Item]:
    """One document a page, numbered by its record from 1. Bytes that are no record are one fault, up to the next."""
    for number, record in enumerate(_records(given.stream, limit=given.limit), 1):
        if record.fault or record.headers.get("warc-type", "").lower() in _DOCUMENTS:
            item = _item(record, given)
            url, time = (record.headers.get(name, "") for name in ("warc-target-uri", "warc-date"))
            yield item._replace(suffix=f":{number}", url=label(url.strip("<>")), time=label(time))


def _item(record: _Record, given: Input) -> Item:
    if record.fault:
        return record.fault.item("", record.block)
    try:
        return Item("", _text(record, given))
    except Exhausted:
        raise
    except Fault as fault:
        return fault.item("", record.block)


def _records(stream: io.BufferedReader, *, limit: int) -> Iterator[_Record]:
    """Every record; raises Fault when the file ends inside one."""
    line = stream.readline(_MOST_HEADER_BYTES)
    while line:
        if line.isspace():
            line = stream.readline(_MOST_HEADER_BYTES)
            continue
        headers = _headers(stream) if line.startswith(b"WARC/") else {}
        length = headers.get("content-length", "")
        if length.isdecimal() and len(length) < 16:
            yield _read(stream, headers, int(length), limit=limit)
            line = stream.readline(_MOST_HEADER_BYTES)
        else:
            while line and not (line := stream.readline(_MOST_HEADER_BYTES)).startswith(b"WARC/"):
                continue
            yield _Record({}, b"", Fault("damaged"))


def _headers(stream: io.BufferedReader) -> dict[str, str]:
    """The named fields up to the empty line, names in lower case; none when there are too many."""
    found: dict[str, str] = {}
    size = 0
    while (line := stream.readline(_MOST_HEADER_BYTES)).strip():
        size += len(line)
        if size > _MOST_HEADER_BYTES:
            return {}
        name, _, value = line.decode("utf-8", "replace").partition(":")
        found[name.strip().lower()] = value.strip()
    if not line:
        raise Fault("damaged")
    return found


def _read(stream: io.BufferedReader, headers: dict[str, str], length: int, *, limit: int) -> _Record:
    """The record with its block, or with the fault that it is too large."""
    block = stream.read(min(length, limit))
    left = length - len(block)
    while left and (skipped := stream.read(min(left, BLOCK_BYTES))):
        left -= len(skipped)
    if left:
        raise Fault("damaged")
    if length > limit:
        return _Record(headers, block[:KEPT_BYTES], Fault("too_large", value=length, threshold=limit))
    return _Record(headers, block)


def _text(record: _Record, given: Input) -> bytes:
    """The text of a page as UTF-8; Fault when there is none."""
    media, charset = media_type(record.headers.get("content-type", ""))
    content = record.block
    if media == "application/http":
        answer = parse_answer(record.block, limit=given.limit, budget=given.budget)
        if answer.status != 200:
            raise Fault("http_status", value=answer.status, threshold=200)
        media, charset, content = answer.media, answer.charset, answer.content
    if media in _PAGES or (not media and b"<html" in content[:1000].lower()):
        return capped(given.settings.limits, lambda: page_text(content, charset=charset).encode())
    if media in _TEXTS:
        return decoded(content, charset=charset or "utf-8").encode()
    raise Fault("not_text")
