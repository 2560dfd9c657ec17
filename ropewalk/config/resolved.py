"""The resolved config of a run, `config.toml`: every value with its origin, and the input of workers."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ropewalk import __version__
from ropewalk.base.errors import ConfigError, DataError
from ropewalk.base.files import committed_file, read_regular, storage, upgraded
from ropewalk.base.seal import damaged, parse_sealed_toml, sealed_toml

from .plugins import Plugin, load_module
from .read import Resolved, folders_of, parse_saved, parse_tree
from .renames import new_key
from .renames import upgraded as renamed
from .write import dump

FORMAT = 3
SEALED_SINCE = 2
FILE = "config.toml"
_WHAT = "resolved config"

T = TypeVar("T")


def save_resolved(run: Path, resolved: Resolved[Any]) -> None:
    """Commits `config.toml` in the run directory."""
    header = f"# Every value of this run and where it came from. Written by ropewalk {__version__}."
    with committed_file(run / FILE) as file:
        file.write(sealed_toml(f"{header}\nformat = {FORMAT}\n{dump(resolved)}"))


def load_resolved(run: Path, cls: type[T], overrides: Sequence[str] = ()) -> Resolved[T]:
    """The config that was saved in `run`, changed by `overrides`; DamagedFile when it is not what was written."""
    tree = _tree(run)
    origins: Mapping[str, str] = tree.pop("origins", {})
    plugins = _plugins(tree.pop("plugins", {}))
    folders = folders_of(plugins)
    tree.pop("format")
    if overrides:
        return parse_saved(cls, tree, str(run / FILE), origins=origins, overrides=overrides, folders=folders)
    return Resolved(parse_tree(cls, tree, str(run / FILE), folders=folders), origins, plugins)


def load_section(run: Path, key: str, cls: type[T]) -> T:
    """One table of the saved config as its dataclass; defaults when the config lacks the table."""
    tree = _tree(run)
    plugins = _plugins(tree.get("plugins", {}))
    for name, plugin in plugins.items():  # other tables, and the plan, may name them too
        load_module(name, [Path(plugin.folder)])
    return parse_tree(cls, tree.get(key, {}), f"{run / FILE}: [{key}]", folders=folders_of(plugins))


def load_value(run: Path, key: str) -> Any:
    """One top-level value of the saved config."""
    tree = _tree(run)
    if key not in tree:
        raise DataError(f"{run / FILE}: `{key}` is missing; `ropewalk run` writes the file again")
    return tree[key]


def saved_plugins(run: Path) -> dict[str, Plugin]:
    """The user's modules that the saved config names."""
    return _plugins(_tree(run).get("plugins", {}))


def import_model_plugins(run: Path) -> None:
    """Imports the user's modules that the model of the run in folder `run` names; without them its checkpoints cannot
    be read. Nothing where `run` is no run or they are gone: whoever needs one says so."""
    with contextlib.suppress(DataError, ConfigError):
        tree = _tree(run)
        model = tree.get("model", {}).values()
        named = {value.split(":")[0].split(".")[0] for value in model if isinstance(value, str) and ":" in value}
        for name, plugin in _plugins(tree.get("plugins", {})).items():
            if name in named:
                load_module(name, [Path(plugin.folder)])


def _plugins(table: Mapping[str, Any]) -> dict[str, Plugin]:
    found = {name: Plugin(**values) for name, values in table.items()}
    for name, plugin in found.items():
        # Ropewalk writes absolute folders. A relative one could lie in a run directory that a stranger made.
        if not Path(plugin.folder).is_absolute():
            raise DataError(
                f"`plugins.{name}`: the folder {plugin.folder!r} is not absolute; nothing is imported from it"
            )
    return found


def _tree(run: Path) -> dict[str, Any]:
    path = run / FILE
    try:
        with storage(f"reading {path}"):
            data = read_regular(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {run} is not a run directory") from None
    remedy = (
        "change settings in the recipe, not here. If recipe and overrides are still those that this run began with, "
        "move this file away and run the same command again, which writes it again"
    )
    text = parse_sealed_toml(data, path=path, what=_WHAT, remedy=remedy, sealed_since=SEALED_SINCE)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise damaged(path, what=_WHAT, remedy=remedy, why=str(error)) from None
    return upgraded(tree, path=path, what="config", current=FORMAT, upgrades={1: lambda tree: tree, 2: with_new_names})


def with_new_names(tree: dict[str, Any]) -> dict[str, Any]:
    """Format 2 had other names of settings."""
    origins = tree.get("origins")
    named = {_new_name(key): where for key, where in origins.items()} if isinstance(origins, dict) else {}
    return {**renamed({key: value for key, value in tree.items() if key != "origins"}), "origins": named}


def _new_name(key: str) -> str:
    return ".".join(map(str, new_key(tuple(int(part) if part.isdecimal() else part for part in key.split(".")))))
