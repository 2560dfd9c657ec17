"""Raw bytes -> text: UTF-8, one kind of line end, no byte order mark. What is not text is removed."""

from __future__ import annotations

import pyarrow as pa

from .documents import TEXT_SCHEMA, Batch, Edit, Passed, Removal

STEP = "normalise"
_MARK = b"\xef\xbb\xbf"


def normalise(batch: Batch) -> Passed:
    """The documents of a raw batch that are text, edited where line ends or a byte order mark ask for it."""
    texts: list[str] = []
    kept: list[int] = []
    removed: list[Removal] = []
    edited: list[Edit] = []
    for index, (name, value) in enumerate(zip(batch["id"].to_pylist(), batch["text"], strict=True)):
        data = value.as_py()
        rule = _refusal(data)
        if rule:
            removed.append(Removal(name, STEP, rule))
            continue
        text, edit = _clean(data)
        texts.append(text)
        kept.append(index)
        if edit:
            edited.append(Edit(name, edit))
    rest = batch.take(pa.array(kept, pa.int64()))
    columns = [*rest.columns[:3], pa.array(texts, pa.large_string())]
    return Passed(pa.record_batch(columns, schema=TEXT_SCHEMA), removed, edited)


def _refusal(data: bytes) -> str:
    """The rule that removes `data`, "" when it is text."""
    if b"\0" in data:
        return "binary"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "not_utf8"
    return "empty" if not text.removeprefix("\ufeff").strip() else ""


def _clean(data: bytes) -> tuple[str, str]:
    """The text and the rule that changed it ("" when none did)."""
    edit = ""
    if data.startswith(_MARK):
        data, edit = data[len(_MARK) :], "byte_order_mark"
    if b"\r" in data:
        data, edit = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n"), "newlines"
    return data.decode(), edit
