"""TOML text and `section.key=value` overrides -> a checked dataclass with the origin of each value.

All problems are reported at once: unknown keys, types, ranges, missing keys, and contradictions between settings found
by the dataclasses' `check` methods.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args, get_origin, runtime_checkable

from ropewalk.base.errors import ConfigError, DamagedFile, Problem
from ropewalk.base.files import NO_FILE, read_regular

from .layer import Beneath, lay, nearest, path_of
from .plugins import Plugin, plugin_of
from .positions import Path as KeyPath
from .positions import key_lines, lines_of, paths_in
from .registry import Registry
from .renames import new_key
from .schema import Field, describe, fields_of, item_of, options_of, plugin_fields, section_of, values_of
from .synonyms import leaves_of, meant_by, table_meant_by

T = TypeVar("T")

DEFAULT = "default"
COMMAND_LINE = "command line"


@runtime_checkable
class Checked(Protocol):
    """A config dataclass that checks relations between its settings."""

    def check(self) -> Iterable[tuple[str, str]]:
        """Yields (key below this table, problem and remedy) for every contradiction."""


@dataclass(frozen=True, slots=True)
class Resolved(Generic[T]):
    """A config and the origin of each value that is not a default, by dotted key: "tiny.toml:14"."""

    value: T
    origins: Mapping[str, str]
    plugins: Mapping[str, Plugin] = dataclasses.field(default_factory=dict)
    """Modules of the user's that lie beside the recipe, by name."""

    def origin(self, key: str) -> str:
        """The origin of the value of the dotted `key`."""
        return self.origins.get(key, DEFAULT)


def read(
    cls: type[T], path: Path | None = None, overrides: Sequence[str] = (), *, beneath: Beneath | None = None
) -> Resolved[T]:
    """The config in `path` (or the defaults) changed by `overrides`; ConfigError carries every problem.

    Values of the layer `beneath` replace defaults.
    """
    if path is None:
        return parse(cls, "", "", overrides, beneath=beneath)
    return parse(cls, read_text(path), str(path), overrides, beneath=beneath, folders=[path.parent])


def read_text(path: Path) -> str:
    """The text of a recipe; ConfigError when it cannot be read."""
    try:
        return read_regular(path).decode("utf-8-sig")  # editors on Windows put a mark before the first line
    except DamagedFile:
        raise ConfigError([Problem(str(path), NO_FILE, "name a .toml file")]) from None
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
        remedy = f"did you mean `{path.with_name(near[0])}`?" if near else "`ropewalk new` writes one"
        raise ConfigError([Problem(str(path), "no such recipe", remedy)]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(str(path), f"not UTF-8 text: {error}", "save it as UTF-8")]) from None
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise ConfigError([Problem(str(path), what, "name a .toml file")]) from None


def parse(
    cls: type[T],
    text: str,
    name: str,
    overrides: Sequence[str] = (),
    *,
    beneath: Beneath | None = None,
    folders: Sequence[Path] = (),
) -> Resolved[T]:
    """As `read`, from a text; `name` stands for the file in messages and origins. Modules of the user's are looked for
    in `folders` first (config/plugins.py)."""
    tree = parse_toml(text, name)
    lines = key_lines(text)
    origins = {path: f"{name}:{line}" for path, line in lines.items()}
    problems: list[Problem] = []
    for override in overrides:
        _override(cls, tree, override, origins, problems)
    return _parsed(cls, tree, origins, name, problems, beneath, folders)


def laid_over(resolved: Resolved[T], beneath: Beneath, *, name: str = "recipe") -> Resolved[T]:
    """`resolved` with a layer beneath, whose values replace those without an origin that equal their default."""
    origins = {path_of(key): where for key, where in resolved.origins.items()}
    tree = _given(resolved.value, resolved.origins, "")
    return _parsed(type(resolved.value), tree, origins, name, [], beneath, folders_of(resolved.plugins))


def folders_of(plugins: Mapping[str, Plugin]) -> list[Path]:
    """The folders in which modules of the user's lie."""
    return list(dict.fromkeys(Path(plugin.folder) for plugin in plugins.values()))


def _parsed(
    cls: type[T],
    tree: dict[str, Any],
    origins: dict[KeyPath, str],
    name: str,
    problems: list[Problem],
    beneath: Beneath | None,
    folders: Sequence[Path],
) -> Resolved[T]:
    if beneath:
        problems += lay(beneath, tree, origins, name)
    reader = _Reader(cls, name, origins, problems, folders)
    value = reader.section(cls, tree, ())
    if problems:
        raise ConfigError(problems)
    return reader.resolved(value)


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The plain values of a TOML text; ConfigError with the line that is not valid."""
    try:
        return tomllib.loads(text)
    except ValueError as error:  # a number of 5,000 digits is no TOMLDecodeError
        line = _error_line(error, text)
        reason = str(error).split(" (at ")[0]
        shown = lines_of(text)[line - 1].strip()
        problem = Problem(f"{name}:{line}", f"not valid TOML: {reason}", f"the line reads `{_short(shown)}`")
        raise ConfigError([problem]) from None
    except RecursionError:
        raise ConfigError(
            [Problem(name, "lists or tables are nested too deeply", "a recipe has a few levels")]
        ) from None


def _given(value: Any, origins: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """The values of a config that were set, as TOML."""
    tree: dict[str, Any] = {}
    for field, child in values_of(value):
        key, item = f"{prefix}{field.name}", item_of(field.kind)
        if dataclasses.is_dataclass(child):
            inner = _given(child, origins, f"{key}.")
            if inner or field.default is None:
                tree[field.name] = inner
        elif child is None or (key not in origins and child == field.default):
            continue
        elif item is not None and section_of(item):
            tree[field.name] = [_given(one, origins, f"{key}.{index}.") for index, one in enumerate(child)]
        else:
            tree[field.name] = _as_toml(child)
    return tree


def _as_toml(value: Any) -> Any:
    return [_as_toml(item) for item in value] if isinstance(value, tuple) else value


def parse_saved(
    cls: type[T],
    tree: dict[str, Any],
    name: str,
    *,
    origins: Mapping[str, str],
    overrides: Sequence[str] = (),
    folders: Sequence[Path] = (),
) -> Resolved[T]:
    """A config from plain values with the origins that they had, changed by `overrides`; `name` stands for the place in
    messages."""
    places = {path_of(key): where for key, where in origins.items()}
    problems: list[Problem] = []
    for override in overrides:
        _override(cls, tree, override, places, problems)
    return _parsed(cls, tree, places, name, problems, None, folders)


def parse_tree(cls: type[T], tree: Mapping[str, Any], name: str, *, folders: Sequence[Path] = ()) -> T:
    """A config from plain values, as `tomllib` gives them; `name` stands for the place in messages."""
    problems: list[Problem] = []
    value = _Reader(cls, name, {}, problems, folders).section(cls, dict(tree), ())
    if problems:
        raise ConfigError(problems)
    return value


class _UnsoundError(Exception):
    """A check used a value that is wrong in the recipe."""


class _Unsound:
    """Placeholder for a value that is wrong or missing. Every use raises, so that a check cannot mistake it for a value
    and still reports what it finds before."""

    def _refuse(self, *_: object) -> Any:
        raise _UnsoundError

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __format__ = __str__ = __repr__ = _refuse
    __hash__ = _refuse


_UNSOUND: Any = _Unsound()


_COMMON_CHOICES = ("auto", "none", "off", "on")
"""Choices that many settings share, so that they do not identify one."""


class _Reader:
    """Walks dataclass and tree together; collects problems and the origins of the leaves it used."""

    def __init__(
        self,
        root: type,
        name: str,
        origins: Mapping[KeyPath, str],
        problems: list[Problem],
        folders: Sequence[Path] = (),
    ) -> None:
        self._root = root
        self._name = name
        self._origins = origins
        self._problems = problems
        self._folders = folders
        self._used: dict[KeyPath, str] = {}
        self._plugins: dict[str, Plugin] = {}

    def resolved(self, value: T) -> Resolved[T]:
        """`value`, the root, with the origins of what was used for it."""
        return Resolved(value, {".".join(map(str, path)): where for path, where in self._used.items()}, self._plugins)

    def section(self, cls: type[T], tree: Any, path: KeyPath, base: T | None = None) -> T:
        """The table `tree` as a `cls`, `_UNSOUND` where it is wrong; defaults come from `base`, else from `cls`."""
        if not isinstance(tree, dict):
            what = f"`{_dotted(path)}` must be a table, not {_show(tree)}"
            return self._unsound(path, what, _table_remedy(cls, tree, path))  # type: ignore[no-any-return]
        fields = {field.name: field for field in fields_of(cls)}
        own = {field.name: field for field in plugin_fields(cls)}
        renamed = set()
        for key in tree:
            if key not in fields and key not in own:
                full = (*path, key)
                now = new_key(full)
                renamed.add(now)
                if now == full:
                    self._unknown(full, tree[key], fields)
                else:
                    self._report(full, f"unknown key `{_dotted(full)}`", self._renaming(full, now))
        values = {}
        for name, field in fields.items():
            default = field.default if base is None else getattr(base, name)
            section = section_of(field.kind)
            if section and (name in tree or dataclasses.is_dataclass(default)):
                under = default if dataclasses.is_dataclass(default) else None
                values[name] = self.section(section, tree.get(name, {}), (*path, name), under)
            elif name in tree:
                values[name] = self._value(field, field.kind, tree[name], (*path, name))
            elif (*path, name) in renamed:
                values[name] = _UNSOUND  # it is given, under its old name
            elif default is dataclasses.MISSING:
                values[name] = self._unsound(path, f"`{_dotted((*path, name))}` is missing", _addition(field, path))
            else:
                values[name] = default
        for name, field in own.items():
            default = field.default if base is None else getattr(base, name)
            kind, registry = values[field.settings_of], fields[field.settings_of].registry
            found = self._settings_class(registry, kind)
            values[name] = self._own_settings(kind, found, tree.get(name), (*path, name), default)
        value = cls(**values)
        if isinstance(value, Checked):
            self._check(value, path)
        return value

    def _settings_class(self, registry: Registry[Any] | None, kind: Any) -> type | None:
        """The dataclass of the settings of `kind`; None for a kind of ours, one without settings, or a wrong name."""
        if registry is None or not isinstance(kind, str) or kind in registry:
            return None
        found: type | None = registry.find(kind, self._folders).settings
        return found

    def _own_settings(self, kind: Any, found: type | None, tree: Any, path: KeyPath, default: Any) -> Any:
        """The table `tree` as a `found`, the settings of the user's `kind`."""
        if found is not None:
            base = default if isinstance(default, found) else None
            return self.section(found, {} if tree is None else tree, path, base)
        if tree is not None and isinstance(kind, str):
            remedy = "remove the table; the settings of a built-in kind stand beside its name"
            self._report(path, f'`{_dotted(path)}`: "{kind}" has no settings table', remedy)
        return None

    def _named(self, field: Field, value: str, path: KeyPath) -> Any:
        """A name from the field's table, or of the user's."""
        assert field.registry is not None
        try:
            field.registry.find(value, self._folders)
        except ConfigError as error:
            (problem,) = error.problems
            return self._unsound(path, f"`{_dotted(path)}`: {problem.what}", problem.remedy)
        if ":" in value and (plugin := plugin_of(value, self._folders)):
            self._plugins[value.split(":")[0].split(".")[0]] = plugin
        return value

    def _check(self, value: Checked, path: KeyPath) -> None:
        """Reports contradictions among the valid values."""
        with contextlib.suppress(_UnsoundError):
            for key, what in value.check():
                full = (*path, *path_of(key))
                self._problems.append(Problem(self._where(full), f"`{_dotted(full)}`: {what}"))

    def _value(self, field: Field, kind: Any, value: Any, path: KeyPath) -> Any:
        section = section_of(kind)
        if section:
            return self.section(section, value, path)
        item = item_of(kind)
        if item is not None:
            if not isinstance(value, list):
                remedy = f"write {_header((*path, 0))}" if section_of(item) else f"write [{_show(value)}]"
                return self._unsound(path, f"`{_dotted(path)}` must be a list, not {_show(value)}", remedy)
            if section_of(item) is None:
                self._note(path)
            return tuple(self._value(field, item, child, (*path, i)) for i, child in enumerate(value))
        self._note(path)
        if field.registry is not None and isinstance(value, str):
            return self._named(field, value, path)
        for choice in options_of(kind):
            accepted, result = _accept(choice, value)
            if accepted:
                if field.range and isinstance(result, (int, float)) and not field.range.admits(result):
                    return self._unsound(path, f"`{_dotted(path)}` is {_show(value)}", f"it must be {field.range}")
                if isinstance(result, float) and not math.isfinite(result):
                    return self._unsound(path, f"`{_dotted(path)}` is {_show(value)}", "it must be a finite number")
                if isinstance(result, str) and "\0" in result:
                    what = f"`{_dotted(path)}` is {json.dumps(result)}"
                    return self._unsound(path, what, "leave out the zero character; no file name holds one")
                return result
        return self._unsound(path, f"`{_dotted(path)}` is {_show(value)}", _expected(kind, value))

    def _note(self, path: KeyPath) -> None:
        where = self._origins.get(path)
        if where:
            self._used[path] = where

    def _unsound(self, path: KeyPath, what: str, remedy: str) -> Any:
        """Reports a problem and returns the placeholder for the value."""
        self._report(path, what, remedy)
        return _UNSOUND

    def _report(self, path: KeyPath, what: str, remedy: str) -> None:
        self._problems.append(Problem(self._where(path), what, remedy))

    def _unknown(self, path: KeyPath, value: Any, fields: Mapping[str, Field]) -> None:
        """Reports an unknown key, with the setting that is probably meant, for each value of a table."""
        near = fields.get(_near(str(path[-1]), fields))
        section = section_of(near.kind) if near else None
        inside = {field.name for field in fields_of(section)} if section else set()
        if isinstance(value, dict):  # a table, which may only be misspelt
            answers = {leaf: leaf[len(path)] not in inside and self._meant(leaf) for leaf in leaves_of(value, path)}
        else:
            taken_here = _taking(fields, value)
            answers = {path: f"it is `{_dotted((*path[:-1], taken_here))}`" if taken_here else self._meant(path)}
        for leaf, answer in answers.items():
            if answer:
                self._report(leaf, f"unknown key `{_dotted(leaf)}`", answer)
        if not all(answers.values()) or not answers:
            table = (table_meant_by(self._root, path) or self._meant(path)) if isinstance(value, dict) else ""
            self._report(path, f"unknown key `{_dotted(path)}`", table or _suggest(str(path[-1]), fields))

    def _meant(self, path: KeyPath) -> str:
        return meant_by(self._root, path, on_command_line=self._where(path).startswith(COMMAND_LINE))

    def _renaming(self, old: KeyPath, new: KeyPath) -> str:
        """The remedy for a renamed key."""
        name = new[-1] if new[:-1] == old[:-1] else _dotted(new)
        if self._where(old).startswith(COMMAND_LINE):
            return f"it is now `{_dotted(new)}`"
        file = self._name if self._name.endswith(".toml") else "FILE"
        return f"it is now `{name}`; `ropewalk recipe upgrade {file}` rewrites the recipe"

    def _where(self, path: KeyPath) -> str:
        return nearest(self._origins, path, self._name)


def _accept(kind: Any, value: Any) -> tuple[bool, Any]:
    """Whether a TOML value is a `kind`, and what to store. Integers are accepted as numbers; all else is strict."""
    if isinstance(value, int) and value.bit_length() > 63:
        return False, value
    if get_origin(kind) is Literal:
        return value in get_args(kind) and type(value) in {type(arg) for arg in get_args(kind)}, value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return True, float(value)
    return type(value) is kind, value


def _table_remedy(cls: type, value: Any, path: KeyPath) -> str:
    """The remedy for a value in place of a table: the setting in the table that has this value among its choices."""
    name = _taking({field.name: field for field in fields_of(cls)}, value)
    return f"that is `{_dotted((*path, name))}`" if name else f"write {_header(path)}"


def _taking(fields: Mapping[str, Field], value: Any) -> str:
    """The only setting of a table with `value` among its choices; empty when none or several have it."""
    if not isinstance(value, str) or value in _COMMON_CHOICES:
        return ""
    found = [
        name
        for name, field in fields.items()
        for option in options_of(field.kind)
        if get_origin(option) is Literal and value in get_args(option)
    ]
    return found[0] if len(found) == 1 else ""


def _expected(kind: Any, value: Any) -> str:
    if isinstance(value, str):
        literals = [option for option in options_of(kind) if get_origin(option) is Literal]
        choices = [arg for option in literals for arg in get_args(option)]
        near = difflib.get_close_matches(value, [c for c in choices if isinstance(c, str)], n=1)
        if near:
            return f'did you mean "{near[0]}"?'
    if isinstance(value, int) and value.bit_length() > 63:
        return "an integer has at most 64 bits"
    return f"expected {describe(kind)}"


def _addition(field: Field, path: KeyPath) -> str:
    item = item_of(field.kind)
    if section_of(field.kind) or section_of(item):
        end: KeyPath = (field.name, 0) if item else (field.name,)
        return f"add {_header((*path, *end))}: {field.doc}"
    return f"add `{field.name} = ...` ({describe(field.kind)}): {field.doc}"


def _suggest(key: str, fields: Mapping[str, Field]) -> str:
    near = _near(key, fields)
    return f"did you mean `{near}`?" if near else f"known here: {', '.join(fields)}"


def _near(key: str, fields: Mapping[str, Field]) -> str:
    return next(iter(difflib.get_close_matches(key, fields, n=1, cutoff=0.5)), "")


def _override(cls: type, tree: dict[str, Any], text: str, origins: dict[KeyPath, str], problems: list[Problem]) -> None:
    """Sets one `a.b=c` in `tree`. A bare word is text where the field is text; otherwise it is read as TOML."""
    key, equals, raw = text.partition("=")
    path = path_of(key.strip())
    if not equals or "" in path:
        problems.append(Problem(COMMAND_LINE, f"`{text}` is not an override", "write section.key=value"))
        return
    if _is_not_utf8(text):
        problems.append(Problem(COMMAND_LINE, f"{text!a} is not UTF-8 text", "write it as UTF-8"))
        return
    where = f"{COMMAND_LINE}: {text}"
    node: Any = tree
    for depth, part in enumerate(path[:-1], 1):
        if isinstance(node, dict) and isinstance(part, str):
            if part not in node and isinstance(path[depth], str):
                node[part] = {}
                origins[path[:depth]] = where
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        else:
            problems.append(Problem(COMMAND_LINE, f"no such key `{key}`", f"`{part}` is not in the recipe"))
            return
    value = _override_value(cls, path, raw.strip())
    if isinstance(node, dict) and isinstance(path[-1], str):
        node[path[-1]] = value
        for old in [old for old in origins if old[: len(path)] == path]:
            del origins[old]
        origins.update({(*path, *inner): where for inner in ((), *paths_in(value))})
    else:
        problems.append(Problem(COMMAND_LINE, f"`{key}` cannot be set", "override a key of a table"))


def _override_value(cls: type, path: KeyPath, raw: str) -> Any:
    kind = _kind_at(cls, path)
    if kind is str and not raw.startswith(('"', "'")):
        return raw
    try:
        tree = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return raw
    return tree["value"] if len(tree) == 1 else raw  # more keys: the text goes on after a line's end


def _kind_at(cls: Any, path: KeyPath) -> Any:
    kind: Any = cls
    for part in path:
        if isinstance(part, int):
            kind = item_of(kind)
            continue
        section = section_of(kind)
        field = next((f for f in fields_of(section) if f.name == part), None) if section else None
        if field is None:
            return None
        kind = field.kind
    options = options_of(kind)
    return options[0] if len(options) == 1 else kind


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a config by dotted key; the items of a list of tables are numbered."""
    for field, child in values_of(value):
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(child):
            yield from flatten(child, f"{key}.")
        elif isinstance(child, tuple) and child and dataclasses.is_dataclass(child[0]):
            for index, item in enumerate(child):
                yield from flatten(item, f"{key}.{index}.")
        else:
            yield key, child


def _error_line(error: ValueError, text: str) -> int:
    words = str(error)
    if "(at line " in words:
        return int(words.split("(at line ")[1].split(",")[0])
    if endless := _ENDLESS.search(text):
        return len(lines_of(text[: endless.end()]))
    return len(lines_of(text.rstrip()))


_ENDLESS = re.compile(r"\d[\d_]{4000,}")
"""A number with more digits than Python reads."""


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _header(path: KeyPath) -> str:
    """The TOML header of the table at `path`; an index at the end means an item of a list."""
    names = ".".join(part for part in path if isinstance(part, str))
    return f"[[{names}]]" if isinstance(path[-1], int) else f"[{names}]"


def _is_not_utf8(text: str) -> bool:
    """Whether an argument holds bytes that are not UTF-8, which Python represents as lone surrogates."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
