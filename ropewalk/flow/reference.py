"""The recipe's reference, from the dataclasses: the page of the docs and the commented recipe of `ropewalk new`."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ropewalk.config.schema import Field, describe, fields_of, item_of, plugin_fields, section_of
from ropewalk.config.write import literal
from ropewalk.prepare.config import Source

from .new.sizing import DecidedSetting
from .recipe import Recipe


def recipe_page() -> str:
    """docs/reference/recipe.md."""
    head = [
        "# Recipe reference",
        "",
        "Every setting of a recipe, generated from the dataclasses by `make docs`. Write a setting in the recipe's",
        "TOML file or as `section.key=value` on the command line. *May change* says whether a run that has begun",
        "accepts another value; *more*: a run may [continue with more](../guides/runs.md#continue-a-finished-run).",
        'Where `"module:attr"` is a choice, a recipe may name [a kind of your own](../guides/extending.md).',
    ]
    return "\n".join([*head, *_tables(Recipe, "")]) + "\n"


def commented_recipe(
    name: str,
    *,
    head: Sequence[str],
    sources: Sequence[Mapping[str, DecidedSetting]],
    given: Mapping[str, DecidedSetting],
) -> str:
    """A recipe with every setting and its meaning. Those that were decided are set, with their reasons: of each of the
    `sources` by key, of all else by dotted key. The others are comments with their defaults. It begins with `head`."""
    lines = [*(f"# {line}".rstrip() for line in head), ""]
    lines += _commented(Recipe, "", {"name": DecidedSetting(value=name, reason=""), **given}, skip={"prepare"})
    for number, source in enumerate(sources):
        lines += _commented_source(source, documented=number == 0)
    for field in fields_of(Recipe):
        section = section_of(field.kind)
        if section:
            lines += _commented_section(section, field.name, given, optional=field.default is None)
    return "\n".join(lines) + "\n"


def _commented_source(source: Mapping[str, DecidedSetting], *, documented: bool) -> Iterator[str]:
    """A `[[prepare.sources]]` table; what its settings mean stands above those of the first one."""
    yield from ("", "[[prepare.sources]]")
    yield from _commented(Source, "", source, documented=documented)
    for field in fields_of(Source):
        inner = section_of(field.kind)
        if inner:
            key = f"prepare.sources.{field.name}"
            yield from ("", f"#[{key}]")
            yield from _commented(inner, "", {}, documented=documented)


def _commented_section(
    section: type, key: str, given: Mapping[str, DecidedSetting], *, optional: bool
) -> Iterator[str]:
    """A table, with those inside it; one that is `optional` is there only when its header is, hence a comment too."""
    optional = optional and not any(name.startswith(f"{key}.") for name in given)
    yield from ("", f"#[{key}]" if optional else f"[{key}]")
    yield from _commented(section, f"{key}.", given)
    for field in fields_of(section):
        inner = section_of(field.kind)
        if inner:
            inside = optional or field.default is None
            yield from _commented_section(inner, f"{key}.{field.name}", given, optional=inside)


def _commented(
    cls: type, prefix: str, given: Mapping[str, DecidedSetting], skip: Collection[str] = (), *, documented: bool = True
) -> Iterator[str]:
    """Meaning, reason and value of every setting of a table, those that were not `given` as comments."""
    for field in fields_of(cls):
        if field.name in skip or section_of(field.kind) or _is_table_list(field):
            continue
        found = given.get(f"{prefix}{field.name}")
        if documented:
            yield from (f"# {line}" for line in textwrap.wrap(field.doc, 110))
        if found is None:
            value = "..." if field.required or field.default is None else literal(field.default)
            yield f"#{field.name} = {value}"
        else:
            yield from (f"# -> {line}" for line in textwrap.wrap(found.reason, 107))
            yield f"{field.name} = {literal(found.value)}"


def _tables(cls: type, prefix: str) -> Iterator[str]:
    fields = fields_of(cls)
    doc = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    yield from ("", f"## `[{prefix}]`" if prefix else "## Top level", "", doc, "")
    yield "| key | type | default | may change | meaning |"
    yield "|---|---|---|---|---|"
    for field in fields:
        if not section_of(field.kind) and not _is_table_list(field):
            yield _row(field, measured_anew=prefix == "evaluate")
    for field in plugin_fields(cls):
        yield f"| `{field.name}` | table | not set |  | {field.doc} |"
    for field in fields:
        section = section_of(field.kind) or (section_of(item_of(field.kind)) if item_of(field.kind) else None)
        if section:
            yield from _tables(section, f"{prefix}.{field.name}".lstrip("."))


def _row(field: Field, *, measured_anew: bool) -> str:
    kind = describe(field.kind).replace("|", "\\|")
    limits = f", {field.range}" if field.range else ""
    change = "yes" if field.continues or measured_anew else "more" if field.extends else ""
    return (
        f"| `{field.name}` | {kind}{limits} | {_default(field)} | {change} | {field.doc.replace('|', chr(92) + '|')} |"
    )


def _default(field: Field) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    value: Any = field.default
    return "not set" if value is None else f"`{literal(value)}`".replace("|", "\\|")


def _is_table_list(field: Field) -> bool:
    item = item_of(field.kind)
    return item is not None and section_of(item) is not None


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.md").write_text(recipe_page(), encoding="utf-8")
