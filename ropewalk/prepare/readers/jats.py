"""Scientific articles in JATS XML -> title, abstract and body; formulas as TeX where the article has it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .caps import capped
from .item import Fault, Input, Item
from .paragraphs import Paragraphs
from .rows import label
from .streams import whole
from .xml import parse_xml


def jats(given: Input) -> Iterator[Item]:
    """One document an article; those of a set of articles are numbered from 1."""
    data = whole(given.stream, limit=given.limit)
    yield from _articles(data, given)


def xml(given: Input) -> Iterator[Item]:
    """An XML file that nobody has called JATS: articles when its first element says so, else one text as it is."""
    data = whole(given.stream, limit=given.limit)
    root = _ROOT.search(data[:20_000])
    if root and root[1] in _ARTICLES:
        yield from _articles(data, given)
    else:
        yield Item("", data)


_ROOT = re.compile(rb"<([A-Za-z_][^\s/>]*)")
_ARTICLES = (b"article", b"pmc-articleset", b"article-set")


def _articles(data: bytes, given: Input) -> Iterator[Item]:
    reader = _Articles()
    try:
        capped(given.settings.limits, lambda: parse_xml(data, reader))
    except Fault as fault:
        yield from _numbered(reader.found)
        yield fault.item(":rest" if reader.found else "", data if not reader.found else b"")
        return
    yield from _numbered(reader.found, alone=not reader.in_set)


def _numbered(found: list[Item], *, alone: bool = False) -> Iterator[Item]:
    for number, item in enumerate(found, 1):
        yield item if alone else item._replace(suffix=f":{number}")


_FRONT = {"title-group", "abstract", "trans-abstract"}
"""What is text in the front matter; authors, journals and dates are not."""
_UNSEEN = {"ref-list", "fn-group", "table", "graphic", "media", "object-id", "label", "permissions", "alt-text"}
_LINES = {"title", "article-title", "subtitle", "list-item", "def-item", "caption", "attrib", "speaker", "verse-line"}
_PARAGRAPHS = {
    *("p", "sec", "abstract", "trans-abstract", "body", "back", "ack", "app"),
    *("disp-formula", "disp-quote", "list", "boxed-text"),
}


@dataclass(slots=True)
class _Article:
    """An article that is being read."""

    text: Paragraphs = field(default_factory=Paragraphs)
    url: str = ""
    date: dict[str, str] = field(default_factory=dict)
    licence: str = ""
    tex: list[str] = field(default_factory=list)
    """The formula that is being read, as TeX and as the text of MathML."""
    mathml: list[str] = field(default_factory=list)

    def item(self) -> Item:
        year, month, day = (self.date.get(name, "") for name in ("year", "month", "day"))
        parts = [part.zfill(2) for part in (year, month if year else "", day if year and month else "") if part]
        return Item(
            "", self.text.text().encode(), url=label(self.url), time=label("-".join(parts)), licence=label(self.licence)
        )


class _Articles:
    """The events of a file -> its articles."""

    def __init__(self) -> None:
        self.found: list[Item] = []
        self.in_set = False
        self._path: list[str] = []
        self._unseen = 0
        self._front = 0
        self._article: _Article | None = None
        self._field = ""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "article" and self._article is None:
            self._article = _Article()
            self.in_set = bool(self._path)
        self._path.append(name)
        if self._article is None:
            return
        self._unseen += name in _UNSEEN
        self._front += name in _FRONT
        if name == "license":
            self._article.licence = self._article.licence or attributes.get("href", "")
        elif name == "pub-date":
            self._field = "date" if not self._article.date else ""
        elif name == "article-id":
            self._field = "doi" if attributes.get("pub-id-type") == "doi" and "front" in self._path else ""
        self._break(name)

    def end(self, name: str) -> None:
        self._path.pop()
        if self._article is None:
            return
        self._unseen -= name in _UNSEEN
        self._front -= name in _FRONT
        if name in ("pub-date", "article-id"):
            self._field = ""
        elif name in ("inline-formula", "disp-formula"):
            self._end_formula(self._article)
        self._break(name)
        if name == "article" and "article" not in self._path:
            self.found.append(self._article.item())
            self._article = None

    def data(self, text: str) -> None:
        article = self._article
        if article is None:
            return
        if self._field == "date" and self._path[-1] in ("year", "month", "day"):
            article.date[self._path[-1]] = article.date.get(self._path[-1], "") + text.strip()
        elif self._field == "doi":
            article.url = (article.url or "https://doi.org/") + text.strip()
        elif self._path[-1] == "license_ref":
            article.licence = article.licence or text.strip()
        elif self._unseen or ("front" in self._path and not self._front):
            return
        elif "tex-math" in self._path:
            article.tex.append(text)
        elif "math" in self._path:
            article.mathml.append(text)
        else:
            article.text.add(text)

    def _break(self, name: str) -> None:
        assert self._article is not None
        if name in _LINES:
            self._article.text.end_line()
        elif name in _PARAGRAPHS:
            self._article.text.end_paragraph()

    def _end_formula(self, article: _Article) -> None:
        """TeX where there is some: MathML without its tags has lost what is above and what below."""
        tex = "".join(article.tex)
        start, stop = tex.find(_TEX_BEGIN), tex.rfind(_TEX_END)
        if 0 <= start < stop:
            tex = tex[start + len(_TEX_BEGIN) : stop]
        article.text.add(tex or "".join(article.mathml))
        article.tex.clear()
        article.mathml.clear()


_TEX_BEGIN, _TEX_END = "\\begin{document}", "\\end{document}"
"""PubMed Central puts every formula into a LaTeX document of its own."""
