"""The page around the sections: one HTML file with its own style and script, nothing fetched.

A content security policy admits only our script, by its hash, as a second defence behind the escaping.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from ..draw.markup import Child, Markup, element, joined

_HERE = Path(__file__).parent


def page(title: str, *body: Child) -> Markup:
    """A complete HTML document."""
    style, script = joined((asset("drawing.css"), asset("page.css"))), asset("hover.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", style),
    )
    whole = element("html", head, element("body", *body, element("script", script)), lang="en")
    return joined((Markup("<!DOCTYPE html>\n"), whole, "\n"))


def section(title: str, *children: Child) -> Markup:
    """A section with a heading; its anchor is the title in lower case."""
    return element("section", element("h2", title), *children, id=title.lower().replace(" ", "-"))


def empty(reason: str) -> Markup:
    """The text of a section without content: the reason."""
    return element("p", reason, class_="empty")


def warning_box(lines: Sequence[str]) -> Child:
    """Warnings, one paragraph each; nothing if there are none."""
    return element("div", [element("p", line) for line in lines], class_="missing") if lines else None


def badge(label: str, tone: str) -> Markup:
    """A word in a frame, coloured as `good`, `bad` or `note`."""
    return element("span", label, class_=f"badge {tone}")


def scrolling(child: Child) -> Markup:
    """`child` in a box that scrolls sideways on a narrow screen."""
    return element("div", child, class_="scroll")


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: Sequence[int] = (),
    class_: str | None = None,
) -> Markup:
    """A table; `numeric` columns are right-aligned. No header row if all heads are empty."""

    def cells(kind: str, row: Sequence[str]) -> list[Markup]:
        return [element(kind, cell, class_="num" if i in numeric else None) for i, cell in enumerate(row)]

    head = element("thead", element("tr", cells("th", heads))) if any(heads) else None
    body = element("tbody", [element("tr", cells("td", row)) for row in rows])
    return element("table", head, body, class_=class_)


def asset(name: str) -> Markup:
    """A style sheet or script of this folder; `drawing.css` has the colours and the styles of stand-alone drawings."""
    return Markup((_HERE / name).read_text(encoding="utf-8"))
