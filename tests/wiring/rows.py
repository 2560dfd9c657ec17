"""A key of the recipe, another value for it, and what must then differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ropewalk.config.schema import Field, fields_of, item_of, section_of
from ropewalk.flow.recipe import Recipe
from tests.wiring.runs import Facts, planned, prepared, recipe_of, trained

Given = tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """Two runs: with `given` alone, and with `key=value` besides. The fact `sees` differs."""

    key: str
    """As on the command line: items of lists have numbers."""
    value: str
    sees: str
    given: Given = ()
    """Settings of both runs; may hold another value of the key."""
    by: Callable[[Recipe], Facts] = trained
    pool: bool = False
    """Whether it needs several processes."""

    @property
    def name(self) -> str:
        """The key as the reference names it."""
        return re.sub(r"\.\d+(?=\.|$)", ".N", self.key)

    def without(self) -> Facts:
        return _facts(self.by, self.given)

    def with_it(self) -> Facts:
        return self.by(recipe_of([*self.given, f"{self.key}={self.value}"]).value)


_KNOWN: dict[tuple[Any, Given], Facts] = {}


def _facts(by: Callable[[Recipe], Facts], given: Given) -> Facts:
    """What many rows are compared with, computed once."""
    key = (by, given)
    if key not in _KNOWN:
        _KNOWN[key] = by(recipe_of(list(given)).value)
    return _KNOWN[key]


def keys_of(kind: type = Recipe, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Every key that a recipe can have; `N` stands for the number of an item."""
    for field in fields_of(kind):
        key = f"{prefix}{field.name}"
        section, item = section_of(field.kind), section_of(item_of(field.kind))
        if section:
            yield from keys_of(section, f"{key}.")
        elif item:
            yield from keys_of(item, f"{key}.N.")
        else:
            yield key, field


__all__ = ["Given", "Row", "keys_of", "planned", "prepared", "trained"]
