"""Bytes -> documents: finds the reader, and sees to it that whatever happens leaves an item."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from ..formats import ONE_DOCUMENT, SPLIT, Reader
from .item import Exhausted, Fault, Input, Item, ReaderFunction
from .split import split_items
from .streams import checked_parts

READERS: dict[Reader, str] = {
    "text": "ropewalk.prepare.readers.plain:text",
    "jsonl": "ropewalk.prepare.readers.lines:jsonl",
    "json": "ropewalk.prepare.readers.lines:json_list",
    "parquet": "ropewalk.prepare.readers.parquet:parquet",
    "html": "ropewalk.prepare.readers.web:html",
    "latex": "ropewalk.prepare.readers.latex:latex",
    "jats": "ropewalk.prepare.readers.jats:jats",
    "xml": "ropewalk.prepare.readers.jats:xml",
    "pdf": "ropewalk.prepare.readers.pdf:pdf",
    "epub": "ropewalk.prepare.readers.epub:epub",
    "warc": "ropewalk.prepare.readers.warc:warc",
    "zip": "ropewalk.prepare.readers.archives:zip_members",
    "tar": "ropewalk.prepare.readers.archives:tar_members",
    "docstrings": "ropewalk.prepare.readers.python:docstrings",
    "topics": "ropewalk.prepare.readers.python:topics",
}


def read_items(given: Input) -> Iterator[Item]:
    """The documents of `given`, and a fault for what cannot be had: there is at least one item.

    A part of a file may be without any. Exhausted passes through: it ends the outermost file.
    """
    empty = given.part is None
    checked = unchecked = 0
    try:
        for item in _items(given):
            empty = False
            if checked != checked_parts(given.stream):
                checked, unchecked = checked_parts(given.stream), 0
            unchecked += 1
            yield item
    except Exhausted:
        raise
    except Fault as fault:
        empty = False
        one = given.reader in ONE_DOCUMENT and not _splits(given)
        item = fault.item("" if one else ":rest")
        doubted = fault.rule == "checksum" and checked == checked_parts(given.stream)
        yield item._replace(doubtful=unchecked if doubted else 0)
    if empty:
        yield Item("", fault="no_documents")


def _items(given: Input) -> Iterator[Item]:
    items = _function(given.reader)(given)
    if not _splits(given) or given.reader == "text":  # which cuts while it reads
        yield from items
        return
    for item in items:
        if item.fault:
            yield item
        else:
            yield from split_items([item.data], given.settings, limit=given.limit, like=item)


def _splits(given: Input) -> bool:
    return given.settings.split != "none" and given.reader in SPLIT


def _function(reader: Reader) -> ReaderFunction:
    module, name = READERS[reader].split(":")
    function: ReaderFunction = getattr(importlib.import_module(module), name)
    return function
