"""The names of all task files in some folders, from a cache that is keyed by the files' times and sizes.

Reading thousands of YAML files takes half a minute; a second time only those that have changed are read.
"""

from __future__ import annotations

import fnmatch
import gc
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
import xxhash

from ropewalk.base.errors import DataError, MissingPackage
from ropewalk.config.cache import cache_folder

FORMAT = 1
SUITES = Path(__file__).parent.parent / "suites"
"""The task files that come with ropewalk; each folder is a suite."""
_LEFT_OUT = ("__pycache__", ".ipynb_checkpoints", ".git")
Stamp = int
"""Time of the last change in nanoseconds, mixed with the size."""


@dataclass(frozen=True, slots=True)
class TaskEntry:
    """What lists say of a task file."""

    name: str
    kind: Literal["task", "group", "python"]
    path: str
    output_type: str = ""
    metrics: tuple[str, ...] = ()
    data_set: str = ""
    config: str = ""
    splits: tuple[str, ...] = ()
    own_files: bool = False
    """Whether the task names its data files itself."""
    tags: tuple[str, ...] = ()
    ability: str = ""
    ours: bool = False
    alias: str = ""


class TaskIndex:
    """Entries by name, from folders in order: the first folder that has a name counts."""

    def __init__(self, folders: Sequence[Path], *, cache: Path | None = None) -> None:
        self.broken: dict[str, str] = {}
        """Files that cannot be read, and why."""
        self._trees: dict[str, dict[str, Any]] = {}
        """Entries as the cache has them; objects are made of those that are asked for."""
        for folder in folders:
            found = _Folder(folder, cache or cache_folder() / "task-index")
            self.broken |= found.broken
            for tree in found.entries:
                self._trees.setdefault(tree["name"], tree)

    def __len__(self) -> int:
        return len(self._trees)

    def __contains__(self, name: str) -> bool:
        return name in self._trees

    def __getitem__(self, name: str) -> TaskEntry:
        return entry_of(self._trees[name])

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._trees)

    def matching(self, pattern: str) -> list[TaskEntry]:
        """Entries whose name (with a slash: whose path) or ability matches a glob, or contains the text."""
        glob = re.compile(fnmatch.translate(pattern)).match if any(mark in pattern for mark in "*?[") else None
        key = "path" if "/" in pattern else "name"
        found = [
            tree
            for tree in self._trees.values()
            for texts in [(tree[key], tree.get("ability", ""))]
            if (glob(texts[0]) or glob(texts[1]) if glob else pattern in texts[0] or pattern in texts[1])
        ]
        return [entry_of(tree) for tree in sorted(found, key=lambda tree: str(tree["name"]))]

    def tagged(self, tag: str) -> list[TaskEntry]:
        """Tasks with a tag, by name."""
        found = [tree for tree in self._trees.values() if tag in tree.get("tags", ())]
        return [entry_of(tree) for tree in sorted(found, key=lambda tree: str(tree["name"]))]

    def suite(self, name: str) -> list[TaskEntry]:
        """The tasks of a suite, or of `all`, by file; empty if there is none."""
        root = str(SUITES if name == "all" else SUITES / name) + os.sep
        found = [tree for tree in self._trees.values() if tree["path"].startswith(root) and tree["kind"] == "task"]
        return [entry_of(tree) for tree in sorted(found, key=lambda tree: str(tree["path"]))]


def suite_names() -> list[str]:
    """The suites that come with ropewalk."""
    return sorted(path.name for path in SUITES.iterdir() if path.is_dir() and path.name not in _LEFT_OUT)


def entry_of(tree: Mapping[str, Any]) -> TaskEntry:
    """An entry as it stands in the cache, as an object."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()}
    return TaskEntry(**values)


class _Folder:
    """The entries of one folder."""

    def __init__(self, folder: Path, cache: Path) -> None:
        root = folder.absolute()
        if not root.is_dir():
            raise DataError(f"{folder}: no such folder of task files; see `evaluate.task_folders`")
        file = cache / f"{xxhash.xxh3_64_hexdigest(str(root).encode())}.json"
        known: dict[str, Any] = _read_cache(file)
        self._stamps: dict[str, Stamp | None] = {}
        found: dict[str, Any] = {}
        changed = False
        for path, stamp in _yaml_files(str(root)):
            old = known.get(path)
            if old is None or old["stamp"] != stamp or ("includes" in old and self._other_includes(old["includes"])):
                old, changed = {"stamp": stamp, **self._described(path)}, True
            found[path] = old
        if changed or len(found) < len(known):
            _write_cache(file, found)
        self.entries: list[dict[str, Any]] = [each["entry"] for each in found.values() if "entry" in each]
        self.broken: dict[str, str] = {path: each["error"] for path, each in found.items() if "error" in each}

    def _other_includes(self, includes: Mapping[str, Stamp]) -> bool:
        return any(self._stamp(path) != stamp for path, stamp in includes.items())

    def _stamp(self, path: str) -> Stamp | None:
        if path not in self._stamps:
            try:
                self._stamps[path] = _stamp_of(os.stat(path))
            except OSError:
                self._stamps[path] = None
        return self._stamps[path]

    def _described(self, path: str) -> dict[str, Any]:
        from .task_file import read_task_file

        try:
            file = read_task_file(Path(path))
        except MissingPackage:
            raise
        except DataError as error:
            return {"error": str(error)}
        includes = {str(each): self._stamp(str(each)) for each in file.files[1:]}
        entry = _entry(file.values, path)
        return {**({"includes": includes} if includes else {}), **({"entry": entry} if entry else {})}


def _stamp_of(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns ^ status.st_size


def _yaml_files(folder: str) -> Iterator[tuple[str, Stamp]]:
    """The YAML files below a folder, sorted, each with its stamp."""
    with os.scandir(folder) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        if entry.name.endswith((".yaml", ".yml")):
            yield entry.path, _stamp_of(entry.stat())
        elif entry.is_dir() and entry.name not in _LEFT_OUT:
            yield from _yaml_files(entry.path)


def _entry(values: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """The entry of a file, without what is empty; None for a file that others only include."""
    tags = values.get("tag") or []
    shared: dict[str, Any] = {"path": path, "tags": [tags] if isinstance(tags, str) else list(map(str, tags))}
    if "class" in values and "task" in values:
        return {"name": str(values["task"]), "kind": "python", **shared}
    if isinstance(values.get("group"), str) and not isinstance(values.get("task"), str):
        return {"name": values["group"], "kind": "group", "alias": str(values.get("group_alias") or ""), **shared}
    if not isinstance(values.get("task"), str):
        return None
    metadata = values.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    settings = values.get("dataset_kwargs")
    metrics = values.get("metric_list")
    names = [str(each.get("metric")) for each in metrics if isinstance(each, dict)] if isinstance(metrics, list) else []
    entry = {
        "name": values["task"],
        "kind": "task",
        **shared,
        "output_type": str(values.get("output_type") or "generate_until"),
        "metrics": names,
        "data_set": str(values.get("dataset_path") or ""),
        "config": str(values.get("dataset_name") or ""),
        "splits": [str(values[key]) for key in ("test_split", "validation_split") if values.get(key)][:1],
        "own_files": bool(isinstance(settings, dict) and settings.get("data_files")),
        "ability": str(metadata.get("ability") or ""),
        "ours": bool(metadata.get("ours")),
        "alias": str(values.get("task_alias") or ""),
    }
    return {key: value for key, value in entry.items() if value}


def _read_cache(file: Path) -> dict[str, Any]:
    collecting = gc.isenabled()
    gc.disable()  # it would walk through tens of thousands of new dictionaries, again and again
    try:
        tree = orjson.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    finally:
        if collecting:
            gc.enable()
    return tree["files"] if isinstance(tree, dict) and tree.get("format") == FORMAT else {}


def _write_cache(file: Path, files: Mapping[str, Any]) -> None:
    """Writes beside and renames; a cache that cannot be kept is made again next time."""
    beside = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(orjson.dumps({"format": FORMAT, "files": files}))
        beside.replace(file)
    except OSError:
        beside.unlink(missing_ok=True)
