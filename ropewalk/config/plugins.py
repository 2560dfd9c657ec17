"""A user's own code, named in a recipe as `"module:attr"`: where it is found, and what a run remembers of it.

A module is looked for beside the recipe, then in the working folder, then among what is installed. Nothing is imported
before a recipe names it. Of a module that lies in one of the two folders, the run's `config.toml` records folder and
digest (`[plugins]`): workers in other working directories import the same file, and a run whose file has changed is
refused as it is for any other changed setting. The digest covers `name.py`, or every `.py` of the folder `name/`; put
what decides about the weights there. Installed packages may be upgraded between two starts, as ropewalk itself may.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Plugin:
    """A module beside a recipe: the folder it was found in, and the digest of its source."""

    folder: str
    digest: str


def load_plugin(name: str, folders: Sequence[Path] | None = None) -> Any:
    """The object that `module:attr` names; ConfigError in one line when there is none. Without `folders` a module that
    is imported already is taken as it is."""
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        raise _wrong(f'"{name}" names a file, not a module', f'write "{module.removesuffix(".py")}:{attribute}"')
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise _wrong(f'"{name}" names no object', 'write "module:attr", for a file module.py beside the recipe')
    found = sys.modules.get(module) if folders is None else None
    if found is None:
        found = load_module(module, folders or ())
    for part in attribute.split("."):
        if not hasattr(found, part):
            defined = [key for key, value in vars(found).items() if getattr(value, "__module__", "") == module]
            remedy = f"it defines {', '.join(defined)}" if defined else "it defines nothing"
            raise _wrong(f"`{getattr(found, '__file__', module)}` has no `{part}`", remedy)
        found = getattr(found, part)
    return found


def load_module(name: str, folders: Sequence[Path]) -> Any:
    """The module `name`, imported from the first of `folders` and the working folder that has it, else as installed."""
    top = name.split(".")[0]
    folder = next((each for each in _searched(folders) if _source(each, top)), None)
    _forget_other(folder, top, folders)
    with _first_on_path(folder), _reported(name):
        if folder is None and not _is_installed(top):
            places = " or ".join(str(each) for each in _searched(folders))
            raise _wrong(f"no module `{top}`", f"there is no {top}.py in {places}, and no package of this name")
        return importlib.import_module(name)


def plugin_of(name: str, folders: Sequence[Path]) -> Plugin | None:
    """What a run records of the module of `module:attr`; None for one that is installed."""
    top = name.split(":")[0].split(".")[0]
    folder = next((each for each in _searched(folders) if _source(each, top)), None)
    return None if folder is None else Plugin(str(folder), digest(folder, top))


def digest(folder: Path, name: str) -> str:
    """SHA-256 of the source of the module `name` in `folder`; empty when it is gone."""
    source = _source(folder, name)
    if source is None:
        return ""
    files = sorted(source.parent.rglob("*.py")) if source.name == "__init__.py" else [source]
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return total.hexdigest()


def _searched(folders: Sequence[Path]) -> list[Path]:
    return list(dict.fromkeys(each.absolute() for each in (*folders, Path.cwd())))


def _source(folder: Path, name: str) -> Path | None:
    choices = (folder / f"{name}.py", folder / name / "__init__.py")
    return next((file for file in choices if file.is_file()), None)


def _forget_other(folder: Path | None, top: str, folders: Sequence[Path]) -> None:
    """Forgets the module `top` where its file is gone, lies in another folder, or has changed since the import."""
    known = sys.modules.get(top)
    if known is None:
        return
    file = Path(getattr(known, "__file__", None) or "").absolute()
    # One that a module of the user's imported when it was called has no digest.
    is_plugin = hasattr(known, _DIGEST) or any(file == _source(Path(each), top) for each in _ON_PATH)
    if folder is None:
        # A model's tree says no folder: its module is the one that a recipe has brought.
        if not is_plugin or (not folders and file.exists()):
            return
    elif file == _source(folder, top):
        if getattr(known, _DIGEST, digest(folder, top)) == digest(folder, top):
            return
    elif not is_plugin:
        other = getattr(known, "__file__", None) or "one of Python's own"
        raise _wrong(f"`{_source(folder, top)}` has the name of another module, {other}", "rename the file")
    _forget(top)


def _forget(top: str) -> None:
    for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
        del sys.modules[name]


_DIGEST = "__ropewalk_digest__"
_ON_PATH: list[str] = []
"""Folders of users' modules that are on the path, the last one used first. What lies there is not installed."""


@contextlib.contextmanager
def _first_on_path(folder: Path | None) -> Iterator[None]:
    """Imports see `folder` first, and the modules that come from it carry the digest of what was read; without a folder
    they see what is installed."""
    if folder is None:
        sys.path[:] = [entry for entry in sys.path if entry not in _ON_PATH]
        try:
            yield
        finally:
            sys.path += _ON_PATH
        return
    others = [Path(each) for each in _ON_PATH if each != str(folder)]
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        if file.parent in others and file.stem == name and _source(folder, name):
            _forget(name)  # what a module of another recipe imported when it was called
    kept = [entry for entry in sys.path if entry not in _ON_PATH], sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # bytecode is told from source by its second: an edited file could be taken for old
    importlib.invalidate_caches()
    before = set(sys.modules)
    try:
        yield
    finally:
        # Last on the path from now on, for what the module imports when it is called.
        sys.path[:], sys.dont_write_bytecode = kept
        if str(folder) not in sys.path:
            _ON_PATH[:] = [str(folder), *(each for each in _ON_PATH if each != str(folder))]
        sys.path += _ON_PATH
        for name in sys.modules.keys() - before:
            if _source(folder, name):
                setattr(sys.modules[name], _DIGEST, digest(folder, name))


@contextlib.contextmanager
def _reported(name: str) -> Iterator[None]:
    """Whatever a user's module raises while it is imported, as one line with its place."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        else:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
            place = f"{own[-1].filename}:{own[-1].lineno}" if own else name
        text = str(error).splitlines()[0] if str(error) else ""
        raise _wrong(f"importing `{name}` failed: {type(error).__name__}: {text}", f"correct {place}") from error


def _is_installed(top: str) -> bool:
    return top in sys.modules or importlib.util.find_spec(top) is not None


def _wrong(what: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("", what, remedy)])
