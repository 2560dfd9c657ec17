"""HTML -> text: the words that a reader sees, block by block. It removes tags and judges nothing.

Menus and footers stay: to tell the main text of a page from what surrounds it is another step.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from html import unescape

from .caps import capped
from .item import Fault, Input, Item
from .paragraphs import Paragraphs
from .streams import whole


def html(given: Input) -> Iterator[Item]:
    """The page as one document."""
    data = whole(given.stream, limit=given.limit)
    try:
        yield Item("", capped(given.settings.limits, lambda: page_text(data).encode()))
    except Fault as fault:
        yield fault.item("", data)


def page_text(data: bytes, *, charset: str = "") -> str:
    """The text of a page; `charset` is what the server said. Fault when the page is not in the encoding it names."""
    return markup_text(decoded(data, charset=charset))


def decoded(data: bytes, *, charset: str = "") -> str:
    """`data` by its byte order mark, else by what the server said, else by its own declaration, else as UTF-8."""
    for mark, name in _MARKS:
        if data.startswith(mark):
            return _decoded(data[len(mark) :], name)
    declared = _DECLARATION.search(data[:4096])
    label = charset or (declared[1].decode("ascii") if declared else "utf-8")
    known = _ENCODINGS.get(label.strip("\"' ").lower())
    if known is None:
        raise Fault("unknown_encoding")
    return _decoded(data, known)


def _decoded(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        raise Fault("wrong_encoding") from None


_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_DECLARATION = re.compile(rb"""(?:charset|encoding)\s*=\s*["']?\s*([A-Za-z0-9_:.-]{1,40})""")

# Labels on the left as the WHATWG Encoding Standard reads them; on the right Python's codecs. A list, because some of
# Python's codecs are no encodings of text, and one (punycode) takes quadratic time.
_ENCODINGS = {
    label: codec
    for codec, labels in {
        "utf-8": "utf-8 utf8 unicode-1-1-utf-8 x-unicode20utf8",
        "utf-16-le": "utf-16 utf-16le unicode ucs-2",
        "utf-16-be": "utf-16be",
        "cp1252": "windows-1252 iso-8859-1 iso8859-1 iso_8859-1 latin1 latin-1 l1 ascii us-ascii cp1252 x-cp1252",
        "iso8859-2": "iso-8859-2 iso8859-2 latin2",
        "iso8859-4": "iso-8859-4 iso8859-4 latin4",
        "iso8859-5": "iso-8859-5 iso8859-5 cyrillic",
        "iso8859-6": "iso-8859-6 iso8859-6 arabic",
        "iso8859-7": "iso-8859-7 iso8859-7 greek",
        "iso8859-8": "iso-8859-8 iso8859-8 iso-8859-8-i hebrew",
        "iso8859-13": "iso-8859-13 iso8859-13",
        "iso8859-15": "iso-8859-15 iso8859-15 latin-9 latin9 l9",
        "cp1250": "windows-1250 cp1250 x-cp1250",
        "cp1251": "windows-1251 cp1251 x-cp1251",
        "cp1253": "windows-1253 cp1253",
        "cp1254": "windows-1254 cp1254 iso-8859-9 iso8859-9 latin5 l5",
        "cp1255": "windows-1255 cp1255",
        "cp1256": "windows-1256 cp1256",
        "cp1257": "windows-1257 cp1257",
        "cp1258": "windows-1258 cp1258",
        "cp874": "windows-874 tis-620 iso-8859-11 iso8859-11 dos-874",
        "cp866": "ibm866 866 cp866",
        "koi8-r": "koi8-r koi8 koi koi8_r",
        "koi8-u": "koi8-u koi8-ru",
        "mac-roman": "macintosh mac x-mac-roman",
        "gb18030": "gb18030 gbk gb2312 gb_2312-80 x-gbk cp936 csgb2312 chinese",
        "big5hkscs": "big5 big5-hkscs x-x-big5 cn-big5",
        "euc-jp": "euc-jp x-euc-jp eucjp",
        "iso2022-jp": "iso-2022-jp",
        "cp932": "shift_jis shift-jis sjis x-sjis windows-31j ms932",
        "cp949": "euc-kr windows-949 ks_c_5601-1987 ksc5601 korean",
    }.items()
    for label in labels.split()
}

_TOKEN = re.compile(
    r"""<!--.*?(?:-->|\Z)                                    # comment
    | <[!?][^>]*(?:>|\Z)                                     # declaration, processing instruction
    | <(/?)([a-z][^\s/>]*)(?:[^>"']++|"[^"]*+"|'[^']*+')*+>  # tag; > may stand in a quoted value
    | <(/?)([a-z][^\s/>]*)[^>]*(?:>|\Z)                      # tag with a quotation mark too many, or cut off
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
# Possessive repetitions (++, *+) do not go back: every alternative takes time linear in what it takes or refuses.

_SWALLOWED = {"script", "style"}
"""Left open, they swallow the rest of a page, as in browsers."""
_UNSEEN = _SWALLOWED | {
    *("template", "noscript", "iframe", "object", "svg", "canvas", "audio", "video", "select", "datalist"),
}
_PARAGRAPHS = {
    *("p", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "pre", "ul", "ol", "dl", "table", "hr"),
    *("section", "article", "header", "footer", "main", "nav", "aside", "form", "figure"),
}
_LINES = {
    *("div", "li", "dt", "dd", "tr", "br", "caption", "figcaption"),
    *("address", "fieldset", "summary", "details", "title", "body"),
}
_CELLS = {"td", "th"}
_LONG_REFERENCE = re.compile("&#(?:[0-9]{9,}|[xX][0-9a-fA-F]{9,});?")
"""No character has such a number; `html.unescape` fails on those of thousands of digits."""


def markup_text(markup: str) -> str:
    """The text of HTML or XHTML: a line for each line of a block, an empty line between paragraphs.

    White space is collapsed but for `pre`. Not `html.parser`: what it makes of broken pages depends on the version of
    Python, and on some of them it fails.
    """
    page = Paragraphs()
    missing: set[str] = set()
    place = 0
    while token := _TOKEN.search(markup, place):
        page.add(_unescaped(markup[place : token.start()]))
        place = token.end()
        closing, tag = token[1] or token[3], (token[2] or token[4] or "").lower()
        if tag in _UNSEEN and not closing and tag not in missing and not token[0].endswith("/>"):
            end = re.compile(f"</{tag}(?=[\\s/>])[^>]*>", re.IGNORECASE).search(markup, place)
            if end:
                place = end.end()
            elif tag in _SWALLOWED:
                return page.text()
            else:
                # Looked for once: a page of nothing but `<svg>` would else be read once for each.
                missing.add(tag)
        elif tag in _CELLS:
            page.add(" ")
        elif tag in _LINES:
            page.end_line()
        elif tag in _PARAGRAPHS:
            page.end_paragraph(verbatim=tag == "pre" and not closing)
    page.add(_unescaped(markup[place:]))
    return page.text()


def _unescaped(markup: str) -> str:
    return unescape(_LONG_REFERENCE.sub("\ufffd", markup)) if "&" in markup else markup
