"""What records are for: text under one key, dialogues, or the same text in several languages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..config import LANGUAGES
from ..readers.item import Fault
from ..readers.rows import dialogue, pair_of
from .records import Key, keys_of

USUAL = (
    "text",
    "content",
    "body",
    "document",
    "article",
    "raw_content",
    "page_content",
    "markdown",
    "passage",
    "code",
    "prompt",
)
"""Names that the text of a record often has, the most usual first."""
_NO_TEXT = re.compile(
    r"(^|[._])(id|uid|uuid|url|uri|link|path|file|filename|hash|sha\d*|md5|date|time|timestamp)$", re.I
)
"""Names whose texts are no running text."""
_WORDS = 20
"""Characters that a text has on average, to be one that is worth training on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How records are best read."""

    kind: Literal["text", "chat", "parallel", "none"]
    """`parallel`: the same text in several languages, each under its own key."""
    text_keys: tuple[str, ...] = ()
    """Where the text is: one key, several of `parallel`, none of dialogues that are found without."""
    chat: str = ""
    """What kind of dialogues these are, in words."""
    others: tuple[Key, ...] = ()
    """Other keys with text, which a source with this key leaves out."""
    keys: tuple[Key, ...] = ()
    """All there are."""


def shape_of(objects: Sequence[dict[str, Any]]) -> Shape:
    """How these records are best read."""
    keys = tuple(keys_of(objects))
    return _dialogues(objects, keys) or _parallel(keys) or _text(keys)


def _dialogues(objects: Sequence[dict[str, Any]], keys: tuple[Key, ...]) -> Shape | None:
    for key in keys:
        if key.kind == "list of turns" and key.share >= 0.5 and _are_read(objects, key.name):
            usual = key.name in ("messages", "conversations")
            words = f"dialogues under `{key.name}`" + (" (ShareGPT)" if key.name == "conversations" else "")
            return Shape(kind="chat", text_keys=() if usual else (key.name,), chat=words, keys=keys)
    names = {key.name for key in keys if key.kind == "text" and key.share >= 0.5}
    pair = pair_of(names)
    if not pair or not _are_read(objects, "text"):
        return None
    known = {"instruction": " (Alpaca)" if pair.answer == "output" else " (Dolly)"}.get(pair.question, "")
    used = {pair.question, pair.answer, pair.more}
    others = tuple(key for key in _running(keys) if key.name not in used and key.name != "text")
    words = f"a question under `{pair.question}` and its answer under `{pair.answer}`{known}"
    return Shape(kind="chat", chat=words, others=others, keys=keys)


def _are_read(objects: Sequence[dict[str, Any]], key: str) -> bool:
    """Whether most of these records are dialogues that can be read."""
    read = 0
    for value in objects:
        try:
            dialogue(value, key=key)
            read += 1
        except Fault:
            continue
    return 2 * read >= len(objects) > 0


def _parallel(keys: tuple[Key, ...]) -> Shape | None:
    """Two keys or more that are named as languages, in one object."""
    by_parent: dict[str, list[Key]] = {}
    for key in keys:
        parent, _, name = key.name.rpartition(".")
        code = re.split("[-_]", name)[0].lower()
        if key.kind == "text" and code in LANGUAGES and len(code) == 2 and key.share >= 0.5:
            by_parent.setdefault(parent, []).append(key)
    found = next((group for group in by_parent.values() if len(group) > 1), None)
    if not found or max(key.characters for key in keys) > 2 * max(key.characters for key in found):
        return None
    others = tuple(key for key in _running(keys) if key not in found)
    return Shape(kind="parallel", text_keys=tuple(key.name for key in found), others=others, keys=keys)


def _text(keys: tuple[Key, ...]) -> Shape:
    running = _running(keys)
    if not running:
        return Shape(kind="none", keys=keys)
    longest = max(running, key=lambda key: key.characters * key.share)
    usual = [key for name in USUAL for key in running if key.name == name]
    best = next((key for key in usual if 4 * key.characters * key.share >= longest.characters * longest.share), longest)
    others = tuple(key for key in running if key is not best and 10 * key.characters >= best.characters)
    return Shape(kind="text", text_keys=(best.name,), others=others, keys=keys)


def _running(keys: Sequence[Key]) -> list[Key]:
    """Those that hold running text, as far as names and lengths tell."""
    texts = [key for key in keys if key.kind == "text"]
    texts = [key for key in texts if not key.markup] or texts
    named = [key for key in texts if not _NO_TEXT.search(key.name)]
    return [key for key in named if key.characters >= _WORDS] or named or texts
