"""The resolved config of a run, `config.toml`: every value with its origin. The seam before the worker."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ropewalk import __version__
from ropewalk.base.errors import DataError
from ropewalk.base.files import committed_file, storage, upgraded

from .read import Resolved, parse_tree
from .write import dump

FORMAT = 1
FILE = "config.toml"

T = TypeVar("T")


def save_resolved(run: Path, resolved: Resolved[Any]) -> None:
    """Commits `config.toml` in the run directory."""
    header = f"# Every value of this run and where it came from. Written by ropewalk {__version__}."
    with committed_file(run / FILE, "w") as file:
        file.write(f"{header}\nformat = {FORMAT}\n{dump(resolved)}")


def load_resolved(run: Path, cls: type[T]) -> Resolved[T]:
    """The config that was saved in `run`."""
    tree = _tree(run)
    origins: Mapping[str, str] = tree.pop("origins", {})
    tree.pop("format")
    return Resolved(parse_tree(cls, tree, str(run / FILE)), origins)


def load_section(run: Path, key: str, cls: type[T]) -> T:
    """One table of the saved config as its dataclass; its defaults when the run did not know the table."""
    return parse_tree(cls, _tree(run).get(key, {}), f"{run / FILE}: [{key}]")


def load_value(run: Path, key: str) -> Any:
    """One top-level value of the saved config."""
    tree = _tree(run)
    if key not in tree:
        raise DataError(f"{run / FILE}: it holds no `{key}`; run `ropewalk run` again to write it anew")
    return tree[key]


def _tree(run: Path) -> dict[str, Any]:
    path = run / FILE
    try:
        with storage(f"reading {path}"):
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {run} is not a run directory") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: damaged: {error}; run `ropewalk run` again to write it anew") from None
    return upgraded(tree, path=path, what="config", current=FORMAT, upgrades={})
