"""Text in the making: lines and paragraphs from pieces of running text."""

from __future__ import annotations


class Paragraphs:
    """Collects pieces of text; white space inside a line is collapsed, an empty line stands between paragraphs."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._line: list[str] = []
        self._verbatim = False

    def add(self, text: str) -> None:
        """Text of the present line."""
        self._line.append(text)

    def end_line(self) -> None:
        """Ends the line unless it is empty."""
        text = "".join(self._line)
        self._line.clear()
        if self._verbatim:
            self._lines += [line.rstrip() for line in text.split("\n")]
        elif words := text.split():
            self._lines.append(" ".join(words))

    def end_paragraph(self, *, verbatim: bool = False) -> None:
        """Ends the line and the paragraph; the next one keeps its lines and white space when `verbatim`."""
        self.end_line()
        self._verbatim = verbatim
        if self._lines and self._lines[-1]:
            self._lines.append("")

    def text(self) -> str:
        """All lines."""
        self.end_line()
        return "\n".join(self._lines).strip()
