"""Opening a run directory: new, continued, or in conflict with what was begun there."""

from __future__ import annotations

import glob
import os
import platform
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ropewalk import __version__
from ropewalk.base.errors import ConfigError, DataError, Problem, RunConflict, UserError
from ropewalk.base.events import EventLog
from ropewalk.checkpoint.format import list_checkpoints, resolve_checkpoint
from ropewalk.config.positions import key_lines
from ropewalk.config.read import Resolved, flatten, parse_tree, read
from ropewalk.config.resolved import FILE, load_resolved, save_resolved
from ropewalk.config.schema import fields_of, item_of, section_of
from ropewalk.config.write import shown
from ropewalk.load.config import Load
from ropewalk.model.layouts import CONFIG as HUGGING_FACE
from ropewalk.prepare.config import Prepare
from ropewalk.prepare.sources import missing_paths
from ropewalk.store.origin import is_url

from .recipe import Recipe


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Resolved[Recipe]:
    """The recipe in `path`; a ConfigError names its missing files too, where `[prepare]` can be read by itself."""
    try:
        return read(Recipe, path, overrides)
    except ConfigError as error:
        raise ConfigError([*error.problems, *_missing_in_broken(path)]) from None


def check_inputs(resolved: Resolved[Recipe]) -> None:
    """Raises ConfigError naming, with their lines, all files of the recipe that are not there."""
    problems = [
        *_missing_files(resolved.value.prepare, resolved.origin),
        *_missing_corpora(resolved.value.load, resolved.origin),
    ]
    train = resolved.value.train
    starts = {"train.start_from": train.start_from}
    starts |= {f"train.phases.{index}.start_from": phase.start_from for index, phase in enumerate(train.phases)}
    for key, start in starts.items():
        if start and not (Path(start) / HUGGING_FACE).is_file():
            try:
                resolve_checkpoint(Path(start))
            except DataError as error:
                problems.append(Problem(resolved.origin(key), f"`{key}`: {error}"))
    if problems:
        raise ConfigError(problems)


def located(error: UserError, resolved: Resolved[Recipe]) -> ConfigError:
    """`error`, one problem a line, as problems of the recipe: each where a setting that it names was set."""
    problems = []
    for line in str(error).splitlines():
        places = [resolved.origins[key] for key in re.findall(r"`([a-z_.]+)", line) if key in resolved.origins]
        problems.append(Problem(places[0] if places else "", line.removeprefix("plan: ") if places else line))
    return ConfigError(problems)


def _missing_in_broken(path: Path) -> list[Problem]:
    """The missing files of a recipe that has other problems; none when its `[prepare]` is one of them."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        settings = parse_tree(Prepare, tomllib.loads(text)["prepare"], str(path))
    except (OSError, ValueError, LookupError, ConfigError):
        return []
    lines = {".".join(map(str, key)): line for key, line in key_lines(text).items()}
    return list(_missing_files(settings, lambda key: f"{path}:{lines[key]}"))


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


def set_aside(run: Path) -> Path | None:
    """Moves an existing run out of the way; returns where it is now."""
    if not run.exists():
        return None
    number = next(n for n in range(1, 1_000_000) if not run.with_name(f"{run.name}.{n}").exists())
    moved = run.with_name(f"{run.name}.{number}")
    os.replace(run, moved)
    return moved


def open_run(run: Path, resolved: Resolved[Recipe], events: EventLog) -> None:
    """Makes `run` ready for `resolved`, saving the config; the caller holds its lock.

    A setting that may change is changed and recorded. Any other change of what the model is trained on or how raises
    RunConflict once there is a checkpoint to lose.
    """
    changed = list(_changes(run, resolved)) if (run / FILE).exists() else []
    fatal = [change for change in changed if not change[3]]
    if fatal and list_checkpoints(run / "checkpoints"):
        listed = "\n".join(f"  {key}: {shown(before)} -> {shown(after)}" for key, before, after, _ in fatal)
        raise RunConflict(
            f"{run}: this run was begun with other settings:\n{listed}\n"
            "put them back, give the recipe another `name`, or start anew with --new (the old run is kept beside it)"
        )
    events.write(
        "run_started",
        version=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        command=" ".join(sys.argv[1:]),
    )
    for key, before, after, _ in changed:
        events.write("config_changed", key=key, before=before, after=after)
    save_resolved(run, resolved)


def _changes(run: Path, resolved: Resolved[Recipe]) -> Iterator[tuple[str, Any, Any, bool]]:
    """(key, value before, value now, whether it may change) for every setting that differs from the saved config."""
    try:
        before = dict(flatten(load_resolved(run, Recipe).value))
    except ConfigError:
        # Written by a version with other settings: nothing comparable, treat every key as it is now.
        return
    now = dict(flatten(resolved.value))
    free = set(free_keys(Recipe))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            name = ".".join(part for part in key.split(".") if not part.isdigit())
            yield key, before.get(key), now.get(key), name in free


def free_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Dotted keys that may change when a run continues; evaluation is measured anew, so all of its keys may."""
    for field in fields_of(cls):
        key = f"{prefix}{field.name}"
        section = section_of(field.kind) or section_of(item_of(field.kind))
        if section:
            yield from free_keys(section, f"{key}.")
        if field.continues or (key.startswith("evaluate.") and not section):
            yield key
