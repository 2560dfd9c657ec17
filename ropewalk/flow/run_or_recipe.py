"""Resolves the argument of a verb: a recipe file, a run directory with its settings and data, or a recipe from
Python."""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import ConfigError, DataError, Problem
from ropewalk.config.read import COMMAND_LINE, Resolved, flatten, read
from ropewalk.config.resolved import FILE, load_resolved
from ropewalk.config.write import shown
from ropewalk.monitor.run_view import MOST_LISTED, runs_in
from ropewalk.store.manifest import read_manifest

from .continue_run import KEPT
from .plan_recipe import expected_vocabulary
from .preflight import check_inputs, missing_in_broken
from .recipe import Recipe
from .run_stages import read_record
from .start_from.start_from import RUNS, beneath, started

RecipeLike = Path | str | Resolved[Recipe]
"""A recipe file, a run directory, or a recipe made in Python."""
_TYPED = f"{COMMAND_LINE}: "
_FILTER = "prepare.filter."


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """A recipe or run given to a verb."""

    resolved: Resolved[Recipe]
    folder: Path
    """The run directory."""
    prepared: Path | None = None
    """The prepared data of a given run, if it is there and the settings of its data are unchanged; the raw files are
    then not needed."""
    is_run: bool = False

    def check_inputs(self) -> None:
        """Raises ConfigError with all missing files and packages."""
        check_inputs(self.resolved, data=self.prepared is None)

    def vocabulary(self) -> int:
        """The vocabulary size of the run's data, else the one expected before data is prepared."""
        if self.prepared is None:
            return expected_vocabulary(self.resolved.value)
        return read_manifest(self.prepared).tokenizer.vocabulary


def given(recipe: RecipeLike, overrides: Sequence[str] = (), *, runs: Path = RUNS, new: bool = False) -> Given:
    """The checked settings of `recipe` with `overrides`, and its run: below `runs`, or the given run directory.
    Includes the settings that `train.start_from` supplies, as the run recorded them unless it is `new`."""
    if isinstance(recipe, Resolved):
        if overrides:
            raise ValueError("overrides belong to a recipe file; change the dataclass instead")
        return Given(resolved=started(recipe, runs=runs, new=new), folder=runs / recipe.value.name)
    path = Path(recipe)
    if path.name == FILE and is_run(path.parent):
        path = path.parent
    if is_run(path):
        return _given_run(path, overrides)
    if path.is_dir() or not path.exists():
        raise _no_such(path, runs)
    resolved = read_recipe(path, overrides, runs=runs, new=new)
    return Given(resolved=resolved, folder=runs / resolved.value.name)


def resolve_recipe(
    recipe: RecipeLike, overrides: Sequence[str] = (), *, runs: Path = RUNS, new: bool = False
) -> Resolved[Recipe]:
    """The checked settings of a recipe or run, with their origins."""
    return given(recipe, overrides, runs=runs, new=new).resolved


def read_recipe(path: Path, overrides: Sequence[str] = (), *, runs: Path = RUNS, new: bool = False) -> Resolved[Recipe]:
    """The recipe in `path`, with the settings its base model supplies (flow/start_from/start_from.py). A ConfigError
    names missing files too, if `[prepare]` alone can be read. `runs` is the folder of its run, which `new` ignores."""
    try:
        return read(Recipe, path, overrides, beneath=beneath(runs=runs, new=new))
    except ConfigError as error:
        raise ConfigError([*error.problems, *missing_in_broken(path)]) from None


def recipe_words(resolved: Resolved[Recipe]) -> str:
    """The recipe file and the overrides that affect the prepared data, as words of a shell; empty without a file.

    Overrides of filter rules are left out, since the commands printed with these words try others.
    """
    file = _recipe_file(resolved)
    return shlex.join([file, *_preparing_overrides(resolved)]) if file else ""


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory with saved settings."""
    return path.is_dir() and (path / FILE).exists()


def narrowed(folder: Path, resolved: Resolved[Recipe], *, keys: Collection[str]) -> tuple[Resolved[Recipe], list[str]]:
    """The settings of the run in `folder` with those below `keys` taken from `resolved`; and the other settings in
    which `resolved` differs, as text."""
    try:
        saved = load_resolved(folder, Recipe)
    except ConfigError:
        return resolved, []  # written by a version with other settings: nothing can be compared
    value = saved.value
    for key in keys:
        value = _replaced(value, resolved.value, key.split("."))
    origins = {key: where for key, where in saved.origins.items() if not _is_below(key, keys)}
    origins |= {key: where for key, where in resolved.origins.items() if _is_below(key, keys)}
    made, asked = dict(flatten(value)), dict(flatten(resolved.value))
    others = [
        f"{key}: {shown(made.get(key))}, not {shown(asked.get(key))}"
        for key in sorted(made.keys() | asked.keys())
        if made.get(key) != asked.get(key) and saved.origin(key) != KEPT
    ]
    plugins = {**saved.plugins, **resolved.plugins}
    return dataclasses.replace(saved, value=value, origins=origins, plugins=plugins), others


def _given_run(path: Path, overrides: Sequence[str]) -> Given:
    resolved, own = load_resolved(path, Recipe, overrides), load_resolved(path, Recipe)
    here = path if path.name else path.resolve()
    folder = path if resolved.value.name == own.value.name else here.parent / resolved.value.name
    same_data = _of_data(resolved.value) == _of_data(own.value)
    return Given(
        resolved=resolved, folder=folder, prepared=_prepared(path) if same_data else None, is_run=folder == path
    )


def _prepared(run: Path) -> Path | None:
    """The folder of the run's prepared data, if it has not changed since."""
    record = read_record(run, "prepare")
    if not record or not record.result:
        return None
    folder = Path(record.result["folder"])
    try:
        return folder if read_manifest(folder).recipe_hash == record.result["hash"] else None
    except DataError:
        return None


def _of_data(recipe: Recipe) -> tuple[Any, ...]:
    """The settings that affect the prepared data."""
    return recipe.prepare, recipe.load.corpus, recipe.load.tokenizer, recipe.seed


def _replaced(value: Any, other: Any, path: Sequence[str]) -> Any:
    """`value` with the setting at `path` taken from `other`."""
    name, *rest = path
    mine, theirs = getattr(value, name), getattr(other, name)
    return dataclasses.replace(value, **{name: _replaced(mine, theirs, rest) if rest else theirs})


def _is_below(key: str, keys: Collection[str]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in keys)


def _no_such(path: Path, runs: Path) -> ConfigError:
    """The error for a `path` that is missing, or a folder without a run."""
    what = "no such recipe" if path.suffix == ".toml" else "no such recipe or run"
    return ConfigError([Problem(str(path), f"a folder without {FILE}" if path.is_dir() else what, _hint(path, runs))])


def _hint(path: Path, runs: Path) -> str:
    """A recipe or run with a similar name, else the existing runs."""
    beside = path if path.is_dir() else path.parent
    recipes = {found.name: found for found in sorted(beside.glob("*.toml"))}
    found = {run.name: run for folder in (runs, beside) for run in runs_in(folder)}
    if path.suffix == ".toml":
        if path.stem in found:
            return f"its run has the settings: name `{found[path.stem]}` in its place"
        near = difflib.get_close_matches(path.name, recipes, n=1)
        return f"did you mean `{recipes[near[0]]}`?" if near else "`ropewalk new` writes one"
    known = {**{Path(name).stem: recipe for name, recipe in recipes.items()}, **found}
    near = [] if path.is_dir() else difflib.get_close_matches(path.name, known, n=1)
    if near:
        return f"did you mean `{known[near[0]]}`?"
    if not found:
        return "`ropewalk new` writes a recipe"
    listed = ", ".join(str(run) for run in list(found.values())[:MOST_LISTED])
    return f"there are the runs {listed}" + (f" and {len(found) - MOST_LISTED} more" * (len(found) > MOST_LISTED))


def _recipe_file(resolved: Resolved[Recipe]) -> str:
    places = (resolved.origins.get(key, "") for key in ("name", *resolved.origins))
    files = (found[1] for place in places if (found := re.fullmatch(r"(.+):\d+", place)))
    return next((file for file in files if Path(file).is_file()), "")


def _preparing_overrides(resolved: Resolved[Recipe]) -> Iterator[str]:
    given = {
        origin.removeprefix(_TYPED): None
        for key, origin in resolved.origins.items()
        if origin.startswith(_TYPED) and key.partition(".")[0] in ("seed", "prepare")
    }
    return (text for text in given if not text.startswith(_FILTER))
