"""What one file holds: its content, its records if it has any, and how a source reads it best."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ropewalk.base.errors import MissingPackage

from ..config import Source
from ..formats import ONE_DOCUMENT
from ..readers.dispatch import read_items
from ..readers.item import Budget, Fault, Input
from ..readers.rows import dialogue, text
from ..readers.streams import unpacked
from ..sources import Found, open_location
from .beginnings import Beginning, beginnings
from .content import TEXTS, WORDS, Content, content_of, decoded
from .records import Records, records_of_items, records_of_lines, records_of_parquet
from .shapes import Shape, shape_of

Format = Literal["auto", "text", "jsonl", "parquet", "chat", "html", "latex", "jats", "pdf", "epub", "warc"]

RECORDS = 2000
"""Records of a file that are looked at."""
_MOST_DOCUMENTS = 20
"""Pages, papers, ... of a file that are read for a sample."""
_MOST_SAMPLED_BYTES = 20_000_000
"""Of a file that has to be read as a whole for a sample."""
_JSON: tuple[Content, ...] = ("json lines", "json list", "json object")
_FORMATS: dict[Content, Format] = {"parquet": "parquet", "pdf": "pdf", "html": "html", "warc": "warc", "latex": "latex"}
"""How content is read that stands under a name which tells nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a file holds, as far as its beginning tells."""

    found: Found
    content: Content
    beginning: Beginning
    records: Records | None = None
    shape: Shape | None = None
    trouble: str = ""
    """Why nothing can be read of it; empty when something can."""

    @property
    def size(self) -> int:
        """Bytes as it lies there."""
        return self.beginning.size or 0

    @property
    def unpacked(self) -> int:
        """About as many bytes it holds."""
        return self.beginning.unpacked_size or self.size

    @property
    def format(self) -> Format:
        """The format of the source that reads it; `auto` where its name says enough."""
        reader = self.beginning.kind.reader
        if self.shape and self.shape.kind == "chat":
            return "chat"
        if self.shape and self.content in _JSON:
            return "auto" if reader == "jsonl" else "jsonl"
        fit = _FORMATS.get(self.content, "auto")
        return fit if reader == "text" and fit != "html" else "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Documents of a file, and an estimate of all of them."""

    texts: tuple[str, ...]
    documents: float
    text_bytes: float


def look_at(found: Found, source: Source, *, most: int) -> Look:
    """What a file holds; OSError when it cannot be opened."""
    first = next(beginnings(found.location, found.kind, source, most=most))
    content = content_of(first.data, whole=first.whole)
    if trouble := packing_trouble(first, content):
        return Look(found=found, content=content, beginning=first, trouble=trouble[0])
    reader = first.kind.reader
    if reader == "text" and content not in TEXTS and content not in _FORMATS:
        return Look(found=found, content=content, beginning=first, trouble=f"it is {WORDS[content]}")
    records = records_in(first, content)
    structured = reader in ("jsonl", "json", "parquet") or content in ("json lines", "json list", "parquet")
    if records is None or not structured or (reader == "text" and content != "parquet" and len(records.records) < 2):
        return Look(found=found, content=content, beginning=first)
    shape = shape_of(records.objects) if records.objects else None
    if shape is None or shape.kind == "none":
        if reader in ("jsonl", "parquet"):
            return Look(
                found=found, content=content, beginning=first, records=records, trouble="its records hold no text"
            )
        return Look(found=found, content=content, beginning=first)
    return Look(found=found, content=content, beginning=first, records=records, shape=shape)


def packing_trouble(beginning: Beginning, content: Content) -> tuple[str, str] | None:
    """Why a file cannot be unpacked as its name says, and what to do; None when it can, or is not packed at all."""
    name, stated, packed = beginning.name, beginning.kind.packing, beginning.packed
    bare, ending = posixpath.splitext(name)
    if content == "empty":
        return "it is empty", "fill it, or leave it out of `paths`"
    if stated and not packed:
        return f"its name ends in {ending}, but it is {WORDS[content]}", f"rename it to {posixpath.basename(bare)}"
    if packed and packed != stated:
        proper = {"gzip": ".gz", "zstd": ".zst", "bz2": ".bz2"}[packed]
        right = posixpath.basename(bare if stated else name) + proper
        return f"it is {WORDS[packed]}, which its name does not tell", f"rename it to {right}"
    if content in ("xz", "7z", "rar"):
        return f"it is {WORDS[content]}, which is not read", "unpack it, and pack it with gzip or Zstandard if you like"
    return None


def records_in(beginning: Beginning, content: Content, *, most: int = RECORDS) -> Records | None:
    """Up to `most` of the first records of a file of records; None for other content, or when none can be read."""
    if content == "parquet":
        if "!" in beginning.name and not beginning.whole:
            return None
        try:
            with open_location(beginning.name, seek=True) as stream:
                return records_of_parquet(stream, most=most)
        except (Fault, OSError):
            return None
    if content == "json lines":
        found = records_of_lines(beginning.data, whole=beginning.whole, most=most)
    elif content in ("json list", "json object"):
        text = decoded(beginning.data, whole=beginning.whole)
        found = records_of_items(text, whole=beginning.whole, most=most)
    else:
        return None
    return found if found.records else None


def sample_of(look: Look, key: str, *, format: Format) -> Sample:
    """Documents of a file, read with this text key and format, and an estimate of how many it has."""
    if look.records is None:
        whole_text = look.beginning.kind.reader in ("text", "latex") or look.beginning.kind.reader is None
        return _of_text(look) if whole_text else _of_reader(look, format=format)
    texts = tuple(_texts(look.records, key, chat=format == "chat"))
    records = look.records
    size = sum(len(each.encode("utf-8", "surrogatepass")) for each in texts)
    many = len(records.records)
    if records.total is not None:
        scale = records.total / many
    else:
        scale = look.unpacked / records.bytes if records.bytes else 0.0
    return Sample(texts=texts, documents=len(texts) * scale, text_bytes=size * scale)


def _texts(records: Records, key: str, *, chat: bool) -> Iterator[str]:
    for value in records.objects:
        try:
            data = dialogue(value, key=key) if chat else text(value, key)
        except Fault:
            continue
        yield data.decode("utf-8", "replace")


def _of_text(look: Look) -> Sample:
    try:
        shown = decoded(look.beginning.data, whole=False)
    except UnicodeDecodeError:
        shown = look.beginning.data.decode("utf-8", "replace")
    members = look.beginning.members
    return Sample(texts=(shown,), documents=members, text_bytes=look.unpacked)


def _of_reader(look: Look, *, format: Format) -> Sample:
    """By the reader of the format: pages of HTML and crawls, papers, books."""
    found, kind = look.found, look.found.kind
    settings = Source(name="sample", paths=(found.location,), format=format)
    budget = Budget(1 << 30, expansion=1)
    texts: list[str] = []
    place = 0
    try:
        with open_location(found.location, seek=True) as stream:
            given = Input(
                stream=unpacked(stream, kind.packing, budget=budget),
                reader=kind.reader or "text",
                settings=settings,
                budget=budget,
                name=found.name,
            )
            if kind.reader in ONE_DOCUMENT and look.unpacked > _MOST_SAMPLED_BYTES:
                return Sample(texts=(), documents=1, text_bytes=look.unpacked)
            for item in read_items(given):
                texts += [item.data.decode("utf-8", "replace")] if not item.fault else []
                place = stream.tell()
                if len(texts) == _MOST_DOCUMENTS:
                    break
    except (OSError, MissingPackage):
        return Sample(texts=(), documents=1, text_bytes=look.unpacked)
    size = sum(len(each.encode()) for each in texts)
    scale = look.size / place if len(texts) == _MOST_DOCUMENTS and place else 1.0
    return Sample(texts=tuple(texts), documents=len(texts) * scale, text_bytes=size * scale)
