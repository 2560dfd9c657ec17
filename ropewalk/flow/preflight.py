"""Preflight checks: a recipe's inputs exist and fit it, and its outputs can be written."""

from __future__ import annotations

import dataclasses
import errno
import glob
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ropewalk.base.errors import ConfigError, Problem, UserError
from ropewalk.base.install import install_command
from ropewalk.config.positions import key_lines
from ropewalk.config.read import Resolved, parse_toml, parse_tree, read_text
from ropewalk.load.config import Load
from ropewalk.prepare.config import Prepare
from ropewalk.prepare.sources import missing_packages, missing_paths
from ropewalk.store.origin import is_url

from .recipe import Recipe

FOLDER_KEY = "prepare.folder"
NEED_NOTHING = ("held-out", "completions")
"""Tasks that need the corpus alone."""


def check_inputs(resolved: Resolved[Recipe], *, data: bool = True) -> None:
    """Raises ConfigError with all missing files and packages that the recipe needs, by line; without `data`, ignores
    those that prepare reads."""
    problems = [*(_missing_data(resolved) if data else []), *_missing_tasks(resolved)]
    if problems:
        raise ConfigError(problems)


def _missing_tasks(resolved: Resolved[Recipe]) -> list[Problem]:
    """What tasks lack, such as data and packages: evaluation comes after hours of training."""
    settings = resolved.value.evaluate
    asked = {"evaluate.tasks": settings.tasks}
    if settings.during.every_steps:
        asked["evaluate.during.tasks"] = settings.during.tasks
    asked = {key: tuple(name for name in names if name not in NEED_NOTHING) for key, names in asked.items()}
    if not any(asked.values()):
        return []
    from ropewalk.evaluate.task_check import check_tasks  # it imports numpy and tokenizers

    return [
        Problem(resolved.origins.get(key, ""), what)
        for key, names in asked.items()
        for what in check_tasks(dataclasses.replace(settings, tasks=names))
    ]


def check_outputs(resolved: Resolved[Recipe], *, run: Path | None = None) -> None:
    """Creates the folder of prepared data and the folder for the `run`; raises ConfigError, with the setting, for each
    that cannot be written."""
    problems = [*_unwritable_data(resolved), *([] if run is None else _unwritable_run(run))]
    if problems:
        raise ConfigError(problems)


def check_contents(resolved: Resolved[Recipe], *, remotely: bool = False) -> list[Problem]:
    """Reads the first records of some files of every source; returns remarks on what looks odd. Raises ConfigError, by
    line, for settings with which a path yields no document. URLs are read only if `remotely`."""
    from ropewalk.prepare.inspection.verdicts import findings

    remarks: list[Problem] = []
    problems: list[Problem] = []
    for finding in findings(resolved.value.prepare, remotely=remotely):
        table = f"prepare.sources.{finding.source}"
        key = f"{table}.{finding.key}"
        where = resolved.origins.get(key) or resolved.origins.get(f"{table}.paths", "")
        told = Problem(where, f"`{key}`: {finding.what}", finding.remedy)
        (problems if finding.fatal else remarks).append(told)
    if problems:
        raise ConfigError(problems)
    return remarks


def check_trainable(resolved: Resolved[Recipe]) -> None:
    """Raises ConfigError, by line, for settings of `[load]` that training does not support."""
    problems = []
    for index, media in enumerate(resolved.value.load.media):
        key = f"load.media.{index}"
        where = next((place for name, place in resolved.origins.items() if name.startswith(f"{key}.")), "")
        what = f'`load.media`: training reads tokens; no model here reads the images of "{media.name}"'
        remedy = "remove the table; `ropewalk doctor data` measures it, and `open_media` reads it in Python"
        problems.append(Problem(where, what, remedy))
    if problems:
        raise ConfigError(problems)


def located(error: UserError, resolved: Resolved[Recipe]) -> ConfigError:
    """The lines of `error` as problems of the recipe, each at the place where a setting that it names was set."""
    problems = []
    for line in str(error).splitlines():
        places = [resolved.origins[key] for key in re.findall(r"`([a-z_.]+)", line) if key in resolved.origins]
        problems.append(Problem(places[0] if places else "", line.removeprefix("plan: ") if places else line))
    return ConfigError(problems)


def missing_in_broken(path: Path) -> list[Problem]:
    """The missing files of a recipe with other problems; none if its `[prepare]` cannot be read."""
    try:
        text = read_text(path)
        settings = parse_tree(Prepare, parse_toml(text, str(path))["prepare"], str(path))
    except (OSError, ValueError, LookupError, ConfigError):
        return []
    lines = {".".join(map(str, key)): line for key, line in key_lines(text).items()}
    return list(_missing_files(settings, lambda key: f"{path}:{lines[key]}"))


def _missing_data(resolved: Resolved[Recipe]) -> list[Problem]:
    recipe, origin = resolved.value, resolved.origin
    packages = [] if recipe.load.corpus else _missing_packages(recipe.prepare, origin)
    return [*_missing_files(recipe.prepare, origin), *packages, *_missing_corpora(recipe.load, origin)]


def _missing_files(settings: Prepare, origin: Callable[[str], str]) -> Iterator[Problem]:
    for index, path in missing_paths(settings):
        key = f"prepare.sources.{index}.paths"
        if Path(path).is_dir():
            yield Problem(origin(key), f'`{key}`: the folder "{path}" holds no text file', "put some into it")
            continue
        remedy = f"paths are relative to the working folder, {Path.cwd()}"
        yield Problem(origin(key), f'`{key}`: nothing matches "{path}"', remedy)
    file = settings.tokenizer.file
    if file and not _is_tokenizer(Path(file)):
        key = "prepare.tokenizer.file"
        yield Problem(origin(key), f'`{key}`: no file "{file}"', "leave it out to train a tokenizer")
    for table, names in (("urls", ("domains", "words", "soft_words", "parts")), ("words", ("files",))):
        lists = getattr(settings.filter, table)
        for name in names if lists else ():
            key = f"prepare.filter.{table}.{name}"
            for file in getattr(lists, name):
                if not Path(file).is_file():
                    yield Problem(origin(key), f'`{key}`: no file "{file}"', "write the list, or correct its name")


def _missing_packages(settings: Prepare, origin: Callable[[str], str]) -> Iterator[Problem]:
    missing = missing_packages(settings)
    extras = ",".join(sorted({extra for _, _, extra in missing}))
    for name, package, _ in missing:
        key = f"prepare.{name}"
        remedy = f"install all that is missing with: {install_command(extras)}"
        yield Problem(origin(key), f"`{key}` needs the package `{package}`", remedy)


def _missing_corpora(settings: Load, origin: Callable[[str], str]) -> Iterator[Problem]:
    for index, corpus in enumerate(settings.corpus):
        key = f"load.corpus.{index}.path"
        beside = (corpus.path, f"{corpus.path}.idx")
        if not is_url(corpus.path) and not any(os.path.exists(path) for path in beside) and not glob.glob(corpus.path):
            remedy = f"paths are relative to the working folder, {Path.cwd()}"
            yield Problem(origin(key), f'`{key}`: nothing is at "{corpus.path}"', remedy)
    if settings.corpus and settings.tokenizer and not _is_tokenizer(Path(settings.tokenizer)):
        key = "load.tokenizer"
        yield Problem(origin(key), f'`{key}`: no file "{settings.tokenizer}"', "name the corpus' tokenizer.json")


def _is_tokenizer(place: Path) -> bool:
    from ropewalk.prepare.tokenizer import file_of  # not needed by recipes that train one

    return file_of(place).is_file()


def _unwritable_data(resolved: Resolved[Recipe]) -> Iterator[Problem]:
    name = resolved.value.prepare.folder
    where = resolved.origin(FOLDER_KEY)
    if is_url(name):
        remedy = "prepared data is written to a local folder; name one"
        yield Problem(where, f'`{FOLDER_KEY}`: "{name}" is a URL', remedy)
    elif reason := _refusal(Path(name)):
        remedy = "name a folder that you can write, such as `prepared`"
        yield Problem(where, f'`{FOLDER_KEY}`: "{name}" cannot be written: {reason}', remedy)


def _unwritable_run(run: Path) -> Iterator[Problem]:
    # Does not create a new run yet: later checks may refuse the recipe.
    if reason := _refusal(run if run.exists() else run.parent):
        remedy = "name another folder of runs with --runs, or give the recipe another `name`"
        yield Problem("", f'the run directory "{run}" cannot be written: {reason}', remedy)


def _refusal(folder: Path) -> str:
    """Creates `folder`; returns why it is not writable, empty if it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except (FileExistsError, NotADirectoryError):
        stands = next((place for place in (folder, *folder.parents) if place.exists() and not place.is_dir()), folder)
        return f"{stands} is not a folder"
    except FileNotFoundError:
        above = next((place for place in folder.parents if place.is_dir()), Path("/"))
        return f"the system makes no folders in {above}"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "it is a symbolic link that leads to itself"
        return error.strerror or str(error)
    except ValueError as error:  # a NUL byte
        return str(error)
