"""Verbs that only read recipes: `recipe check | show | diff | upgrade`, `model describe`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import ConfigError, Problem
from ropewalk.base.files import committed_file
from ropewalk.config.read import Resolved, flatten, read_text
from ropewalk.config.upgrade import Change, upgraded_text
from ropewalk.model.sharding import splits
from ropewalk.model.spec import resolve
from ropewalk.plan.machine import Gpu, this_machine

from .plan_recipe import check_plan
from .preflight import check_contents, check_trainable
from .recipe import Recipe
from .run_or_recipe import given, resolve_recipe


@dataclass(frozen=True, slots=True)
class Checked:
    """A recipe without problems."""

    resolved: Resolved[Recipe]
    remarks: tuple[Problem, ...]
    """Remarks on what looks odd in its files."""


def check(recipe: Path, overrides: Sequence[str] = (), *, remotely: bool = False) -> Checked:
    """The recipe, if it has no problems; else raises ConfigError with all of them, including settings that no machine,
    however large, could run, and those that do not fit the first records of its files. URLs are read only if
    `remotely`."""
    meant = given(recipe, overrides)
    resolved = meant.resolved
    problems: list[Problem] = []
    remarks: list[Problem] = []
    try:
        meant.check_inputs()
    except ConfigError as error:
        problems += error.problems
    try:
        remarks = check_contents(resolved, remotely=remotely) if meant.prepared is None else []
    except ConfigError as error:
        problems += error.problems
    try:
        check_trainable(resolved)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    here, endless = this_machine(), 1 << 60
    any_gpu = (Gpu(name="any", memory_bytes=endless, capability=9.0),)
    gpus = any_gpu if resolved.value.plan.device == "cuda" else here.gpus
    check_plan(resolved, machine=dataclasses.replace(here, memory_bytes=endless, gpus=gpus))
    return Checked(resolved, tuple(remarks))


def show(recipe: Path, overrides: Sequence[str] = ()) -> Resolved[Recipe]:
    """Every setting of a recipe or run and where it comes from; does not check input files."""
    return resolve_recipe(recipe, overrides)


def upgrade(path: Path) -> list[Change]:
    """Renames outdated keys of the recipe in `path` and keeps everything else; the changes."""
    read_text(path)  # reports what is wrong with the file
    text, changes = upgraded_text(path.read_bytes().decode("utf-8-sig"), name=str(path))
    if changes:
        with committed_file(path) as file:
            file.write(text.encode())
    return changes


def diff(first: Path, second: Path) -> dict[str, tuple[Any, Any]]:
    """The settings in which two recipes or runs differ, defaults included, by dotted key."""
    one, two = (dict(flatten(resolve_recipe(path).value)) for path in (first, second))
    return {key: (one.get(key), two.get(key)) for key in {**one, **two} if one.get(key) != two.get(key)}


def describe(recipe: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The recipe's model: every parameter's shape and split, counts and FLOPs. Builds nothing."""
    meant = given(recipe, overrides)
    settings = meant.resolved.value
    spec = resolve(
        settings.model,
        vocabulary=meant.vocabulary(),
        sequence_length=settings.load.sequence_length,
    )
    return {
        "parameters": spec.parameters(),
        "matmul_parameters": spec.matmul_parameters(),
        "flops_per_token": spec.flops_per_token(),
        "flops_per_token_causal": spec.flops_per_token("causal"),
        "shapes": {name: list(shape) for name, shape in spec.shapes().items()},
        "splits": {name: split.role for name, split in splits(spec).items()},
    }
