"""Opens a run directory: new, continued, or in conflict with its saved settings."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ropewalk import __version__
from ropewalk.base.errors import ConfigError, DamagedFile, RunConflict
from ropewalk.base.events import EventLog
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.config.read import Resolved, flatten
from ropewalk.config.resolved import FILE, load_resolved, save_resolved, saved_plugins
from ropewalk.config.schema import fields_of, item_of, section_of
from ropewalk.config.write import shown

from .continue_run import Continuation
from .recipe import Recipe
from .run_stages import Stages

_log = logging.getLogger(__name__)


def set_aside(run: Path) -> Path | None:
    """Renames an existing run out of the way; returns its new folder."""
    if not run.exists():
        return None
    number = next(n for n in range(1, 1_000_000) if not run.with_name(f"{run.name}.{n}").exists())
    moved = run.with_name(f"{run.name}.{number}")
    os.replace(run, moved)
    return moved


def open_run(run: Path, found: Continuation, events: EventLog) -> None:
    """Saves the settings of `found` in `run`; the caller holds its lock.

    Settings that may change are changed and recorded, and so are more steps and phases where `found` accepts them. Any
    other change of the training data or method raises RunConflict once there is a checkpoint; DamagedFile if the saved
    config cannot be read and there is a checkpoint.
    """
    resolved = found.resolved
    try:
        changed = list(_changes(run, resolved)) if (run / FILE).exists() else []
    except DamagedFile as error:
        if list_checkpoints(run / "checkpoints"):
            raise
        _log.warning("%s; it is rewritten from the recipe, which is the place to change settings", error.fault)
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
    """Yields (key, value before, value now, whether it may change) for every setting that differs from the saved
    config."""
    now = dict(flatten(resolved.value))
    saved = saved_plugins(run)
    for module in sorted(saved.keys() & resolved.plugins.keys()):
        one, other = saved[module].digest[:12], resolved.plugins[module].digest[:12]
        if one != other:
            named_by = {key.split(".")[0] for key, value in now.items() if _names(value, module)}
            yield f"plugins.{module}", f"source {one}", f"source {other}", named_by == {"evaluate"}
    try:
        before = dict(flatten(load_resolved(run, Recipe).value))
    except ConfigError:
        # Written by a version, or with a custom module, of other settings: the rest cannot be compared.
        return
    free = set(free_keys(Recipe))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            name = ".".join(part for part in key.split(".") if not part.isdigit())
            yield key, before.get(key), now.get(key), name in free


def _names(value: Any, module: str) -> bool:
    """Whether `value` is, or lists, a `module:attr` of this module."""
    listed = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(each, str) and each.startswith((f"{module}:", f"{module}.")) for each in listed)


def free_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Dotted keys that may change when a run continues; those of evaluation all may, since it is measured again."""
    for field in fields_of(cls):
        key = f"{prefix}{field.name}"
        section = section_of(field.kind) or section_of(item_of(field.kind))
        if section:
            yield from free_keys(section, f"{key}.")
        if field.continues or (key.startswith("evaluate.") and not section):
            yield key
