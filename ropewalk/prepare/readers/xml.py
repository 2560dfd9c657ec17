"""XML that may be hostile: no entity is ever declared, nothing outside is fetched, nesting is bounded.

Expat calls a handler for every event; it neither recurses nor builds a tree.
"""

from __future__ import annotations

from html.entities import html5
from typing import Protocol
from xml.parsers import expat

from .item import Fault

DEEPEST = 1000
"""Elements within elements; articles in use stay below 50."""


class Handler(Protocol):
    """What is told about the elements of a text. Names come without their namespace's prefix."""

    def start(self, name: str, attributes: dict[str, str]) -> None: ...
    def end(self, name: str) -> None: ...
    def data(self, text: str) -> None: ...


def parse_xml(data: bytes, handler: Handler) -> None:
    """Tells `handler` the elements of `data` in order; Fault when it is no XML, or declares entities.

    A character with a name from HTML (`&nbsp;`) is known where the document names a DTD, as JATS and XHTML do.
    """
    parser = expat.ParserCreate()
    parser.buffer_text = True
    depth = 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > DEEPEST:
            raise Fault("too_deep", value=depth, threshold=DEEPEST)
        handler.start(_local(name), {_local(key): value for key, value in attributes.items()})

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1
        handler.end(_local(name))

    def refuse(*_: object) -> None:
        # Entities that hold entities grow without bound ("billion laughs"); articles and books need none.
        raise Fault("entity_declaration")

    def skipped(name: str, is_parameter: bool) -> None:
        if not is_parameter:
            handler.data(html5.get(f"{name};", ""))

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = handler.data
    parser.EntityDeclHandler = refuse
    parser.SkippedEntityHandler = skipped
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, LookupError, ValueError, UnicodeError):
        # An encoding that Python does not know is a LookupError, one that is no encoding of bytes a ValueError.
        raise Fault("not_xml") from None


def _local(name: str) -> str:
    return name.rpartition(":")[2]
