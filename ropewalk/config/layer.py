"""A layer of values between the defaults and the recipe, such as the settings of a base run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ropewalk.base.errors import Problem

from .positions import Path

Where = Callable[[str], str]
"""Dotted key -> where the recipe sets it, or the nearest table around it."""


@dataclass(kw_only=True, slots=True)
class Layer:
    """Values by dotted key."""

    values: dict[str, Any] = field(default_factory=dict)
    """Values for keys that the recipe does not set."""
    origins: dict[str, str] = field(default_factory=dict)
    """The origin of each value."""
    exact: dict[str, Any] = field(default_factory=dict)
    """Replacements for values of the recipe: the same setting, spelled out."""
    problems: list[Problem] = field(default_factory=list)
    """Values of the recipe that the layer rules out."""

    def add(self, key: str, value: Any, origin: str) -> None:
        """Adds a value, unless the key has one."""
        if key not in self.values:
            self.values[key], self.origins[key] = value, origin


Beneath = Callable[[Mapping[str, Any], Where], Layer]
"""The recipe's values, as TOML -> the layer beneath it."""


def lay(beneath: Beneath, tree: dict[str, Any], origins: MutableMapping[Path, str], name: str) -> Sequence[Problem]:
    """Puts the layer under `tree`, the values of the recipe `name`; returns the problems that the layer finds."""
    layer = beneath(tree, lambda key: nearest(origins, path_of(key), name))
    for key, value in layer.exact.items():
        *parts, last = path_of(key)
        node: Any = tree
        for part in parts:
            node = node[part]
        node[last] = value
    for key, value in layer.values.items():
        *parts, last = path = path_of(key)
        node = tree
        for part in parts:
            node = node.setdefault(part, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict) and last not in node:
            node[last] = value
            origins[path] = layer.origins[key]
    return layer.problems


def nearest(origins: Mapping[Path, str], path: Path, name: str) -> str:
    """Where the value at `path` was given, or the table around it; `name` when neither was."""
    for depth in range(len(path), 0, -1):
        if path[:depth] in origins:
            return origins[path[:depth]]
    return name


def path_of(key: str) -> Path:
    """The path of a dotted key; numbers count the tables of a list."""
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))
