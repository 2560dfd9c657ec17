"""The last line of a terminal, redrawn in place with rich; messages scroll by above it.

The line never wraps: figures that do not fit are dropped, the least important first. rich reads the width for every
frame, so the line adapts to a resized terminal within a quarter of a second.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from ropewalk.monitor.run_text import RunStatus

FRAMES_PER_S = 4.0
BAR = ("━", "─")
ASCII_BAR = ("#", "-")
LEAST_BAR, MOST_BAR = 5, 32


class LiveLine:
    """Draws `frame(width)` on `stream` until it is hidden."""

    def __init__(self, stream: TextIO, frame: Callable[[int], Text], *, frames_per_s: float = FRAMES_PER_S) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=False)
        self._frame, self._frames_per_s = frame, frames_per_s
        self._live: Live | None = None

    @property
    def characters(self) -> tuple[str, str]:
        """Characters of a bar: done, and left."""
        return BAR if self._console.encoding.startswith("utf") else ASCII_BAR

    def show(self) -> None:
        """Draws the line, now and several times a second."""
        if self._live is not None:
            self._live.refresh()
            return
        self._live = Live(
            console=self._console,
            get_renderable=lambda: self._frame(self.width),
            auto_refresh=self._frames_per_s > 0,
            refresh_per_second=self._frames_per_s or 1,
            transient=True,
            redirect_stdout=False,  # results go to stdout, perhaps a file
            redirect_stderr=self._console.file is sys.stderr,  # output of libraries goes above the line
        )
        self._live.start(refresh=True)
        # A killed process could not restore the cursor.
        self._console.show_cursor(True)

    def hide(self) -> None:
        """Removes the line."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def say(self, text: str) -> None:
        """Prints text above the line, wrapped at words."""
        style = "yellow" if text.startswith("warning:") else ""
        for line in text.splitlines() or [""]:
            first, *others = Text(line, style=style).wrap(self._console, max(20, self.width - 2))
            self._console.print(first, *(Text("  ").append_text(other) for other in others), sep="\n", crop=False)

    @property
    def width(self) -> int:
        """Usable columns."""
        return _columns(self._console)


class Page:
    """A page on `stream` that is redrawn in place, under a line with a bar."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live: Live | None = None

    def show(self, moment: RunStatus, lines: list[str]) -> None:
        """Redraws the page; long lines are cut."""
        width = _columns(self._console)
        drawn = [line(moment.task, moment.share, moment.first, moment.others, width=width)]
        drawn += [Text(text, no_wrap=True, overflow="ellipsis") for text in lines]
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
            self._console.show_cursor(True)
        self._live.update(Group(*drawn), refresh=True)

    def close(self) -> None:
        """Leaves the last page on the screen."""
        if self._live:
            self._live.stop()


def line(
    task: str,
    share: float | None,
    first: list[str],
    others: list[str],
    *,
    width: int,
    characters: tuple[str, str] = BAR,
) -> Text:
    """`task`, a bar of the finished `share`, the `first` figures and as many of the `others` as fit; if not even
    `first` fits, the last of them."""
    percent = [] if share is None else [f"{share:4.0%}"]
    named, kept = [task], list(first)
    while len(kept) > 1 and _length([task, *percent, *kept]) > width:
        kept.pop(0)
    if _length([task, *percent, *kept]) > width:  # the time left matters more than the name of the task
        named = []
    if _length([*named, *percent, *kept]) > width:
        kept = []
    space = width - _length([*named, *percent, *kept])
    bar = min(MOST_BAR, width // 5, space - 1) if share is not None and len(kept) == len(first) else 0
    bar = 0 if bar < LEAST_BAR else bar
    space -= bar + 1 if bar else 0
    for other in others if len(kept) == len(first) else ():
        if cell_len(other) + 2 > space:
            break
        kept.append(other)
        space -= cell_len(other) + 2
    parts = [Text(part, style="bold") for part in named]
    if bar:
        assert share is not None
        full = round(bar * min(1.0, max(0.0, share)))
        drawn = Text(characters[0] * full, style="green") + Text(characters[1] * (bar - full), style="dim")
        parts.append(drawn.append(f" {percent[0]}"))
    else:
        parts += map(Text, percent)
    text = Text("  ", no_wrap=True, overflow="crop").join([*parts, *map(Text, kept)])
    text.truncate(width)
    return text


def _columns(console: Console) -> int:
    """Current columns of the terminal, except the last, where some terminals wrap."""
    with contextlib.suppress(OSError):  # otherwise as rich detects it
        console.size = ConsoleDimensions(*os.get_terminal_size(console.file.fileno()))
    return max(10, console.width - 1)


def _length(parts: list[str]) -> int:
    return cell_len("  ".join(parts))
