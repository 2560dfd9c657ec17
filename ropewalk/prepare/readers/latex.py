r"""LaTeX -> its body as LaTeX, without what is for the compiler: comments, preamble, bibliography, own macros.

Formulas and markup stay: they are what a reader of papers reads. This is what RedPajama does to the papers of arXiv.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .caps import capped
from .item import Fault, Input, Item
from .streams import whole
from .web import decoded


def latex(given: Input) -> Iterator[Item]:
    """The file as one document."""
    data = whole(given.stream, limit=given.limit)
    try:
        yield Item("", capped(given.settings.limits, lambda: latex_text(data, limit=given.limit).encode()))
    except Fault as fault:
        yield fault.item("", data)


def latex_text(data: bytes, *, limit: int) -> str:
    """The text of a LaTeX file; Fault when macros make it longer than `limit` characters."""
    declared = _ENCODING.search(data)
    source = decoded(data, charset=declared[1].decode() if declared else "utf-8").replace("\r\n", "\n")
    pieces = [piece if verbatim else _without_comments(piece) for piece, verbatim in _verbatim(source)]
    source = "".join(pieces)
    macros = dict(_macros(source))
    preamble, begin, body = source.partition("\\begin{document}")
    if begin:
        title = _argument(preamble, preamble.find("\\title{") + 6) if "\\title{" in preamble else ""
        body = (f"\\title{{{title}}}\n" if title else "") + body.partition("\\end{document}")[0]
    else:
        body = source
    for environment in ("thebibliography", "comment"):
        body = _without_environment(body, environment)
    body = _expanded(_FOR_COMPILER.sub("", body), macros, limit=limit)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", body)).strip() + "\n"


_ENCODING = re.compile(rb"\\usepackage\[([\w-]{1,20})\]\{inputenc\}")
_COMMENT_LINE = re.compile(r"^[ \t]*%.*\n?", re.MULTILINE)
_COMMENT = re.compile(r"(?<!\\)((?:\\\\)*)%.*")
r"""`\%` is a percent sign, `\\%` a line break and a comment."""
_VERBATIM = re.compile(r"\\begin\{(verbatim\*?|Verbatim|lstlisting|minted)\}")
_FOR_COMPILER = re.compile(
    r"\\(?:bibliographystyle|bibliography|(?:re)?newcommand\*?|providecommand\*?|def|DeclareMathOperator\*?)"
    r"(?:\{\\\w+\}|\\\w+)?(?:\{[^{}\n]*\})+\n?"
)
_MACRO = re.compile(
    r"\\(?:(?:(?:re)?newcommand|providecommand|DeclareMathOperator)\*?\s*(?:\{\s*\\([a-zA-Z]+)\s*\}|\\([a-zA-Z]+))|def\\([a-zA-Z]+))\s*(?=\{)"
)
_NAME = re.compile(r"\\([a-zA-Z]+)(?:\{\})?")
_BRACE = re.compile(r"(?<!\\)[{}]")
_LONGEST_MACRO = 2000
"""Characters of a macro or a title; longer ones are left as they are."""


def _verbatim(source: str) -> Iterator[tuple[str, bool]]:
    """Pieces of `source` in order, and whether a piece is verbatim text."""
    place = 0
    for found in _VERBATIM.finditer(source):
        if found.start() < place:
            continue
        stop = source.find(f"\\end{{{found[1]}}}", found.end())
        if stop < 0:
            break
        yield source[place : found.start()], False
        yield source[found.start() : stop], True
        place = stop
    yield source[place:], False


def _without_comments(source: str) -> str:
    return _COMMENT.sub(r"\1", _COMMENT_LINE.sub("", source))


def _without_environment(source: str, name: str) -> str:
    first, *rest = source.split(f"\\begin{{{name}}}")
    return first + "".join(part.partition(f"\\end{{{name}}}")[2] for part in rest)


def _macros(source: str) -> Iterator[tuple[str, str]]:
    """Names and bodies of the macros that take no argument."""
    for found in _MACRO.finditer(source):
        body = _argument(source, found.end())
        if body and "#" not in body:
            yield found[1] or found[2] or found[3], body


def _argument(source: str, start: int) -> str:
    """What stands between the brace at `start` and the one that closes it; empty when that is far."""
    depth = 0
    for brace in _BRACE.finditer(source, start, start + _LONGEST_MACRO):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return source[start + 1 : brace.start()]
    return ""


def _expanded(body: str, macros: dict[str, str], *, limit: int) -> str:
    """`body` with its own macros written out, once: a macro inside a macro stays."""
    size = len(body)

    def write_out(found: re.Match[str]) -> str:
        nonlocal size
        text = macros.get(found[1])
        if text is None:
            return found[0]
        size += len(text) - len(found[0])
        if size > limit:
            raise Fault("too_large", value=size, threshold=limit)
        return text

    return _NAME.sub(write_out, body) if macros else body
