"""The recipe's reference, from the dataclasses: the page of the docs and the commented recipe of `ropewalk new`."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ropewalk.config.schema import Field, describe, fields_of, item_of, section_of
from ropewalk.config.write import literal

from .recipe import Recipe


def recipe_page() -> str:
    """docs/reference/recipe.md."""
    head = [
        "# Recipe reference",
        "",
        "Every setting of a recipe, generated from the dataclasses by `make docs`. Write a setting in the recipe's",
        "TOML file or as `section.key=value` on the command line. *May change* says whether a run that has begun",
        "accepts another value.",
    ]
    return "\n".join([*head, *_tables(Recipe, "")]) + "\n"


def commented_recipe(name: str, sources: str) -> str:
    """A recipe with the given `[[prepare.sources]]` tables and every other setting as a comment with its default."""
    lines = [
        "# A ropewalk recipe. Every setting is here with its default; remove the # before what you change.",
        "# Check it: ropewalk recipe check FILE      Run it: ropewalk run FILE",
        "",
        f"name = {literal(name)}",
        *_commented(Recipe, skip={"name", "prepare"}),
        "",
        sources.rstrip(),
    ]
    for field in fields_of(Recipe):
        section = section_of(field.kind)
        if section:
            lines += _commented_section(section, field.name, optional=field.default is None)
    return "\n".join(lines) + "\n"


def _commented_section(section: type, key: str, *, optional: bool) -> Iterator[str]:
    """A table, with those inside it; one that is `optional` is there only when its header is, hence a comment too."""
    yield from ("", f"#[{key}]" if optional else f"[{key}]")
    yield from _commented(section)
    for field in fields_of(section):
        inner = section_of(field.kind)
        if inner:
            yield from _commented_section(inner, f"{key}.{field.name}", optional=optional or field.default is None)


def _commented(cls: type, skip: Collection[str] = ()) -> Iterator[str]:
    for field in fields_of(cls):
        if field.name in skip or section_of(field.kind) or _is_table_list(field):
            continue
        yield from (f"# {line}" for line in textwrap.wrap(field.doc, 110))
        value = "..." if field.required or field.default is None else literal(field.default)
        yield f"#{field.name} = {value}"


def _tables(cls: type, prefix: str) -> Iterator[str]:
    fields = fields_of(cls)
    doc = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    yield from ("", f"## `[{prefix}]`" if prefix else "## Top level", "", doc, "")
    yield "| key | type | default | may change | meaning |"
    yield "|---|---|---|---|---|"
    for field in fields:
        if not section_of(field.kind) and not _is_table_list(field):
            yield _row(field, measured_anew=prefix == "evaluate")
    for field in fields:
        section = section_of(field.kind) or (section_of(item_of(field.kind)) if item_of(field.kind) else None)
        if section:
            yield from _tables(section, f"{prefix}.{field.name}".lstrip("."))


def _row(field: Field, *, measured_anew: bool) -> str:
    kind = describe(field.kind).replace("|", "\\|")
    limits = f", {field.range}" if field.range else ""
    change = "yes" if field.continues or measured_anew else ""
    return (
        f"| `{field.name}` | {kind}{limits} | {_default(field)} | {change} | {field.doc.replace('|', chr(92) + '|')} |"
    )


def _default(field: Field) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    value: Any = field.default
    return "not set" if value is None else f"`{literal(value)}`"


def _is_table_list(field: Field) -> bool:
    item = item_of(field.kind)
    return item is not None and section_of(item) is not None


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.md").write_text(recipe_page(), encoding="utf-8")
