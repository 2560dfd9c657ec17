"""EPUB -> the text of a book, its parts in reading order."""

from __future__ import annotations

import functools
import io
import posixpath
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote

from .archives import member_data, opened_zip
from .caps import capped
from .item import Fault, Input, Item
from .rows import label
from .streams import whole
from .web import page_text
from .xml import parse_xml


def epub(given: Input) -> Iterator[Item]:
    """The book as one document, an empty line between its parts."""
    stream = given.stream if given.stream.seekable() else io.BytesIO(whole(given.stream, limit=given.limit))
    with opened_zip(stream) as book:
        yield _book(book, given)


def _book(book: zipfile.ZipFile, given: Input) -> Item:
    container = _read_xml(book, "META-INF/container.xml", given)
    roots = [element.attributes.get("full-path", "") for element in container.named("rootfile")]
    if not roots:
        raise Fault("not_epub")
    if "META-INF/encryption.xml" in book.namelist():
        locked = _read_xml(book, "META-INF/encryption.xml", given).named("CipherReference")
        if any(element.attributes.get("URI", "").lower().endswith(("html", "htm", "xml")) for element in locked):
            raise Fault("encrypted")
    package = _read_xml(book, roots[0], given)
    files = {element.attributes.get("id"): element.attributes.get("href", "") for element in package.named("item")}
    parts = []
    room = given.limit
    for reference in package.named("itemref"):
        href = files.get(reference.attributes.get("idref"))
        if href:
            name = posixpath.normpath(posixpath.join(posixpath.dirname(roots[0]), unquote(href.partition("#")[0])))
            data = member_data(book, name, limit=room, budget=given.budget)
            room -= len(data)
            parts.append(capped(given.settings.limits, functools.partial(page_text, data)))
    return Item(
        "",
        "\n\n".join(part for part in parts if part).encode(),
        url=label(next((text for text in package.texts("source") if "://" in text), "")),
        time=label(next(package.texts("date"), "")),
        licence=label(next(package.texts("rights"), "")),
    )


@dataclass(slots=True)
class _Element:
    name: str
    attributes: dict[str, str]
    text: list[str] = field(default_factory=list)


class _Elements:
    """All elements of a small XML file in order, each with the text right after its start."""

    def __init__(self) -> None:
        self._all: list[_Element] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._all.append(_Element(name, attributes))

    def end(self, name: str) -> None:
        pass

    def data(self, text: str) -> None:
        if self._all:
            self._all[-1].text.append(text)

    def named(self, name: str) -> list[_Element]:
        """The elements of this name."""
        return [element for element in self._all if element.name == name]

    def texts(self, name: str) -> Iterator[str]:
        """Their texts, those of white space left out."""
        found = ("".join(element.text).strip() for element in self.named(name))
        return (text for text in found if text)


def _read_xml(book: zipfile.ZipFile, name: str, given: Input) -> _Elements:
    elements = _Elements()
    data = member_data(book, name, limit=given.limit, budget=given.budget)
    capped(given.settings.limits, lambda: parse_xml(data, elements))
    return elements
