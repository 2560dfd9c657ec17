"""The schema of a config dataclass: types, ranges, defaults, documentation, what may change during a run.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Schedule:
        peak_lr: Annotated[float, Range(above=0), CONTINUES] = 3e-4
        \"""Learning rate after warm-up.\"""

The string under a field is its only documentation; `--help`, the reference and the report print it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from .registry import Registry


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a number; for a list, of each item."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def admits(self, value: float) -> bool:
        """Whether `value` lies inside."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {value}" for word, value in words.items() if value is not None)


class Continues:
    """Marks a field that may change when a run continues (recorded as an event); any other change needs a new run."""


class Extends:
    """Marks a field that may grow when a run continues; the conditions are in `flow/continue_run.py`."""


CONTINUES = Continues()
EXTENDS = Extends()


@dataclass(frozen=True, slots=True)
class SettingsOf:
    """Marks a field that holds the settings of a user's own kind, which the field `kind` beside it names; None for a
    built-in kind."""

    kind: str


class PluginName(str):
    """The type of a user's name: "module:attr", or an entry point of an installed package."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a config dataclass."""

    name: str
    kind: Any
    """The type without `Annotated`."""
    default: Any
    """`dataclasses.MISSING` when the field is required."""
    range: Range | None
    continues: bool
    extends: bool
    owner: type
    """The dataclass that declares the field."""
    registry: Registry[Any] | None = None
    """The table of the names that the field takes."""
    settings_of: str = ""
    """The field beside it whose kind has these settings."""
    used_by: tuple[str, ...] = ()
    """The kinds that have this setting, where others of the same table do not."""

    @property
    def doc(self) -> str:
        """The string under the field, on one line. The first call for a class reads its source."""
        owner: Any = self.owner
        text = _attribute_docs(owner).get(self.name, "")
        kinds = [f"`{name}`: {kind.doc}" for name, kind in (self.registry or {}).items() if kind.doc]
        text = " ".join([text, *kinds])
        return f"{text} Used by {', '.join(f'`{kind}`' for kind in self.used_by)}." if self.used_by else text

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


def fields_of(cls: type) -> tuple[Field, ...]:
    """The fields of `cls` in order, without the settings of users' own kinds (`plugin_fields`)."""
    key: Any = cls  # mypy does not see that classes can be hashed
    return tuple(field for field in _fields_of(key) if not field.settings_of)


def plugin_fields(cls: type) -> tuple[Field, ...]:
    """The fields of `cls` with the settings of users' own kinds."""
    key: Any = cls
    return tuple(field for field in _fields_of(key) if field.settings_of)


def values_of(config: Any) -> Iterator[tuple[Field, Any]]:
    """Every field of a config with its value; settings of users' own kinds where there are any."""
    for field in fields_of(type(config)):
        yield field, getattr(config, field.name)
    for field in plugin_fields(type(config)):
        if getattr(config, field.name) is not None:
            yield field, getattr(config, field.name)


def section_of(kind: Any) -> type | None:
    """The dataclass behind `kind` when it is one or an optional one."""
    for choice in options_of(kind):
        if isinstance(choice, type) and dataclasses.is_dataclass(choice):
            return choice
    return None


def item_of(kind: Any) -> Any:
    """The item type of `tuple[X, ...]` or an optional one, None for anything else."""
    for choice in options_of(kind):
        if get_origin(choice) is tuple:
            return _unwrap(get_args(choice)[0])[0]
    return None


def options_of(kind: Any) -> tuple[Any, ...]:
    """The members of a union without None; a single type is a union of one."""
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(_unwrap(arg)[0] for arg in get_args(kind) if arg is not type(None))
    return (kind,)


def describe(kind: Any) -> str:
    """The type as shown to the author of a recipe."""
    names = {int: "integer", float: "number", str: "text", bool: "true or false", PluginName: '"module:attr"'}
    words = []
    for choice in options_of(kind):
        if get_origin(choice) is Literal:
            words += [f'"{arg}"' if isinstance(arg, str) else str(arg) for arg in get_args(choice)]
        elif item_of(choice) is not None:
            words.append(f"list of {describe(item_of(choice))}")
        elif section_of(choice):
            words.append("table")
        else:
            words.append(names.get(choice, getattr(choice, "__name__", str(choice))))
    return " | ".join(words)


@functools.cache
def _fields_of(cls: Any) -> tuple[Field, ...]:
    hints = get_type_hints(cls, include_extras=True)
    found = []
    marked = (mark for hint in hints.values() for mark in _marks(hint))
    tables = [mark for mark in marked if isinstance(mark, Registry)]
    for field in dataclasses.fields(cls):
        kind, _ = _unwrap(hints[field.name])
        marks = _marks(hints[field.name])
        registry = next((mark for mark in marks if isinstance(mark, Registry)), None)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found.append(
            Field(
                name=field.name,
                kind=kind if registry is None else _with_names(kind, registry),
                default=default,
                range=next((mark for mark in marks if isinstance(mark, Range)), None),
                continues=any(isinstance(mark, Continues) for mark in marks),
                extends=any(isinstance(mark, Extends) for mark in marks),
                owner=cls,
                registry=registry,
                settings_of=next((mark.kind for mark in marks if isinstance(mark, SettingsOf)), ""),
                used_by=tuple(kind for table in tables for kind in _users(table, field.name)),
            )
        )
    return tuple(found)


def _users(table: Registry[Any], name: str) -> list[str]:
    """The built-in kinds that read the setting `name`; none when all do, or none."""
    users = [kind for kind in table if name in {f.name for f in dataclasses.fields(table[kind].settings or _None)}]
    return users if len(users) < len(table) else []


@dataclass(frozen=True)
class _None:
    """No settings."""


def _with_names(kind: Any, registry: Registry[Any]) -> Any:
    """`kind` with text replaced by the names of a table and users' names."""
    if get_origin(kind) in (Union, types.UnionType):
        return Union[tuple(_with_names(arg, registry) for arg in get_args(kind))]  # noqa: UP007
    if get_origin(kind) is tuple:
        return tuple[_with_names(_unwrap(get_args(kind)[0])[0], registry), ...]  # type: ignore[misc]
    names: Any = Literal.__getitem__(tuple(registry))
    return (names | PluginName if registry else PluginName) if kind is str else kind


def _unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(hint) is Annotated:
        kind, *marks = get_args(hint)
        return kind, tuple(marks)
    return hint, ()


def _marks(hint: Any) -> tuple[Any, ...]:
    """The `Annotated` marks of a field, also inside `X | None` and `tuple[X, ...]`."""
    if get_origin(hint) is Annotated:
        kind, *marks = get_args(hint)
        return (*marks, *_marks(kind))
    if get_origin(hint) in (Union, types.UnionType, tuple):
        return tuple(mark for arg in get_args(hint) for mark in _marks(arg))
    return ()


@functools.cache
def _attribute_docs(cls: Any) -> dict[str, str]:
    """The string literal under each annotated attribute, read from the source."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls)))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, follower in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(follower, ast.Expr)
            and isinstance(follower.value, ast.Constant)
            and isinstance(follower.value.value, str)
        ):
            docs[statement.target.id] = " ".join(follower.value.value.split())
    return docs
