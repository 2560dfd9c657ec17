"""Parquet files, one document a row. Only the columns that are asked for are read, some rows at a time."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..config import Source
from .caps import capped
from .item import KEPT_BYTES, Exhausted, Fault, Input, Item
from .rows import document, label, pair_of
from .streams import whole

BATCH_BYTES = 4_000_000
"""Text in a batch of rows, by the sizes that the file states."""
MOST_ROWS = 2000


def parquet(given: Input) -> Iterator[Item]:
    """One document a row, numbered from 1. What cannot be read of a row group is one fault; the next group is read."""
    stream = given.stream if given.stream.seekable() else io.BytesIO(whole(given.stream, limit=given.limit))
    file = open_parquet(stream)
    columns = _columns(file.schema_arrow, given.settings)
    first = given.part.first if given.part else 1
    for group in range(given.part.start, given.part.stop) if given.part else range(file.num_row_groups):
        count = max(0, file.metadata.row_group(group).num_rows)
        done = 0
        fault = Fault("damaged" if columns else "no_text_key")
        try:
            for item in _rows(file, group, columns=columns, first=first, given=given) if columns else ():
                done += 1
                yield item
        except Exhausted:
            raise
        except Fault as raised:
            fault = raised
        if done < count:
            yield fault.item(f":{first + done}-{first + count - 1}")
        first += count


def open_parquet(stream: object) -> pq.ParquetFile:
    """The file behind `stream`; Fault when its footer is damaged."""
    with _damage():
        return pq.ParquetFile(stream)


MOST_GROUP_BYTES = 256_000_000
"""Rows of a larger row group are not looked at by `first_rows`: a column is read up to its first page, which may be as
large as the group."""


def first_rows(stream: object, *, most: int) -> tuple[list[dict[str, Any]], int]:
    """Up to `most` rows as objects, bytes as text, and how many rows there are; Fault when the file is damaged. Where
    the first row group is too large, one row of an empty value for each column: text for text, None for all else."""
    file = open_parquet(stream)
    schema, total = file.schema_arrow, file.metadata.num_rows
    groups = [group for group in range(file.num_row_groups) if file.metadata.row_group(group).num_rows > 0]
    names = [{field.name: "" if _is_text(field.type) else None for field in schema}]
    if not groups or file.metadata.row_group(groups[0]).total_byte_size > MOST_GROUP_BYTES:
        return names, total
    with _damage():
        batch = next(file.iter_batches(most, row_groups=groups[:1], use_threads=False))
        try:
            return [_shown(row) for row in batch.to_pylist()], total
        except UnicodeDecodeError:
            return names, total


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.decode("utf-8", "replace") if isinstance(value, bytes) else value for name, value in row.items()
    }


def _columns(schema: pa.Schema, settings: Source) -> list[str]:
    """The columns to read; none when there is no text among them."""
    if settings.format == "chat":
        text = [name for name in _turn_names(settings, schema.names) if _has(schema, name)]
        text = [] if text == ["system"] else text
    else:
        text = [settings.text_key] if _has(schema, settings.text_key) else []
    others = (settings.url_key, settings.time_key, settings.license_key)
    return list(dict.fromkeys(text + [name for name in others if _has(schema, name)])) if text else []


def _turn_names(settings: Source, names: Collection[str]) -> tuple[str, ...]:
    """The columns that may hold a dialogue, or its question and answer."""
    pair = pair_of(names)
    return tuple(dict.fromkeys((settings.text_key, "messages", "conversations", "system", *filter(None, pair or ()))))


def _has(schema: pa.Schema, key: str) -> bool:
    return key in schema.names or ("." in key and key.split(".")[0] in schema.names)


def _rows(file: pq.ParquetFile, group: int, *, columns: list[str], first: int, given: Input) -> Iterator[Item]:
    """The documents of one row group. When a batch of rows takes too much memory, they are read one by one."""
    at_once = _rows_at_once(file, group)
    done = 0
    while True:
        start = 0
        try:
            for items in _batches(file, group, columns=columns, at_once=at_once, first=first, given=given):
                for item in items[max(0, done - start) :]:
                    given.budget.spend(len(item.data))
                    done += 1
                    yield item
                start += len(items)
            return
        except Fault as fault:
            if fault.rule != "too_much_memory" or at_once == 1:
                raise
            at_once = 1


def _rows_at_once(file: pq.ParquetFile, group: int) -> int:
    """By the mean size of a row, all columns together: to ask a damaged file for one column's size may end the process,
    because pyarrow 26 lets the exception of the C++ library pass."""
    meta = file.metadata.row_group(group)
    return min(MOST_ROWS, max(1, int(BATCH_BYTES * max(1, meta.num_rows) // max(1, meta.total_byte_size))))


def _batches(
    file: pq.ParquetFile, group: int, *, columns: list[str], at_once: int, first: int, given: Input
) -> Iterator[list[Item]]:
    with _damage():
        batches = file.iter_batches(at_once, row_groups=[group], columns=columns, use_threads=False)

    def following() -> list[Item] | None:
        with _damage():
            batch = next(batches, None)
            return None if batch is None else _documents(batch, first=first, given=given)

    while (items := capped(given.settings.limits, following)) is not None:
        first += len(items)
        yield items


def _documents(batch: pa.RecordBatch, *, first: int, given: Input) -> list[Item]:
    settings = given.settings
    found = _dialogues(batch, first, settings) if settings.format == "chat" else _texts(batch, first, settings)
    labels = [_labels(batch, key) for key in (settings.url_key, settings.time_key, settings.license_key)]
    items = []
    for item, url, time, licence in zip(found, *labels, strict=True):
        size = len(item.data)
        if size > given.limit:
            items.append(Item(item.suffix, item.data[:KEPT_BYTES], "too_large", size, given.limit))
        else:
            items.append(item._replace(url=url, time=time, licence=licence))
    return items


def _texts(batch: pa.RecordBatch, first: int, settings: Source) -> Iterator[Item]:
    values = _bytes(_column(batch, settings.text_key))
    for number, value in enumerate(values, first):
        yield Item(f":{number}", value or b"", "" if value is not None else "text_not_string")


def _dialogues(batch: pa.RecordBatch, first: int, settings: Source) -> Iterator[Item]:
    names = _turn_names(settings, batch.schema.names)
    columns = {name: column for name in names if (column := _column(batch, name)) is not None}
    for row in range(len(batch)):
        suffix = f":{first + row}"
        try:
            value = {name: column[row].as_py() for name, column in columns.items()}
        except UnicodeDecodeError:
            yield Item(suffix, fault="not_utf8")
            continue
        yield document(suffix, value, settings=settings)


def _labels(batch: pa.RecordBatch, key: str) -> list[str]:
    column = _column(batch, key)
    if column is not None and not _is_text(column.type):
        # Times and numbers as Arrow writes them; what has no such form, such as a list, is no label.
        column = pc.cast(column, pa.string()) if pa.types.is_primitive(column.type) else None
    if column is None:
        return [""] * len(batch)
    return ["" if value is None else label(value.decode("utf-8", "replace")) for value in _bytes(column)]


def _column(batch: pa.RecordBatch, key: str) -> pa.Array | None:
    """The column of this name, or the field that a path of names leads to."""
    names = batch.schema.names
    if key in names:
        return batch.column(names.index(key))
    first, *path = key.split(".")
    column = batch.column(names.index(first)) if first in names else None
    for name in path:
        if column is None or not pa.types.is_struct(column.type) or column.type.get_field_index(name) < 0:
            return None
        column = pc.struct_field(column, name)
    return column


def _bytes(column: pa.Array | None) -> list[bytes | None]:
    """The values of a column of text as they are in the file, which may be no UTF-8; None for all else."""
    assert column is not None
    if not _is_text(column.type):
        return [None] * len(column)
    values: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
    return values


def _is_text(kind: pa.DataType) -> bool:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(inner) for test in tests) or pa.types.is_binary(inner) or pa.types.is_large_binary(inner)


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """What Arrow raises for bytes that are no Parquet becomes Fault; errors of memory and storage stay."""
    try:
        yield
    except MemoryError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        raise Fault("damaged") from error
    except (pa.ArrowException, ValueError, KeyError, OverflowError) as error:
        raise Fault("damaged") from error
