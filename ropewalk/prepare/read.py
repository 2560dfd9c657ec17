"""Input files -> records, one a document. What cannot be read as text is a record with a fault, not a gap."""

from __future__ import annotations

from collections.abc import Iterator

from ropewalk.base.errors import DataError

from .documents import Record
from .readers.dispatch import read_items
from .readers.item import Budget, Exhausted, Input, Item
from .readers.streams import unpacked
from .sources import InputFile, open_location, stamp_of, unreadable

_SEEKING = frozenset({"parquet", "zip", "epub"})


def read_records(file: InputFile) -> Iterator[Record]:
    """The documents of a file, or of a part of one, in order; a file has at least one record.

    A document that is damaged, too large or hostile is a record with a fault, and so is the rest of a file that is
    damaged as a whole. One that finds a wrong checksum says how many records before it are `doubtful`. Raises DataError
    when the file cannot be read, or has changed since it was hashed.
    """
    settings = file.settings
    for item in _items(file):
        yield Record(
            f"{file.source}:{file.name}{item.suffix}",
            file.source,
            file.domain,
            item.data,
            item.fault,
            item.url,
            item.time or settings.time,
            item.licence or settings.license,
            item.value,
            item.threshold,
            item.doubtful,
        )


def _items(file: InputFile) -> Iterator[Item]:
    budget = Budget(file.size, expansion=file.settings.limits.expansion)
    try:
        with open_location(file.location, seek=file.reader in _SEEKING or file.part is not None) as stream:
            given = Input(
                stream=unpacked(stream, file.packing, budget=budget),
                reader=file.reader,
                settings=file.settings,
                budget=budget,
                name=file.name,
                part=file.part,
            )
            try:
                yield from read_items(given)
            except Exhausted as fault:
                yield fault.item(":rest")
        changed = stamp_of(file.location) != file.stamp
    except OSError as error:
        raise unreadable(file.location, error, source=file.source) from None
    if changed:
        raise DataError(f"{file.location} changed while it was being read; run the same command again")
