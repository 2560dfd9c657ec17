"""A JSON object, or a row of a table -> a document: its text or its dialogue, its address, time and licence."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ..chat import ANSWERS, ROLES, Turn, join_turns
from ..config import Source
from .item import Fault, Item

LABEL_CHARACTERS = 2000
"""Longest address, time or licence that is carried; the rest is cut."""


class Pair(NamedTuple):
    """Keys of a question and its answer, where a record holds one of each."""

    question: str
    more: str
    """What may follow the question: the input of an instruction, its context."""
    answer: str


PAIRS = (
    Pair("instruction", "input", "output"),  # Alpaca
    Pair("instruction", "context", "response"),  # Dolly
    Pair("prompt", "", "completion"),
    Pair("prompt", "", "response"),
    Pair("question", "", "answer"),
    Pair("question", "", "response"),
    Pair("query", "", "response"),
    Pair("problem", "", "solution"),
    Pair("input", "", "output"),
)
"""Names that data sets in use have for them."""


def pair_of(keys: Collection[str]) -> Pair | None:
    """The names of question and answer among `keys`."""
    return next((pair for pair in PAIRS if pair.question in keys and pair.answer in keys), None)


def parsed(data: bytes) -> Any:
    """The value of one JSON text; Fault when it is none."""
    import orjson  # what only trains does without it

    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return _parsed_slowly(data)


def document(suffix: str, value: Any, *, settings: Source, raw: bytes = b"") -> Item:
    """The document in `value`, or a fault with its `raw` bytes."""
    try:
        data = dialogue(value, key=settings.text_key) if settings.format == "chat" else text(value, settings.text_key)
    except Fault as fault:
        return fault.item(suffix, raw)
    if not isinstance(value, dict):
        return Item(suffix, data)
    return Item(
        suffix,
        data,
        url=label(found(value, settings.url_key)),
        time=label(found(value, settings.time_key)),
        licence=label(found(value, settings.license_key)),
    )


def text(value: Any, key: str) -> bytes:
    """The text under `key`, as UTF-8."""
    if not isinstance(value, dict):
        raise Fault("not_object")
    words = found(value, key, _MISSING)
    if words is _MISSING:
        raise Fault("no_text_key")
    if not isinstance(words, str):
        raise Fault("text_not_string")
    return _encoded(words)


def dialogue(value: Any, *, key: str) -> bytes:
    """The turns of a dialogue as one text (`chat.join_turns`)."""
    turns = value if isinstance(value, list) else _turns(value, key)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise Fault("turns_not_objects")
    spoken = [Turn(*_role_and_content(turn)) for turn in turns]
    if all(turn.role != ANSWERS for turn in spoken):
        raise Fault("no_answer")
    system = value.get("system") if isinstance(value, dict) else None
    if isinstance(system, str) and system and spoken[0].role != "system":
        spoken.insert(0, Turn("system", system))
    return _encoded(join_turns(spoken))


def found(value: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """What stands under `key`, or under the path of keys that its dots make."""
    if key in value:
        return value[key]
    inner: Any = value
    for name in key.split("."):
        if not isinstance(inner, dict) or name not in inner:
            return default
        inner = inner[name]
    return inner


def label(value: Any) -> str:
    """An address, time or licence as text; empty for anything but text and numbers."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return str(value)[:LABEL_CHARACTERS].encode("utf-8", "replace").decode()


_MISSING = object()


def _parsed_slowly(data: bytes) -> Any:
    """Takes what orjson refuses and people write: a byte order mark, NaN, half of a surrogate pair, long numbers."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise Fault("not_utf8") from None
    except RecursionError:
        raise Fault("too_deep") from None
    except ValueError:
        raise Fault("not_json") from None


def _encoded(words: str) -> bytes:
    # An escaped half of a surrogate pair is legal JSON and no text: `normalise` removes it as not_utf8.
    return words.encode("utf-8", "surrogatepass")


def _turns(value: Any, key: str) -> Any:
    if not isinstance(value, dict):
        raise Fault("not_object")
    for name in (key, "messages", "conversations"):
        turns = found(value, name)
        if turns is not None and (name != key or isinstance(turns, list)):
            return turns
    if pair := pair_of(value):
        question, more = value[pair.question], value.get(pair.more)
        if isinstance(question, str) and isinstance(more, str) and more.strip():
            question = f"{question}\n\n{more}"
        return [{"role": "user", "content": question}, {"role": ANSWERS, "content": value[pair.answer]}]
    raise Fault("no_turns")


def _role_and_content(turn: dict[str, Any]) -> tuple[str, str]:
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = _joined(content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise Fault("turn_not_text")
    return ROLES.get(role.strip().lower(), role), content


def _joined(pieces: list[Any]) -> str | None:
    """The text of a content that comes in pieces, None when one of them is an image or the like."""
    words = [piece.get("text") if isinstance(piece, dict) else piece for piece in pieces]
    whole = [word for word in words if isinstance(word, str)]
    return "".join(whole) if len(whole) == len(words) else None
