"""Writing and reading recipes: `new`, `recipe check | show | diff`, `model describe`. Nothing runs."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import UserError
from ropewalk.base.files import committed_file
from ropewalk.config.read import Resolved, flatten, read
from ropewalk.model.sharding import splits
from ropewalk.model.spec import resolve
from ropewalk.plan.machine import Gpu, this_machine

from .opening import check_inputs, read_recipe
from .pipeline import check_plan, expected_vocabulary
from .recipe import Recipe
from .reference import commented_recipe


def new_recipe(path: Path, *, data: list[str], name: str | None = None, force: bool = False) -> Path:
    """Writes a recipe that trains on `data` (files, folders or globs) to `path`, every setting with its meaning."""
    if path.exists() and not force:
        raise UserError(f"{path}: exists; choose another name or add --force")
    if path.suffix != ".toml":
        raise UserError(f"{path}: a recipe is a TOML file; name it {path.with_suffix('.toml')}")
    missing = [item for item in data if not set(item) & set("*?[:") and not os.path.exists(item)]
    if missing:
        raise UserError(f"no such file or folder: {', '.join(missing)}; name text files, a folder of them or a glob")
    labels: list[str] = []
    for item in data:
        labels.append(_label(item, taken=labels))
    sources = "\n".join(
        f'[[prepare.sources]]\nname = "{label}"\npaths = [{json.dumps(item, ensure_ascii=False)}]\n'
        for label, item in zip(labels, data, strict=True)
    )
    with committed_file(path, "w") as file:
        file.write(commented_recipe(name or path.stem, sources))
    return path


def check(recipe: Path, overrides: Sequence[str] = ()) -> Resolved[Recipe]:
    """The recipe, when nothing is wrong with it; raises ConfigError with everything that is: also with settings that no
    machine could follow, however large."""
    resolved = read_recipe(recipe, overrides)
    check_inputs(resolved)
    here, endless = this_machine(), 1 << 60
    any_gpu = (Gpu(name="any", memory_bytes=endless, capability=9.0),)
    gpus = any_gpu if resolved.value.plan.device == "cuda" else here.gpus
    check_plan(resolved, machine=dataclasses.replace(here, memory_bytes=endless, gpus=gpus))
    return resolved


def show(recipe: Path, overrides: Sequence[str] = ()) -> Resolved[Recipe]:
    """Every value that a run would use and where it comes from; input files are not looked for."""
    return read(Recipe, recipe, overrides)


def diff(first: Path, second: Path) -> dict[str, tuple[Any, Any]]:
    """The settings in which two recipes differ, defaults included, by dotted key."""
    one, two = (dict(flatten(read(Recipe, path).value)) for path in (first, second))
    return {key: (one.get(key), two.get(key)) for key in {**one, **two} if one.get(key) != two.get(key)}


def describe(recipe: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The recipe's model: every parameter's shape and split, counts and FLOPs. Builds nothing."""
    settings = read(Recipe, recipe, overrides).value
    spec = resolve(
        settings.model,
        vocabulary=expected_vocabulary(settings),
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


def _label(item: str, *, taken: list[str]) -> str:
    stem = Path(item.rstrip("/*")).stem
    label = "".join(c if c.isalnum() or c in "-_" else "-" for c in stem).strip("-") or "text"
    number = next(n for n in range(len(taken) + 1) if (f"{label}-{n}" if n else label) not in taken)
    return f"{label}-{number}" if number else label
