"""A terminal as far as progress needs one: what a program writes to it, and what a reader then sees."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from typing import TextIO

_CODE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>]")


class Screen:
    """`columns` wide and as high as need be. Lines that are longer than that wrap, as in a terminal."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self.row = self.column = 0
        self.wrapped = 0
        """How often text went over the right edge."""
        self._rest = ""

    def feed(self, text: str) -> None:
        """Takes what a program wrote, which may end in the middle of a code."""
        text, self._rest = self._rest + text, ""
        place = 0
        while place < len(text):
            found = _CODE.match(text, place)
            if found:
                self._code(found[1] or "", found[2] or "")
                place = found.end()
                continue
            if text[place] == "\x1b" and len(text) - place < 12:
                self._rest = text[place:]
                return
            self._character(text[place])
            place += 1

    @property
    def last(self) -> str:
        """The lowest line that is not empty."""
        return next((line.rstrip() for line in reversed(self.lines) if line.strip()), "")

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)

    def _code(self, number: str, letter: str) -> None:
        if letter == "K":
            whole = number == "2"
            self.lines[self.row] = "" if whole else self.lines[self.row][: self.column]
        elif letter == "A":
            self.row = max(0, self.row - int(number or 1))
        elif letter == "J":
            del self.lines[self.row + 1 :]
            self.lines[self.row] = self.lines[self.row][: self.column] if number in ("", "0") else ""

    def _character(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._down()
        elif character >= " ":
            if self.column == self.columns:
                self.wrapped += 1
                self._down()
                self.column = 0
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")


@contextlib.contextmanager
def terminal(columns: int, rows: int = 24) -> Iterator[tuple[TextIO, int]]:
    """A terminal of this size: what a program writes to, and the descriptor where that can be read."""
    reader, writer = pty.openpty()
    resize(writer, columns, rows)
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        try:
            yield stream, reader
        finally:
            os.close(reader)


def resize(descriptor: int, columns: int, rows: int = 24) -> None:
    """Gives the terminal another size."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def written(reader: int) -> str:
    """What was written to the terminal since the last call; nothing is waited for."""
    os.set_blocking(reader, False)
    found = b""
    with contextlib.suppress(BlockingIOError, OSError):
        while part := os.read(reader, 65536):
            found += part
    return found.decode("utf-8", "replace")
