"""JSON lines, and a JSON list of objects, one document each; a file of objects one after the other is read alike."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from typing import Any

from .item import KEPT_BYTES, Fault, Input, Item
from .rows import document, parsed
from .streams import BLOCK_BYTES, lines


def jsonl(given: Input) -> Iterator[Item]:
    """One document a line, numbered from 1; a line of white space is no document."""
    part = given.part
    if part:
        given.stream.seek(part.start)
    length = part.stop - part.start if part else None
    rows = lines(given.stream, limit=given.limit, length=length)
    for number, (line, size) in enumerate(rows, part.first if part else 1):
        suffix = f":{number}"
        if size > given.limit:
            yield Item(suffix, line[:KEPT_BYTES], "too_large", size, given.limit)
        elif line and not line.isspace():
            try:
                value = parsed(line)
            except Fault as fault:
                yield fault.item(suffix, line)
                continue
            yield document(suffix, value, settings=given.settings, raw=line)


def json_list(given: Input) -> Iterator[Item]:
    """One document an item of a list, or of objects that stand one after the other, numbered from 1.

    The list may be larger than memory. An item that is no JSON ends it: nobody can say where the next one begins.
    """
    for number, value in enumerate(_items(given.stream, limit=given.limit), 1):
        yield document(f":{number}", value, settings=given.settings)


def _items(stream: io.BufferedReader, *, limit: int) -> Iterator[Any]:
    window = _Window(stream, limit=limit)
    if window.peek() != "[":
        # A single object, or JSON lines under the ending `.json`.
        yield window.value()
        while window.peek() == "{":
            yield window.value()
    else:
        window.skip()
        while window.peek() != "]":
            yield window.value()
            if window.peek() not in (",", "]"):
                raise Fault("not_json")
            if window.peek() == ",":
                window.skip()
        window.skip()
    if window.peek():
        raise Fault("not_json")


class _Window:
    """The part of a JSON text that is being read."""

    def __init__(self, stream: io.BufferedReader, *, limit: int) -> None:
        self._stream, self._limit = stream, limit
        self._text, self._place, self._ended = "", 0, False
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._scan = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """The next character that is not white space, empty at the end."""
        while True:
            while self._place < len(self._text) and self._text[self._place] in " \t\r\n":
                self._place += 1
            if self._place < len(self._text) or self._ended:
                return self._text[self._place : self._place + 1]
            self._more(BLOCK_BYTES)

    def skip(self) -> None:
        """Passes over one character."""
        self._place += 1

    def value(self) -> Any:
        """The next value; Fault when there is none, or it is too large."""
        while True:
            ahead = len(self._text) - self._place
            try:
                value, end = self._scan(self._text, self._place)
            except RecursionError:
                raise Fault("too_deep") from None
            except ValueError:
                if self._ended:
                    raise Fault("not_json") from None
            else:
                # A number at the end of the window may go on behind it.
                if end < len(self._text) or self._ended:
                    self._place = end
                    return value
            if ahead > self._limit:
                raise Fault("too_large", value=ahead, threshold=self._limit)
            # Twice as much each time, so that a long value is scanned no more than twice in all.
            self._more(max(BLOCK_BYTES, ahead))

    def _more(self, count: int) -> None:
        data = self._read(count)
        self._ended = not data
        try:
            self._text = self._text[self._place :] + self._decode(data, self._ended)
        except UnicodeDecodeError:
            raise Fault("not_utf8") from None
        self._place = 0

    def _read(self, count: int) -> bytes:
        """The next `count` bytes, fewer before the end or the damage of the file; the damage is told when it is met."""
        blocks: list[bytes] = []
        try:
            while count > 0 and (block := self._stream.read1(count)):
                blocks.append(block)
                count -= len(block)
        except Fault:
            if not blocks:
                raise
        return b"".join(blocks)
