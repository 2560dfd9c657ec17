"""One small whole file of every format, made here by other writers than ours: libraries, or bytes by hand."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

WORDS = "The quick brown fox jumps over the lazy dog. 敏捷的棕色狐狸 ünïcode."
HTML = f"<html><head><title>Title</title><style>p {{}}</style></head><body><h1>Head</h1><p>{WORDS}</p></body></html>"
LATEX = (
    "\\documentclass{article} % a comment\n\\newcommand{\\fox}{quick brown fox}\n\\title{On foxes}\n"
    "\\begin{document}\n\\section{One}\nThe \\fox{} is 100\\% fast. % hidden\n"
    "\\begin{verbatim}\nx % y\n\\end{verbatim}\n$a^2$\n"
    "\\begin{thebibliography}{9}\\bibitem{a} Book\\end{thebibliography}\n\\end{document}\n"
)
JATS = f"""<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE article PUBLIC "-//NLM//DTD JATS (Z39.96) 1.2//EN" "JATS-archivearticle1.dtd">
<article xmlns:xlink="http://www.w3.org/1999/xlink" xmlns:mml="http://www.w3.org/1998/Math/MathML"><front>
<journal-meta><journal-title>Journal</journal-title></journal-meta>
<article-meta><article-id pub-id-type="doi">10.1/x</article-id>
<title-group><article-title>On foxes</article-title></title-group>
<contrib-group><contrib><name><surname>Author</surname></name></contrib></contrib-group>
<pub-date pub-type="epub"><day>4</day><month>3</month><year>2020</year></pub-date>
<permissions><license xlink:href="https://creativecommons.org/licenses/by/4.0/"><p>Free</p></license></permissions>
<abstract><p>Short &amp; sweet.</p></abstract></article-meta></front>
<body><sec><title>Intro</title><p>{WORDS} <xref>[1]</xref>&nbsp;end
<inline-formula><alternatives><tex-math>\\documentclass{{a}}\\begin{{document}}$x_1$\\end{{document}}</tex-math>
<mml:math><mml:mi>x</mml:mi></mml:math></alternatives></inline-formula></p></sec></body>
<back><ref-list><ref>Reference</ref></ref-list></back></article>"""
CONTAINER = (
    '<?xml version="1.0"?><container xmlns="urn:oasis:names:tc:opendocument:xmlns:container">'
    '<rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
)
PACKAGE = (
    '<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">'
    "<dc:title>Book</dc:title><dc:date>1999-12-31</dc:date><dc:rights>Public domain</dc:rights>"
    "<dc:source>https://example.org/book</dc:source></metadata>"
    '<manifest><item id="b" href="b%201.xhtml"/><item id="a" href="a.xhtml"/><item id="i" href="i.png"/></manifest>'
    '<spine><itemref idref="a"/><itemref idref="b"/></spine></package>'
)
MESSAGES = [{"role": "user", "content": "Question?"}, {"role": "assistant", "content": WORDS}]
SHAREGPT = [{"from": "human", "value": "Question?"}, {"from": "gpt", "value": WORDS}]


def gzipped(data: bytes) -> bytes:
    """Without the time, which would make every run another one."""
    return gzip.compress(data, mtime=0)


def jsonl(rows: Sequence[object]) -> bytes:
    """JSON lines."""
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def parquet(columns: Mapping[str, object], **options: object) -> bytes:
    """A Parquet file of these columns."""
    sink = io.BytesIO()
    pq.write_table(pa.table(dict(columns)), sink, **options)
    return sink.getvalue()


def zipped(members: Mapping[str, bytes]) -> bytes:
    """A ZIP archive, deflated."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return sink.getvalue()


def tarred(members: Mapping[str, bytes]) -> bytes:
    """A TAR archive."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    return sink.getvalue()


BOOK_PART = "<html xmlns='http://www.w3.org/1999/xhtml'><body><p>{}</p></body></html>"


def epub(package: bytes = PACKAGE.encode(), *, first: bytes = BOOK_PART.format("First part.").encode()) -> bytes:
    """A book of two parts."""
    return zipped(
        {
            "mimetype": b"application/epub+zip",
            "META-INF/container.xml": CONTAINER.encode(),
            "OEBPS/book.opf": package,
            "OEBPS/a.xhtml": first,
            "OEBPS/b 1.xhtml": BOOK_PART.format("Second part.").encode(),
        }
    )


def pdf(*pages: str) -> bytes:
    """A PDF with one line of text a page."""
    kids = " ".join(f"{4 + 2 * index} 0 R" for index in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    streams: dict[int, bytes] = {}
    for index, text in enumerate(pages):
        number = 4 + 2 * index
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {number + 1} 0 R >>"
        )
        streams[number + 1] = zlib.compress(f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode())
        objects.append(f"<< /Length {len(streams[number + 1])} /Filter /FlateDecode >>")
    objects.append("<< /CreationDate (D:20210203040506Z) >>")
    out = bytearray(b"%PDF-1.4\n")
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        stream = b"\nstream\n" + streams[number] + b"\nendstream" if number in streams else b""
        out += f"{number} 0 obj\n{body}".encode() + stream + b"\nendobj\n"
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += f"trailer << /Size {len(objects) + 1} /Root 1 0 R /Info {len(objects)} 0 R >>\n".encode()
    return bytes(out + b"startxref\n%d\n%%%%EOF\n" % start)


def http_answer(content: bytes, *, status: int = 200, headers: Mapping[str, str] = {}) -> bytes:
    """What a web server says."""
    fields = {"Content-Type": "text/html; charset=utf-8", **headers}
    lines = [f"HTTP/1.1 {status} OK", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


def warc_record(
    block: bytes, *, kind: str = "response", url: str = "https://example.org/", media: str = "application/http"
) -> bytes:
    """One record."""
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nWARC-Date: 2020-02-03T04:05:06Z\r\n"
        f"WARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-000000000001>\r\n"
        f"Content-Type: {media}\r\nContent-Length: {len(block)}\r\n\r\n"
    )
    return head.encode() + block + b"\r\n\r\n"


def warc() -> list[bytes]:
    """The records of a small crawl: two pages between records that are no documents."""
    return [
        warc_record(b"software: x\r\n", kind="warcinfo", media="application/warc-fields"),
        warc_record(b"GET / HTTP/1.1\r\n\r\n", kind="request"),
        warc_record(http_answer(HTML.encode())),
        warc_record(http_answer(WORDS.encode(), headers={"Content-Type": "text/plain"}), url="https://example.org/b"),
    ]


def wet() -> bytes:
    """Text of two pages."""
    return b"".join(
        warc_record(f"{WORDS} {number}".encode(), kind="conversion", media="text/plain") for number in range(2)
    )


class Sample(NamedTuple):
    """A whole file: what is inside, and how it is packed."""

    inside: bytes
    pack: Callable[[bytes], bytes] = bytes
    format: str = "auto"

    @property
    def data(self) -> bytes:
        """The bytes of the file."""
        return self.pack(self.inside)


def samples() -> dict[str, Sample]:
    """A file of every format and packing, by a name with its ending."""
    lines = jsonl([{"text": f"{WORDS} {number}", "url": "https://example.org"} for number in range(5)])
    texts = {"text": [f"{WORDS} {number}" for number in range(6)], "date": [None, "2020"] * 3}
    members = {"a.txt": WORDS.encode(), "d.html": HTML.encode(), "e.png": b"\x89PNG"}
    inner = {**members, "b/c.jsonl": lines}
    records = warc()
    zstd = zstandard.ZstdCompressor().compress
    return {
        "a.txt": Sample(WORDS.encode()),
        "a.md": Sample(f"# Head\n\n{WORDS}\n".encode()),
        "a.py": Sample(b"def f(x):\n    return x + 1\n"),
        "a.txt.gz": Sample(WORDS.encode() * 20, gzipped),
        "a.jsonl": Sample(lines),
        "a.jsonl.gz": Sample(lines, gzipped),
        "a.jsonl.zst": Sample(lines, zstd),
        "a.jsonl.bz2": Sample(lines, bz2.compress),
        "a.parquet": Sample(parquet(texts, row_group_size=2)),
        "b.parquet": Sample(parquet(texts, compression="none", use_dictionary=False, write_statistics=False)),
        "chat.jsonl": Sample(jsonl([{"messages": MESSAGES}, {"conversations": SHAREGPT}]), format="chat"),
        "chat.json": Sample(json.dumps([{"messages": MESSAGES}, {"conversations": SHAREGPT}]).encode(), format="chat"),
        "chat.parquet": Sample(parquet({"messages": [MESSAGES, MESSAGES]}), format="chat"),
        "a.html": Sample(HTML.encode()),
        "a.tex": Sample(LATEX.encode()),
        "a.nxml": Sample(JATS.encode()),
        "a.xml": Sample(JATS.encode()),
        "a.pdf": Sample(pdf("Hello page one", "Hello page two")),
        "a.epub": Sample(PACKAGE.encode(), epub),
        "b.epub": Sample(BOOK_PART.format("First part.").encode(), lambda part: epub(first=part)),
        "a.warc": Sample(b"".join(records)),
        "a.warc.gz": Sample(records[2], lambda record: b"".join(map(gzipped, [*records[:2], record, *records[3:]]))),
        "a.warc.wet.gz": Sample(wet(), gzipped),
        "a.zip": Sample(lines, lambda rows: zipped({**members, "b/c.jsonl": rows, "inner.tar": tarred(inner)})),
        "b.zip": Sample(tarred(inner), lambda archive: zipped({**members, "inner.tar": archive})),
        "a.tar": Sample(zipped(inner), lambda archive: tarred({"inner.zip": archive, **inner})),
        "a.tgz": Sample(tarred(inner), gzipped),
        "a.tar.zst": Sample(tarred(inner), zstd),
    }
