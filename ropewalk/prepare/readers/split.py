"""A text cut into documents: at empty lines, separators or headings, or about every so many characters.

Cutting takes away empty lines (`blank-lines`) or separators, and nothing else. It looks at blocks of bytes as they come
and holds one document at a time; where blocks end makes no difference. Lines end with LF, CR LF or CR.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..config import Source
from .item import KEPT_BYTES, Item

LONG_LINE_BYTES = 1 << 20
"""A longer line comes in pieces; it is taken for text, whatever it holds."""

_HEADING = re.compile(rb" {0,3}#{1,6}(?:[ \t\r\n]|$)")
_UNDERLINE = re.compile(rb" {0,3}(={3,}|-{3,})\s*$")
_OVERLINE = re.compile(rb"={3,}\s*$")
_FENCE = re.compile(rb" {0,3}(`{3,}|~{3,})")
_NO_TITLE = re.compile(rb" {0,3}(?:[-+*>|]\s|\d+[.)]\s|`{3}|~{3})")
"""Items of lists, quotations, rows of tables and fences, below which a line is no underline."""
_END = r"(?:\r\n|\r|\n)"
_PARAGRAPH_END = re.compile(rf"{_END}(?:[ \t]*{_END})+")
_LINE_END = re.compile(_END)


class Piece(NamedTuple):
    """A document to be: where it begins, and its bytes."""

    line: int
    """The line in which it begins, counted from 1."""
    data: bytes
    """All of it, or only its beginning when it is longer than the limit."""
    size: int
    """Bytes in it."""


def split_items(blocks: Iterable[bytes], settings: Source, *, limit: int, like: Item | None = None) -> Iterator[Item]:
    """The documents of a text that comes in `blocks`: their suffix is the line in which they begin (`:12`), with a
    number when others begin in the same line (`:12.2`). What is white space alone is no document.

    Labels are those of `like`.
    """
    like = like or Item()
    line = begun = 0
    for piece in pieces(blocks, settings, limit=limit):
        begun = begun + 1 if piece.line == line else 1
        line = piece.line
        suffix = f"{like.suffix}:{line}" if begun == 1 else f"{like.suffix}:{line}.{begun}"
        if piece.size > limit:
            yield Item(suffix, piece.data[:KEPT_BYTES], "too_large", piece.size, limit)
        elif piece.data and not piece.data.isspace():
            yield like._replace(suffix=suffix, data=piece.data)


def pieces(blocks: Iterable[bytes], settings: Source, *, limit: int) -> Iterator[Piece]:
    """All pieces of the text in order, those of white space alone too."""
    if settings.split == "size":
        return _by_size(blocks, settings.split_characters)
    document = _Document(limit)
    if settings.split == "headings":
        return _at_headings(blocks, document)
    if settings.split == "blank-lines":
        return _at_lines(blocks, document, bytes.isspace)
    separator = settings.separator.strip().encode()
    if is_line(settings.separator):
        return _at_lines(blocks, document, lambda line: line.strip() == separator)
    return _at_strings(blocks, document, settings.separator.encode())


def is_line(separator: str) -> bool:
    """Whether a separator counts only where it is a line of its own: one of punctuation, such as `---` and `%`, may
    also stand within a text; `<|endoftext|>` may not."""
    return all(not letter.isalnum() and letter.isprintable() for letter in separator)


class _Document:
    """The document that is being collected; beyond the limit only its beginning is held."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: list[bytes] = []
        self._size = 0
        self._line = self._next = 1
        self.inside_line = False
        """Whether the last line has not ended yet."""

    def add(self, data: bytes, *, whole: bool = True) -> None:
        """Adds a line or its end, or a piece of one that goes on when not `whole`."""
        if self._size <= self._limit:
            self._held.append(data)
        self._size += len(data)
        self._next += whole
        self.inside_line = not whole

    def pass_over(self) -> None:
        """Counts a line, or the end of one, that belongs to no document."""
        self._next += 1
        self._line = self._next
        self.inside_line = False

    def end(self) -> Iterator[Piece]:
        """The document, if there is one; another begins."""
        if self._size:
            yield Piece(self._line, b"".join(self._held), self._size)
        self._held, self._size, self._line = [], 0, self._next


def _lines(blocks: Iterable[bytes], *, separator: bytes = b"") -> Iterator[tuple[bytes, bool]]:
    """(line with its end, True), or (piece of a long line, whether its end is in it). No piece ends inside a
    `separator`."""
    held = b""
    for block in blocks:
        found = (held + block).splitlines(keepends=True)
        held = b""
        # CR at the end of a block may be half of CR LF.
        if found and not found[-1].endswith(b"\n"):
            held = found.pop()
        for line in found:
            yield line, True
        kept = len(held) - len(separator) - 1
        if kept > LONG_LINE_BYTES:
            inside = held.find(separator, kept - len(separator) + 1) if separator else -1
            kept = min(kept, inside) if inside >= 0 else kept
            yield held[:kept], False
            held = held[kept:]
    if held:
        yield held, True


def _at_lines(blocks: Iterable[bytes], document: _Document, is_separator: Callable[[bytes], bool]) -> Iterator[Piece]:
    """Cut at lines that are separators, which belong to no document."""
    for line, whole in _lines(blocks):
        if whole and not document.inside_line and is_separator(line):
            yield from document.end()
            document.pass_over()
        else:
            document.add(line, whole=whole)
    yield from document.end()


def _at_strings(blocks: Iterable[bytes], document: _Document, separator: bytes) -> Iterator[Piece]:
    """Cut at every `separator`; one at the end of a line goes with the line end."""
    for line, whole in _lines(blocks, separator=separator):
        first, *others = line.split(separator)
        if not others:
            document.add(line, whole=whole)
            continue
        *between, last = others
        document.add(first, whole=False)
        for part in between:
            yield from document.end()
            document.add(part, whole=False)
        yield from document.end()
        if whole and not last.strip(b"\r\n"):
            document.pass_over()
        else:
            document.add(last, whole=whole)
    yield from document.end()


def _at_headings(blocks: Iterable[bytes], document: _Document) -> Iterator[Piece]:
    """Cut before every heading of Markdown (`# ...`, or a line underlined by === or ---) that follows some text: a
    title and a subtitle stay together. In fenced code nothing is a heading."""
    state = _Markdown(document)
    for line, whole in _lines(blocks):
        if not whole or document.inside_line:
            state.flush()
            state.has_text = True
            document.add(line, whole=whole)
        else:
            yield from state.take(line)
    state.flush()
    yield from document.end()


class _Markdown:
    """Tells headings. The last two lines wait: an underline below makes them one."""

    def __init__(self, document: _Document) -> None:
        self._document = document
        self._waiting: list[bytes] = []
        self._fence = b""
        self.has_text = False
        """Whether the document has lines that are neither empty nor headings."""

    def take(self, line: bytes) -> Iterator[Piece]:
        """Adds the line; gives the document that it ends, if it does."""
        fence = _FENCE.match(line)
        if self._fence:
            if fence and fence[1].startswith(self._fence) and not line.strip().strip(self._fence[:1]):
                self._fence = b""
        elif fence:
            self._fence = fence[1]
        elif _HEADING.match(line):
            self.flush()
            yield from self._begin([line])
            return
        elif _UNDERLINE.match(line) and (title := self._title()):
            self._waiting = self._waiting[: -len(title)]
            self.flush()
            yield from self._begin([*title, line])
            return
        self._waiting.append(line)
        if len(self._waiting) > 2:
            self._add(self._waiting.pop(0))

    def flush(self) -> None:
        """Adds the lines that wait."""
        for line in self._waiting:
            self._add(line)
        self._waiting = []

    def _begin(self, heading: list[bytes]) -> Iterator[Piece]:
        if self.has_text:
            yield from self._document.end()
            self.has_text = False
        for line in heading:
            self._document.add(line)

    def _add(self, line: bytes) -> None:
        self.has_text = self.has_text or not line.isspace()
        self._document.add(line)

    def _title(self) -> list[bytes]:
        """The lines that an underline would make a heading: one line after an empty one, with or without an overline;
        else none."""
        *above, line = [b"\n", *self._waiting]
        if line.isspace() or _NO_TITLE.match(line):
            return []
        if above and _OVERLINE.match(above[-1]):
            return [above[-1], line]
        return [line] if above and above[-1].isspace() else []


def _by_size(blocks: Iterable[bytes], most: int) -> Iterator[Piece]:
    """Pieces of at most `most` characters, the last of at most a quarter more, so that none is tiny."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text, line, ended = "", 1, False
    source = iter(blocks)
    while not ended:
        block = next(source, None)
        ended = block is None
        text += decoder.decode(block or b"", ended)
        place = 0
        while (left := len(text) - place) > most + most // 4 or (ended and left):
            stop = _cut_near(text, place, most) if left > most + most // 4 else len(text)
            data = text[place:stop].encode("utf-8", "surrogateescape")
            yield Piece(line, data, len(data))
            line += len(_LINE_END.findall(text, place, stop))
            place = stop
        text = text[place:]


def _cut_near(text: str, place: int, most: int) -> int:
    """Where to end the piece that begins at `place`: behind a paragraph, a line or a word in its second half."""
    least, stop = place + most // 2, place + most
    ends = [found.end() for found in _PARAGRAPH_END.finditer(text, least, stop)]
    if ends:
        return ends[-1]
    found = max(text.rfind("\n", least, stop), text.rfind("\r", least, stop)) + 1
    found = found or max(text.rfind(" ", least, stop), text.rfind("\t", least, stop)) + 1
    cut = found or stop
    return cut + (text[cut - 1 : cut + 1] == "\r\n")
