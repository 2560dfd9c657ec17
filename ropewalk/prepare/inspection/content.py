"""What bytes are: text, JSON, an archive, something that nobody can read; told from their beginning, not by a name."""

from __future__ import annotations

import codecs
import re
from typing import Literal

Content = Literal[
    "empty",
    "text",
    "json lines",
    "json list",
    "json object",
    "html",
    "xml",
    "latex",
    "warc",
    "parquet",
    "pdf",
    "zip",
    "tar",
    "xz",
    "7z",
    "rar",
    "sqlite",
    "arrow",
    "numpy",
    "image",
    "audio",
    "program",
    "gzip",
    "zstd",
    "bz2",
    "utf-16",
    "not utf-8",
    "binary",
]

WORDS: dict[Content, str] = {
    "empty": "an empty file",
    "text": "plain text",
    "json lines": "JSON lines",
    "json list": "a JSON list",
    "json object": "a single JSON object",
    "html": "HTML",
    "xml": "XML",
    "latex": "LaTeX",
    "warc": "a crawl (WARC)",
    "parquet": "Parquet",
    "pdf": "a PDF",
    "zip": "a ZIP archive",
    "tar": "a TAR archive",
    "xz": "packed with xz",
    "7z": "a 7z archive",
    "rar": "a RAR archive",
    "sqlite": "an SQLite database",
    "arrow": "an Arrow file",
    "numpy": "a NumPy array",
    "image": "an image",
    "audio": "a recording",
    "program": "a program",
    "gzip": "packed with gzip",
    "zstd": "packed with Zstandard",
    "bz2": "packed with bzip2",
    "utf-16": "text in UTF-16",
    "not utf-8": "text that is not UTF-8",
    "binary": "binary data",
}
"""For people."""

TEXTS: frozenset[Content] = frozenset(
    {"text", "json lines", "json list", "json object", "html", "xml", "latex", "warc", "empty"}
)
"""What can be read as plain text."""

_MARKS: tuple[tuple[bytes, Content], ...] = (
    (b"PAR1", "parquet"),
    (b"PK\x03\x04", "zip"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"Rar!", "rar"),
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bz2"),
    (b"SQLite format 3", "sqlite"),
    (b"ARROW1", "arrow"),
    (b"\x93NUMPY", "numpy"),
    (b"\x89PNG", "image"),
    (b"\xff\xd8\xff", "image"),
    (b"GIF8", "image"),
    (b"RIFF", "audio"),
    (b"ID3", "audio"),
    (b"OggS", "audio"),
    (b"\x7fELF", "program"),
    (b"MZ\x90", "program"),
    (b"WARC/", "warc"),
)
_LOOKED_AT = 1 << 16


def content_of(data: bytes, *, whole: bool) -> Content:
    """What begins with `data`; `whole` says that nothing follows."""
    if not data:
        return "empty"
    for mark, content in _MARKS:
        if data.startswith(mark):
            return content
    if b"%PDF-" in data[:1024]:
        return "pdf"
    if data[257:262] == b"ustar":
        return "tar"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    head = data[:_LOOKED_AT]
    if b"\0" in head:
        return "binary"
    try:
        text = decoded(head, whole=whole and len(head) == len(data))
    except UnicodeDecodeError:
        controls = sum(head.count(code) for code in range(32) if code not in (9, 10, 12, 13, 27))
        return "binary" if controls > len(head) / 100 else "not utf-8"
    return _of_text(text, whole=whole and len(head) == len(data))


def decoded(data: bytes, *, whole: bool) -> str:
    """`data` as text without a byte order mark; a character that is cut off at the end is left out unless `whole`."""
    return codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=whole)


def _of_text(text: str, *, whole: bool) -> Content:
    start = text.lstrip()
    if not start:
        return "text"
    lower = start[:1000].lower()
    if lower.startswith(("<!doctype html", "<html")):
        return "html"
    if lower.startswith("<?xml") or re.match(r"<!doctype (?!html)", lower):
        return "html" if "<html" in lower else "xml"
    if re.match(r"(%[^\n]*\n|\s)*\\documentclass", start[:5000]):
        return "latex"
    if start[0] == "[" and re.match(r'\[\s*[{\["]', start):
        return "json list"
    if start[0] == "{" and re.match(r'\{\s*("|\})', start):
        return _of_objects(start, whole=whole)
    return "text"


def _of_objects(text: str, *, whole: bool) -> Content:
    """Whether lines that begin with a brace are objects each, or parts of one."""
    lines = [line.strip() for line in text.split("\n")]
    complete = [line for line in (lines if whole else lines[:-1]) if line]
    if not complete:
        # A line longer than what was looked at.
        return "json lines"
    objects = sum(line.startswith("{") and line.endswith("}") for line in complete)
    if objects >= 0.9 * len(complete):
        return "json lines"
    return "json object" if complete[0] == "{" or not complete[0].endswith("}") else "text"
