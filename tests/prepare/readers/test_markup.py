"""Pages, papers and books: what is text in them, what is not, and what is made to do harm."""

from __future__ import annotations

import sys
import zipfile
import zlib
from io import BytesIO
from pathlib import Path

import pytest
from format_samples import CONTAINER, HTML, JATS, LATEX, PACKAGE, WORDS, epub, pdf, zipped
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.base.errors import MissingPackage
from ropewalk.prepare.readers import pdf as pdf_reader
from ropewalk.prepare.readers.web import markup_text


def texts(records) -> list[tuple[str, str]]:
    return [(record.data.decode(), record.fault) for record in records]


def test_a_page_is_the_words_that_one_sees(read) -> None:
    assert texts(read("x.html", HTML.encode())) == [(f"Title\n\nHead\n\n{WORDS}", "")]


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("a<br>b<div>c</div>d", "a\nb\nc\nd"),
        ("<p>a</p><p>b  \n c", "a\n\nb c"),
        ("<pre>  a\n   b</pre>c", "  a\n   b\n\nc"),
        ("<tr><td>1</td><td>2</td></tr>", "1 2"),
        ("a<script>if (a<b) {x='</p>'}</script>b", "ab"),
        ("a<SCRIPT src=x>b", "a"),
        ("a<svg><text>b</text></svg>c<svg>d", "acd"),
        ("a<!-- <p> -->b<!--", "ab"),
        ('<a title="x>y" href=z>a</a>', "a"),
        ("3 < 4 &amp; 5 &gt; 4 &nbsp;&#x4e2d;&notin;", "3 < 4 & 5 > 4 中∉"),
        ("&#" + "9" * 5000 + ";", "\ufffd"),
        ("<![if IE]>a<![endif]>", "a"),
        ("<?php x ?>a<!DOCTYPE html>", "a"),
        ("a<b", "a"),
        ("<p", ""),
        ("< p>", "< p>"),
    ],
)
def test_tags_are_removed_and_what_they_mean_is_kept(markup, text) -> None:
    assert markup_text(markup) == text.strip()


@given(st.text(alphabet="<>/!-a \"'&#;pscript\n"))
def test_any_markup_is_text(markup) -> None:
    assert "<p>" not in markup_text(markup)


@given(st.lists(st.text(alphabet=st.characters(categories=["L", "N"]), min_size=1), min_size=1))
def test_no_word_is_lost_or_made(words) -> None:
    assert markup_text("".join(f"<div><b>{word}</b></div>" for word in words)).split("\n") == words


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'<meta charset="windows-1251">' + "Привет".encode("cp1251"), "Привет"),
        (b'<meta http-equiv="Content-Type" content="text/html; charset=gb2312">' + "绳索".encode("gbk"), "绳索"),
        (b"<meta charset=iso-8859-1>\x93a\x94", "\u201ca\u201d"),
        (b"\xef\xbb\xbf<meta charset=latin1>" + "ü".encode(), "ü"),
        ("\ufeffa".encode("utf-16-le"), "a"),
        ("ü".encode(), "ü"),
    ],
)
def test_a_page_is_read_in_the_encoding_that_it_names(read, data, text) -> None:
    assert texts(read("x.html", data)) == [(text, "")]


@pytest.mark.parametrize(
    ("data", "fault"),
    [(b"caf\xe9", "wrong_encoding"), (b"<meta charset=punycode>a", "unknown_encoding")],
)
def test_a_page_in_another_encoding_than_it_names_is_a_fault_with_its_bytes(read, data, fault) -> None:
    (record,) = read("x.html", data)
    assert (record.fault, record.data) == (fault, data)


def test_a_paper_is_its_body_without_what_is_for_the_compiler(read) -> None:
    (record,) = read("x.tex", LATEX.encode())
    assert record.data.decode() == (
        "\\title{On foxes}\n\n\\section{One}\nThe quick brown fox is 100\\% fast.\n"
        "\\begin{verbatim}\nx % y\n\\end{verbatim}\n$a^2$\n"
    )


def test_a_chapter_without_preamble_is_kept_whole(read) -> None:
    assert texts(read("x.tex", b"\\section{A}\ntext \\\\% comment\nmore")) == [("\\section{A}\ntext \\\\\nmore\n", "")]


def test_latex_is_read_in_the_encoding_that_it_names(read) -> None:
    data = "\\usepackage[latin1]{inputenc}\\begin{document}é".encode("latin-1")
    assert texts(read("x.tex", data)) == [("é\n", "")]


def test_macros_that_grow_are_stopped(read) -> None:
    bomb = "\\newcommand{\\a}{" + "b" * 1500 + "}\n" + "\\a" * 100_000
    (record,) = read("x.tex", bomb.encode(), document_bytes=1_000_000)
    assert (record.fault, record.threshold) == ("too_large", 1_000_000)


def test_an_article_is_title_abstract_and_body_with_its_labels(read) -> None:
    for name in ("x.nxml", "x.xml"):
        (record,) = read(name, JATS.encode())
        assert record.data.decode() == f"On foxes\n\nShort & sweet.\n\nIntro\n\n{WORDS} [1] end $x_1$"
        assert record.url == "https://doi.org/10.1/x"
        assert record.time == "2020-03-04"
        assert record.licence == "https://creativecommons.org/licenses/by/4.0/"


def test_a_set_of_articles_is_a_document_each(read) -> None:
    article = "<article><body><p>{}</p></body></article>"
    data = f"<pmc-articleset>{article.format('one')}{article.format('two')}</pmc-articleset>"
    assert [(record.id, record.data) for record in read("x.xml", data.encode())] == [
        ("s:x.xml:1", b"one"),
        ("s:x.xml:2", b"two"),
    ]
    *before, rest = read("x.xml", data.encode()[:-20])
    assert [record.data for record in before] == [b"one"]
    assert (rest.id, rest.fault) == ("s:x.xml:rest", "not_xml")


def test_other_xml_is_text_as_it_is(read) -> None:
    assert texts(read("x.xml", b"<note><article/></note>")) == [("<note><article/></note>", "")]


LAUGHS = (
    '<?xml version="1.0"?><!DOCTYPE article [<!ENTITY a "ha">'
    + "".join(f'<!ENTITY {name} "{f"&{before};" * 10}">' for before, name in zip("abcdefghi", "bcdefghij", strict=True))
    + "]><article><body><p>&j;</p></body></article>"
)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (LAUGHS, "entity_declaration"),
        ('<!DOCTYPE article [<!ENTITY x SYSTEM "file:///etc/passwd">]><article>&x;</article>', "entity_declaration"),
        ("<article>" + "<sec>" * 100_000, "too_deep"),
        ("<article><body>", "not_xml"),
        ('<?xml version="1.0" encoding="rot13"?><article/>', "not_xml"),
        ('<?xml version="1.0" encoding="nothing"?><article/>', "not_xml"),
    ],
)
def test_hostile_xml_is_a_fault(read, data, fault) -> None:
    (record,) = read("x.nxml", data.encode())
    assert (record.fault, record.id) == (fault, "s:x.nxml")


def test_a_book_is_its_parts_in_reading_order_with_its_labels(read) -> None:
    (record,) = read("x.epub", epub())
    assert record.data == b"First part.\n\nSecond part."
    assert (record.url, record.time, record.licence) == ("https://example.org/book", "1999-12-31", "Public domain")


def test_a_book_that_cannot_be_read_is_one_fault(read) -> None:
    encryption = "<encryption><CipherData><CipherReference URI='OEBPS/a.xhtml'/></CipherData></encryption>"
    base = {"META-INF/container.xml": CONTAINER.encode(), "OEBPS/book.opf": PACKAGE.encode()}
    cases = {
        "encrypted": zipped({**base, "META-INF/encryption.xml": encryption.encode()}),
        "missing_member": zipped(base),
        "not_epub": zipped({"META-INF/container.xml": b"<container/>"}),
        "damaged": epub()[:-30],
        "too_large": epub(first=b"<p>" + b"a" * 100_000),
    }
    for fault, data in cases.items():
        (record,) = read("x.epub", data, document_bytes=50_000)
        assert (record.id, record.fault) == ("s:x.epub", fault)


def test_a_book_whose_fonts_are_locked_is_read(read) -> None:
    sink = BytesIO(epub())
    with zipfile.ZipFile(sink, "a") as book:
        book.writestr("META-INF/encryption.xml", "<e><CipherReference URI='OEBPS/font.ttf'/></e>")
    (record,) = read("x.epub", sink.getvalue())
    assert not record.fault


def test_a_pdf_is_the_text_of_its_pages(read) -> None:
    (record,) = read("x.pdf", pdf("Hello page one", "Hello page two"))
    assert record.data == b"Hello page one\n\nHello page two"
    assert record.time.startswith("2021-02-03")


def test_a_damaged_pdf_is_a_fault(read) -> None:
    (record,) = read("x.pdf", b"%PDF-1.4\nnothing")
    assert (record.id, record.fault) == ("s:x.pdf", "not_pdf")


def test_a_pdf_that_takes_too_long_is_a_fault(read, monkeypatch) -> None:
    """Some kB that unpack to 9 MB of instructions."""
    # The clock may ring while hypothesis watches the garbage collector, or while pytest tells of that, and rings again.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    slow = zlib.compress(b"BT /F1 1 Tf (a) Tj ET\n" * 400_000, 9)
    length = len(zlib.compress(b"BT /F1 12 Tf 72 720 Td (mark) Tj ET"))
    data = pdf("mark").replace(zlib.compress(b"BT /F1 12 Tf 72 720 Td (mark) Tj ET"), slow)
    data = data.replace(b"/Length %d" % length, b"/Length %d" % len(slow))
    (record,) = read("x.pdf", data, document_s=0.3)
    assert (record.fault, record.threshold) == ("too_slow", 0.3)


def test_without_pypdf_the_error_says_what_to_install(read, monkeypatch) -> None:
    monkeypatch.setattr(pdf_reader.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"reading x.pdf .* needs the package `pypdf`.*\.\[pdf\]"):
        read("x.pdf", pdf("a"))
    with pytest.raises(MissingPackage, match=r"reading a.pdf"):
        read("x.zip", zipped({"a.pdf": pdf("a")}))


def test_a_file_above_the_limit_is_a_fault_with_its_size(read, tmp_path: Path) -> None:
    for name in ("x.txt", "x.html", "x.tex", "x.xml", "x.nxml", "x.pdf"):
        (record,) = read(name, b"a" * 5000, document_bytes=1000)
        assert (record.id, record.fault, record.value, record.threshold) == (f"s:{name}", "too_large", 5000, 1000)
