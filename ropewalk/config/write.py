"""A config dataclass -> TOML, with the origin or the documentation of each value beside it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from .read import DEFAULT, Resolved
from .schema import Field, describe, item_of, section_of, values_of

Remark = Callable[[str, Field], str]


def dump(resolved: Resolved[Any]) -> str:
    """Every value with its origin as a trailing comment, and the same origins as the table `[origins]`.

    Reading the text back (without `[origins]`, `[plugins]` and `format`) gives the same config.
    """
    lines = list(_table(resolved.value, "", lambda key, _: resolved.origin(key)))
    lines += ["", "[origins]", "# Where each value that is not a default came from."]
    lines += [f"{literal(key)} = {literal(where)}" for key, where in sorted(resolved.origins.items())]
    if resolved.plugins:
        lines += ["", "[plugins]", "# Modules of the user's: where they lie, and the SHA-256 of their source."]
    for name, plugin in sorted(resolved.plugins.items()):
        lines.append(f"{name} = {{folder = {literal(plugin.folder)}, digest = {literal(plugin.digest)}}}")
    return "\n".join(lines).strip() + "\n"


def show(resolved: Resolved[Any], *, changed_only: bool = False) -> str:
    """For reading: every value (or only those that are not defaults) with its origin."""

    def remark(key: str, field: Field) -> str:
        return resolved.origin(key)

    def wanted(key: str, value: Any) -> bool:
        return not changed_only or resolved.origin(key) != DEFAULT

    return "\n".join(_table(resolved.value, "", remark, wanted)).strip() + "\n"


def _table(
    value: Any, prefix: str, remark: Remark, wanted: Callable[[str, Any], bool] = lambda key, value: True
) -> Iterator[str]:
    """The lines of one table: its own keys first, then its sub-tables, as TOML demands."""
    rows: list[tuple[str, str]] = []
    tables: list[tuple[str, Any]] = []
    for field, child in values_of(value):
        key = f"{prefix}{field.name}"
        item = item_of(field.kind)
        if child not in (None, ()) and (dataclasses.is_dataclass(child) or (item is not None and section_of(item))):
            tables.append((key, child))
        elif not wanted(key, child):
            continue
        elif child is None:
            rows.append((f"# {field.name} = not set ({describe(field.kind)})", remark(key, field)))
        else:
            rows.append((f"{field.name} = {literal(child)}", remark(key, field)))
    width = min(40, max((len(text) for text, _ in rows), default=0))
    yield from (f"{text:<{width}}  # {_one_line(note)}" if note else text for text, note in rows)
    for key, child in tables:
        items = child if isinstance(child, tuple) else (child,)
        for index, part in enumerate(items):
            inner = f"{key}.{index}." if isinstance(child, tuple) else f"{key}."
            body = list(_table(part, inner, remark, wanted))
            if body:
                header = _header(key)
                # A table that holds nothing but tables needs no header of its own.
                if isinstance(child, tuple) or body[0] != "":
                    yield from ("", f"[[{header}]]" if isinstance(child, tuple) else f"[{header}]")
                yield from body


def shown(value: Any) -> str:
    """For people."""
    return "not set" if value is None else literal(value)


def literal(value: Any) -> str:
    """`value` as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the delete character, which JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" in text or "n" in text else f"{text}.0"
    return str(value)


def plain(value: Any) -> Any:
    """A config as dicts, lists and scalars, for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(child) for field, child in values_of(value)}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def _one_line(note: str) -> str:
    """A comment ends at the line's end and holds no control characters."""
    return re.sub(r"[\x00-\x1f\x7f]", " ", note)


def _header(key: str) -> str:
    return ".".join(part for part in key.split(".") if not part.isdigit())
