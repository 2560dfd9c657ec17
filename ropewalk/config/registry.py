"""Named choices: one table per kind of component, and a user's own as `"module:attr"`.

    NORMS = Registry("norm", {"rms": Kind(target="ropewalk.model.norms:RMSNorm", doc="Zhang and Sennrich 2019.")})

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Model:
        norm: Annotated[str, NORMS] = "rms"
        \"""The norm of each block.\"""
        norm_settings: Annotated[object, SettingsOf("norm")] = None
        \"""Settings of a norm that is not built in.\"""

Targets are imported by `Kind.load` only. A recipe writes `norm = "scaled:ScaledNorm"` and `[model.norm_settings]`; the
reader (`config/read.py`) imports `scaled`, checks the settings against the dataclass and reports unknown names with a
suggestion. At run time `NORMS[settings.norm].load()` gives the class or function, whoever wrote it.

What may stand behind `module:attr` (or an entry point of the group `ropewalk.norms`):

- a frozen dataclass: its fields are the settings, and the class is the target; an instance is both settings and
  behaviour, so that `model.norm_settings` itself is what the caller uses;
- a `Kind` (or the table's subclass of it), which names the settings and a lazy target separately, as the built-in kinds
  do: then reading a recipe imports the small module alone, and torch stays out;
- any callable, without settings.

A table whose kinds have costs declares a subclass of `Kind`. Those fields are read from attributes of the same names:
a user's optimizer may have a static method `state_bytes`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from ropewalk.base.errors import ConfigError, Problem

from .plugins import load_plugin


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One entry of a table."""

    target: Any
    """What makes the component: `"module:attr"`, imported by `load`, or the object itself."""
    settings: type | None = None
    """The dataclass of its own settings; None without any."""
    doc: str = ""
    """One sentence for the reference and for help."""

    def settings_in(self, table: Any) -> Any:
        """The settings of this kind alone, out of a config table that holds those of every built-in kind."""
        if self.settings is None:
            return None
        return self.settings(**{each.name: getattr(table, each.name) for each in dataclasses.fields(self.settings)})

    def load(self) -> Any:
        """The target, imported when it is named as text."""
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


K = TypeVar("K", bound=Kind)


class Registry(Mapping[str, K], Generic[K]):
    """The built-in kinds of one component by name; `[name]` also finds a user's own."""

    def __init__(
        self, noun: str, kinds: Mapping[str, K], *, kind: type[Kind] = Kind, methods: Sequence[str] = ()
    ) -> None:
        self.noun = noun
        """In messages: "optimizer"."""
        self._methods = tuple(methods)
        """What a user's class must define."""
        self.group = f"ropewalk.{noun.lower().replace(' ', '_')}s"
        """The entry points that packages may declare."""
        self._kinds = dict(kinds)
        self._kind = kind

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def __contains__(self, name: object) -> bool:
        return name in self._kinds

    def __getitem__(self, name: str) -> K:
        return self.find(name)

    def find(self, name: str, folders: Sequence[Path] | None = None) -> K:
        """The kind `name`; ConfigError says what is wrong with it. A module is looked for in `folders`, in the working
        folder, and among what is installed; without `folders` one that is imported already comes first."""
        if name in self._kinds:
            return self._kinds[name]
        if ":" in name:
            return self._adopted(name, load_plugin(name, folders))
        from importlib.metadata import entry_points  # 20 ms, for names that are not ours

        for point in entry_points(group=self.group):
            if point.name == name:
                return self._adopted(name, load_plugin(point.value, folders))
        near = difflib.get_close_matches(name, self._kinds, n=1)
        remedy = f'did you mean "{near[0]}"?' if near else f'known: {", ".join(self._kinds)}; or "module:attr"'
        raise ConfigError([Problem("", f'no {self.noun} "{name}"', remedy)])

    def _adopted(self, name: str, found: Any) -> K:
        """A user's object as an entry of this table."""
        if isinstance(found, self._kind):
            return cast(K, found)
        if not callable(found):
            remedy = "name a frozen dataclass, a function, or a Kind"
            raise ConfigError(
                [Problem("", f"`{name}` is no {self.noun}: it is a value of type {type(found).__name__}", remedy)]
            )
        settings = found if isinstance(found, type) and dataclasses.is_dataclass(found) else None
        if settings and not settings.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            remedy = f"write @dataclass(frozen=True, kw_only=True) above `class {settings.__name__}`"
            raise ConfigError([Problem("", f"`{name}` is a dataclass that is not frozen", remedy)])
        doc = (inspect.getdoc(found) or "").split("\n\n")[0]
        given = {field.name for field in dataclasses.fields(Kind)}
        costs = {
            field.name: getattr(found, field.name)
            for field in dataclasses.fields(self._kind)
            if field.name not in given and hasattr(found, field.name)
        }
        required = [field.name for field in dataclasses.fields(self._kind) if field.default is dataclasses.MISSING]
        missing = [each for each in required if each not in given and each not in costs]
        if isinstance(found, type):
            missing += sorted(getattr(found, "__abstractmethods__", ()))
            missing += [each for each in self._methods if not hasattr(found, each)]
        if missing:
            what = f"`{name}` is no {self.noun}: it has no {' and no '.join(f'`{each}`' for each in missing)}"
            raise ConfigError([Problem("", what, "define it, as in docs/guides/extending.md")])
        return cast(K, self._kind(target=found, settings=settings, doc=doc, **costs))
