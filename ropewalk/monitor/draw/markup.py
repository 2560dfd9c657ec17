"""HTML and SVG as values: elements close themselves and text is escaped unless it is already `Markup`.

Everything on the page goes through `element`, so a sample that contains `</pre><script>` stays text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import TypeAlias


class Markup(str):
    """Text that is already HTML. Built here, or from files of this package; never from files of a run."""

    __slots__ = ()


Child: TypeAlias = "str | Iterable[Child] | None"
Attribute: TypeAlias = str | int | float | bool | None

_VOID = frozenset({"br", "meta"})
# Neither HTML nor UTF-8 can carry these: control characters except tab and newline, and lone surrogates.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


def element(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """One element. `class_` and `data_x` become `class` and `data-x`; None and False leave one out."""
    opening = f"<{name}{''.join(map(_attribute, attributes.items()))}>"
    if name in _VOID:
        return Markup(opening)
    return Markup(f"{opening}{joined(children)}</{name}>")


def joined(children: Iterable[Child], separator: str = "") -> Markup:
    """The concatenated children, each escaped unless it is `Markup`."""
    return Markup(separator.join(map(_rendered, children)))


def escape(text: str) -> Markup:
    """`text` escaped for HTML."""
    return Markup(html.escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))))


def number(value: float) -> str:
    """A coordinate with at most two decimals, finer than a pixel of any screen."""
    return f"{round(value, 2):g}" if abs(value) < 1e5 else f"{value:.0f}"


def _rendered(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return escape(child)
    return joined(child)


def _attribute(item: tuple[str, Attribute]) -> str:
    name, value = item
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{escape(value if isinstance(value, str) else number(value))}"'
