"""Reads the YAML files of tasks and groups, in the dialect of lm-evaluation-harness.

`include` merges other files, relative to the file that names them; keys of the including file win. `!function mod.name`
is kept as a name and imported only from trusted folders (harness/functions.py). Every key remembers its file and line.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError, MissingPackage

TASK_KEYS = frozenset(
    [
        "task",
        "task_alias",
        "tag",
        "dataset_path",
        "dataset_name",
        "dataset_kwargs",
        "training_split",
        "validation_split",
        "test_split",
        "fewshot_split",
        "process_docs",
        "doc_to_text",
        "doc_to_target",
        "doc_to_choice",
        "process_results",
        "description",
        "target_delimiter",
        "fewshot_delimiter",
        "fewshot_config",
        "num_fewshot",
        "metric_list",
        "output_type",
        "generation_kwargs",
        "repeats",
        "filter_list",
        "should_decontaminate",
        "doc_to_decontamination_query",
        "gen_prefix",
        "unsafe_code",
        "metadata",
    ]
)
GROUP_KEYS = frozenset(("group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag"))
ELSEWHERE = {
    "class": "a task written as a Python class runs in lm-eval only",
    "custom_dataset": "data made by a Python function are read by lm-eval only",
    "doc_to_image": "no model here reads images",
    "doc_to_audio": "no model here reads audio",
    "use_prompt": "prompts of promptsource are read by lm-eval only",
}
"""Keys that are not supported, and why."""
OUTPUT_TYPES = ("loglikelihood", "multiple_choice", "generate_until", "loglikelihood_rolling")


@dataclass(frozen=True, slots=True)
class FunctionName:
    """`!function module.name` of a YAML file in `folder`."""

    name: str
    folder: Path


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A YAML file with all that it includes."""

    path: Path
    values: Mapping[str, Any]
    places: Mapping[str, tuple[Path, int]] = field(default_factory=dict)
    """File and line of each key."""
    files: tuple[Path, ...] = ()
    """The file itself and what it includes."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`; the default also where it is null, as in lm-eval."""
        value = self.values.get(key)
        return default if value is None else value

    def where(self, key: str) -> str:
        """`file:line` of a key, for messages."""
        path, line = self.places.get(key, (self.path, 0))
        return f"{path}:{line}" if line else str(path)

    def wrong(self, key: str, what: str, remedy: str = "") -> DataError:
        """The error that names the line of `key`."""
        return DataError(f"{self.where(key)}: `{key}` {what}" + (f"; {remedy}" if remedy else ""))

    def changed(self, values: Mapping[str, Any]) -> TaskFile:
        """The file with other values for some keys, as a group gives them to its members."""
        return TaskFile(self.path, {**self.values, **values}, self.places, self.files)


def read_task_file(path: Path) -> TaskFile:
    """The file with its includes; DataError names the file and line of what is wrong."""
    found = _read(path.absolute(), ())
    values, places = dict(found.values), dict(found.places)
    values.pop("include", None)
    return TaskFile(path, values, places, tuple(dict.fromkeys(found.files)))


def _read(path: Path, above: tuple[Path, ...]) -> TaskFile:
    if path in above:
        chain = " -> ".join(each.name for each in (*above, path))
        raise DataError(f"{above[-1]}: `include` goes round in a circle: {chain}")
    own, lines = _parsed(path, by=above[-1] if above else None)
    values: dict[str, Any] = {}
    places: dict[str, tuple[Path, int]] = {}
    files = [path]
    included = own.get("include", [])
    for name in included if isinstance(included, list) else [included]:
        other = _read((path.parent / str(name)).resolve(), (*above, path))
        values |= {key: value for key, value in other.values.items() if key not in ("include", "task_list")}
        places |= other.places
        files += other.files
    values |= own
    places |= {key: (path, line) for key, line in lines.items()}
    return TaskFile(path, values, places, tuple(files))


def _parsed(path: Path, *, by: Path | None) -> tuple[dict[str, Any], dict[str, int]]:
    yaml = yaml_package()
    try:
        text = path.read_bytes().decode("utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DataError(f"{by}: `include`: no file {path}" if by else f"{path}: no such task file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error}") from None
    loader = _loader(path.parent)(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise DataError(f"{path}: a task file holds keys and values, such as `task: my_task`")
        lines: dict[str, int] = {}
        given: dict[str, Any] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines and _plain(given[name]) != _plain(value):
                raise DataError(f"{path}:{line}: `{name}` stands on line {lines[name]} already, with another value")
            lines[name], given[name] = line, value
        values = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise DataError(f"{path}:{mark.line + 1 if mark else 1}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise DataError(f"{path}: {error}") from None
    finally:
        loader.dispose()
    return {str(key): value for key, value in values.items()}, lines


def _plain(node: Any) -> Any:
    """A node's content without its position."""
    if isinstance(node.value, list):
        return (node.tag, [tuple(map(_plain, e)) if isinstance(e, tuple) else _plain(e) for e in node.value])
    return (node.tag, node.value)


def yaml_package() -> Any:
    """The package PyYAML."""
    try:
        import yaml
    except ImportError:
        raise MissingPackage("pyyaml", "a task written as YAML", "evaluate") from None
    return yaml


def _loader(folder: Path) -> Any:
    """PyYAML's safe loader, in C where it is built so, with `!function`."""
    yaml = yaml_package()

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        pass

    def function(loader: Any, node: Any) -> FunctionName:
        return FunctionName(str(loader.construct_scalar(node)), folder)

    Loader.add_constructor("!function", function)
    return Loader


def check_task(file: TaskFile) -> list[str]:
    """Warnings about a task's file: unknown keys, settings without effect. DataError for contradictions."""
    for key, why in ELSEWHERE.items():
        if file.get(key) is not None:
            remedy = "run it in lm-eval, which ropewalk's bridge lends the model"
            raise file.wrong(key, f"is not supported: {why}", remedy)
    warnings = [_unknown(file, key, TASK_KEYS) for key in file.values if key not in TASK_KEYS | {"group"}]
    kind = file.get("output_type", "generate_until")
    if kind not in OUTPUT_TYPES:
        raise file.wrong("output_type", f'is "{kind}"', f"it must be one of {', '.join(OUTPUT_TYPES)}")
    for key in ("dataset_path", "doc_to_target") if kind == "loglikelihood_rolling" else ("dataset_path", *_TEXTS):
        if file.get(key) is None:
            raise DataError(f"{file.path}: a task of type {kind} needs `{key}`")
    if file.get("test_split") is None and file.get("validation_split") is None:
        raise DataError(f"{file.path}: no split to evaluate on; name `test_split` or `validation_split`")
    if kind == "multiple_choice" and file.get("doc_to_choice") is None:
        raise file.wrong("output_type", "is multiple_choice, but there is no `doc_to_choice`", "give the choices")
    warnings += _check_numbers(file)
    return warnings + _without_effect(file, kind)


_TEXTS = ("doc_to_text", "doc_to_target")


def _check_numbers(file: TaskFile) -> list[str]:
    for key, least in (("num_fewshot", 0), ("repeats", 1)):
        number = file.get(key, least)
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise file.wrong(key, f"is {number!r}", f"it must be a whole number of at least {least}")
    for key, kinds in (("metric_list", list), ("filter_list", list), ("generation_kwargs", dict), ("metadata", dict)):
        if not isinstance(file.get(key, kinds()), kinds):
            raise file.wrong(key, f"must be a {'list' if kinds is list else 'mapping'}")
    shots = file.get("fewshot_config", {})
    if not isinstance(shots, dict):
        raise file.wrong("fewshot_config", "must be a mapping")
    sampler = shots.get("sampler", "default")
    if sampler not in ("default", "first_n"):
        raise file.wrong("fewshot_config", f'has sampler "{sampler}"', "it must be default or first_n")
    unknown = [key for key in shots if key not in FEWSHOT_KEYS]
    warned = [f"{file.where('fewshot_config')}: `fewshot_config` has no key `{key}`; it is ignored" for key in unknown]
    if shots.get("samples") is not None and (shots.get("split") or file.get("fewshot_split")):
        warned.append(
            f"{file.where('fewshot_config')}: both a few-shot split and `samples` are given; the split counts"
        )
    return warned


FEWSHOT_KEYS = frozenset(
    [
        "sampler",
        "split",
        "process_docs",
        "samples",
        "doc_to_text",
        "doc_to_choice",
        "doc_to_target",
        "gen_prefix",
        "fewshot_delimiter",
        "target_delimiter",
    ]
)


def _without_effect(file: TaskFile, kind: str) -> list[str]:
    given = file.get("generation_kwargs")
    found = []
    if kind != "generate_until":
        for key in ("generation_kwargs", "filter_list"):
            if file.get(key) is not None:
                found.append(f"{file.where(key)}: `{key}` has no effect on a task of type {kind}")
    elif given and given.get("do_sample") is False and float(given.get("temperature") or 0):
        found.append(f"{file.where('generation_kwargs')}: `do_sample: false` is greedy; `temperature` has no effect")
    return found


def _unknown(file: TaskFile, key: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return f"{file.where(key)}: unknown key `{key}` is ignored{hint}"
