"""Plain text, Markdown, source code: a file as it is, or cut into documents."""

from __future__ import annotations

from collections.abc import Iterator

from .item import Input, Item
from .split import split_items
from .streams import blocks, whole


def text(given: Input) -> Iterator[Item]:
    """The file as one document, or as several when its source splits files."""
    if given.settings.split == "none":
        yield Item("", whole(given.stream, limit=given.limit))
    else:
        yield from split_items(blocks(given.stream), given.settings, limit=given.limit)
