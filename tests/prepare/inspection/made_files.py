"""Small files of every kind, as people have them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SENTENCE = "A ropewalk is the long hall in which yarn is twisted into strands, and strands are laid into one rope. "
CHINESE = "制绳的长廊里，纤维先梳理成纱，纱再捻成股，最后三股合成一根坚固的绳子。"
PROSE = SENTENCE * 8


def lines(rows: Sequence[Any]) -> bytes:
    """JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def texts(key: str, *, count: int = 30, text: str = PROSE, **others: Any) -> list[dict[str, Any]]:
    """Records with text under a key, dots leading into an object, and with other keys."""
    *outer, last = key.split(".")
    rows = []
    for number in range(count):
        inner: dict[str, Any] = {last: f"{number}. {text}"}
        for name in reversed(outer):
            inner = {name: inner}
        rows.append({"id": f"doc-{number}", **others, **inner})
    return rows


def dialogues(*, count: int = 30, container: str = "messages") -> list[dict[str, Any]]:
    """Records with a dialogue each."""
    names = (
        ("from", "value", "human", "gpt") if container == "conversations" else ("role", "content", "user", "assistant")
    )
    role, content, asks, answers = names
    turns = [{role: asks, content: "What is a ropewalk?"}, {role: answers, content: SENTENCE}]
    return [{"id": number, container: turns} for number in range(count)]


def pairs(question: str, answer: str, *, count: int = 30) -> list[dict[str, Any]]:
    """Records with a question and its answer."""
    return [{question: f"What is a ropewalk, number {number}?", answer: SENTENCE} for number in range(count)]


def play(speeches: int) -> str:
    """Speeches of short lines between empty lines."""
    speech = "ROPER:\nNow twist the yarn and walk with me,\nand lay the strands three by three.\n"
    return "\n".join(speech for _ in range(speeches))


def parquet(columns: dict[str, list[Any]]) -> bytes:
    """A Parquet file."""
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    """A ZIP archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def packed(data: bytes, packing: str) -> bytes:
    """Packed with gzip, bzip2 or Zstandard."""
    if packing == "zst":
        with pa.BufferOutputStream() as out, pa.CompressedOutputStream(out, "zstd") as stream:
            stream.write(data)
            stream.close()
            return bytes(out.getvalue())
    return {"gz": gzip.compress, "bz2": bz2.compress}[packing](data)


def write(name: str, data: bytes | str) -> str:
    """A file in the working folder; its name."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return name
