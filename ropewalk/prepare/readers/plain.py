"""Plain text, Markdown, source code: a file as it is."""

from __future__ import annotations

from collections.abc import Iterator

from .item import Input, Item
from .streams import whole


def text(given: Input) -> Iterator[Item]:
    """The file as one document."""
    yield Item("", whole(given.stream, limit=given.limit))
