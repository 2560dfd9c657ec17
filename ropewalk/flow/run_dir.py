"""Opening a run directory: new, continued, or in conflict with what was begun there."""

from __future__ import annotations

import glob
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ropewalk import __version__
from ropewalk.base.errors import ConfigError, DamagedFile, Problem, RunConflict, UserError
from ropewalk.base.events import EventLog
from ropewalk.base.install import install_command
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.config.positions import key_lines
from ropewalk.config.read import Resolved, flatten, parse_toml, parse_tree, read, read_text
from ropewalk.config.resolved import FILE, load_resolved, save_resolved
from ropewalk.config.schema import fields_of, item_of, section_of
from ropewalk.config.write import shown
from ropewalk.load.config import Load
from ropewalk.prepare.config import Prepare
from ropewalk.prepare.sources import missing_packages, missing_paths
from ropewalk.store.origin import is_url

from .continue_run import Continuation
from .recipe import Recipe
from .run_stages import Stages
from .start_from.start_from import RUNS, beneath

_log = logging.getLogger(__name__)


def read_recipe(path: Path, overrides: Sequence[str] = (), *, runs: Path = RUNS, new: bool = False) -> Resolved[Recipe]:
    """The recipe in `path`, with what its sources supply (flow/start_from/start_from.py); a ConfigError names its
    missing files too, where `[prepare]` can be read by itself. Its run, if there is one, lies in `runs`; with `new` it
    does not count."""
    try:
        return read(Recipe, path, overrides, beneath=beneath(runs=runs, new=new))
    except ConfigError as error:
        raise ConfigError([*error.problems, *_missing_in_broken(path)]) from None


def check_inputs(resolved: Resolved[Recipe], *, data: bool = True) -> None:
    """Raises ConfigError naming, with their lines, all files and packages that the recipe needs and that are not
    there; without `data` none that its data are prepared from."""
    problems = _missing_data(resolved) if data else []
    if problems:
        raise ConfigError(problems)


def check_contents(resolved: Resolved[Recipe], *, remotely: bool = False) -> list[Problem]:
    """Tries the sources on the first records of some files: remarks on what is odd. Raises ConfigError naming, with
    their lines, the settings by which a path gives no document; paths that are URLs are tried only `remotely`."""
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
    """Raises ConfigError naming, with their lines, the settings of `[load]` that training cannot follow."""
    problems = []
    for index, media in enumerate(resolved.value.load.media):
        key = f"load.media.{index}"
        where = next((place for name, place in resolved.origins.items() if name.startswith(f"{key}.")), "")
        what = f'`load.media`: training reads tokens; no model here reads the images of "{media.name}"'
        remedy = "remove the table; `ropewalk doctor data` measures it, and `open_media` reads it in Python"
        problems.append(Problem(where, what, remedy))
    if problems:
        raise ConfigError(problems)


def _missing_data(resolved: Resolved[Recipe]) -> list[Problem]:
    recipe, origin = resolved.value, resolved.origin
    packages = [] if recipe.load.corpus else _missing_packages(recipe.prepare, origin)
    return [*_missing_files(recipe.prepare, origin), *packages, *_missing_corpora(recipe.load, origin)]


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
        text = read_text(path)
        settings = parse_tree(Prepare, parse_toml(text, str(path))["prepare"], str(path))
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


def set_aside(run: Path) -> Path | None:
    """Moves an existing run out of the way; returns where it is now."""
    if not run.exists():
        return None
    number = next(n for n in range(1, 1_000_000) if not run.with_name(f"{run.name}.{n}").exists())
    moved = run.with_name(f"{run.name}.{number}")
    os.replace(run, moved)
    return moved


def open_run(run: Path, found: Continuation, events: EventLog) -> None:
    """Makes `run` ready for the settings of `found`, saving the config; the caller holds its lock.

    A setting that may change is changed and recorded, and so are more steps and phases where `found` allows them. Any
    other change of what the model is trained on or how raises RunConflict once there is a checkpoint to lose, and a
    saved config that is damaged cannot tell: DamagedFile.
    """
    resolved = found.resolved
    try:
        changed = list(_changes(run, resolved)) if (run / FILE).exists() else []
    except DamagedFile as error:
        if list_checkpoints(run / "checkpoints"):
            raise
        _log.warning("%s; it is written anew from the recipe, which is the place to change settings", error.fault)
        changed = []
    fatal = [change for change in changed if not change[3] and not found.covers(change[0])]
    if fatal and list_checkpoints(run / "checkpoints"):
        told = [change for change in fatal if not found.keeps(change[0])] or fatal
        listed = "\n".join(f"  {key}: {shown(before)} -> {shown(after)}" for key, before, after, _ in told)
        why = f"{found.refusal}\n" if found.refusal else ""
        raise RunConflict(
            f"{run}: this run was begun with other settings, by its {FILE}:\n{listed}\n{why}"
            "put them back, give the recipe another `name`, or start anew with --new (the old run is kept beside it); "
            f'to train its weights with other settings, give the recipe another `name` and `train.start_from = "{run}"`'
        )
    found.move_aside()
    events.write(
        "run_started",
        version=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        command=" ".join(sys.argv[1:]),
    )
    for key, before, after, _ in changed:
        events.write("config_changed", key=key, before=before, after=after)
    if found.how:
        events.write("continued", **found.event())
        Stages(run, events).reopen("train")
    save_resolved(run, resolved)


def _changes(run: Path, resolved: Resolved[Recipe]) -> Iterator[tuple[str, Any, Any, bool]]:
    """(key, value before, value now, whether it may change) for every setting that differs from the saved config."""
    try:
        saved = load_resolved(run, Recipe)
        before = dict(flatten(saved.value))
    except ConfigError:
        # Written by a version with other settings: nothing comparable, treat every key as it is now.
        return
    now = dict(flatten(resolved.value))
    free = set(free_keys(Recipe))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            name = ".".join(part for part in key.split(".") if not part.isdigit())
            yield key, before.get(key), now.get(key), name in free
    for module in sorted(saved.plugins.keys() & resolved.plugins.keys()):
        one, other = saved.plugins[module].digest[:12], resolved.plugins[module].digest[:12]
        if one != other:
            yield f"plugins.{module}", f"source {one}", f"source {other}", False


def free_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Dotted keys that may change when a run continues; evaluation is measured anew, so all of its keys may."""
    for field in fields_of(cls):
        key = f"{prefix}{field.name}"
        section = section_of(field.kind) or section_of(item_of(field.kind))
        if section:
            yield from free_keys(section, f"{key}.")
        if field.continues or (key.startswith("evaluate.") and not section):
            yield key
