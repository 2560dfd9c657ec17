"""What `train.start_from` supplies to a recipe. No torch.

The base model has a shape, a tokenizer, a sequence length and perhaps a chat template. Settings that the recipe leaves
out are taken from the base, which becomes their origin. Contradictions, and a chat template that a given tokenizer
cannot represent, are reported with file and line before anything is prepared.

A run stores in its `config.toml` which values it took over and from which checkpoint. Once it has a checkpoint of its
own it no longer needs the base, which may train further or disappear.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DamagedCheckpoint, DataError, Problem, UserError
from ropewalk.checkpoint.format import TOKENIZER, list_checkpoints, read_checkpoint_manifest
from ropewalk.config.layer import Beneath, Layer, Where
from ropewalk.config.read import Resolved, flatten, laid_over
from ropewalk.config.resolved import FILE as CONFIG
from ropewalk.config.resolved import load_resolved
from ropewalk.config.write import shown
from ropewalk.model.config import Model
from ropewalk.model.spec import CHANGEABLE

from ..recipe import Recipe
from .base_model import Base, can_grow, open_base

RUNS = Path("runs")

_FROM = "from "
"""Prefix of the origin of a value that a base supplied."""
_SIZES = ("layers", "width", "heads", "kv_heads", "mlp_width")
"""Sizes that `ropewalk model grow` can increase."""

_log = logging.getLogger(__name__)
Tree = Mapping[str, Any]


def beneath(*, runs: Path = RUNS, new: bool = False) -> Beneath:
    """The config layer beneath a recipe whose run lies in `runs`; with `new`, an existing run is ignored."""
    return functools.partial(_layer, runs=runs, new=new)


def started(resolved: Resolved[Recipe], *, runs: Path = RUNS, new: bool = False) -> Resolved[Recipe]:
    """A recipe built in Python, with the values its bases supply."""
    value = resolved.value
    starts = value.train.start_from or any(phase.start_from for phase in value.train.phases)
    chat = value.prepare.tokenizer.file and any(source.format == "chat" for source in value.prepare.sources)
    return laid_over(resolved, beneath(runs=runs, new=new)) if starts or chat else resolved


def starts_of(tree: Tree) -> dict[str, str]:
    """The base of each phase, by key, in the order of the phases."""
    train = _table(tree, "train")
    found = {"train.start_from": train.get("start_from")}
    phases = train.get("phases")
    for index, phase in enumerate(phases if isinstance(phases, list) else ()):
        own = phase.get("start_from") if isinstance(phase, dict) else None
        if index == 0 and own:
            found = {}
        found[f"train.phases.{index}.start_from"] = own
    return {key: place for key, place in found.items() if isinstance(place, str) and place}


def _layer(tree: Tree, where: Where, *, runs: Path, new: bool) -> Layer:
    layer = Layer()
    starts = starts_of(tree)
    begun = _begun(tree, runs) if starts and not new else None
    bases: dict[str, Base] = {}
    for key, place in starts.items():
        if _is_itself(place, tree, runs):
            what = f"`{key}`: {place} is the run of this recipe itself"
            layer.problems.append(Problem(where(key), what, "give the recipe another `name`"))
            continue
        try:
            bases[key] = _base(key, place, begun)
        except UserError as error:
            layer.problems += [Problem(where(key), f"`{key}`: {line}") for line in str(error).splitlines()]
    for key, base in bases.items():
        layer.exact[key] = base.path
    if bases:
        first, *others = bases
        _supply_model(layer, tree, where, bases[first])
        _supply_tokenizer(layer, tree, where, bases[first])
        for key in others:
            _compare(layer, bases[first], bases[key], key, where)
    _supply_template(layer, tree, where, chat=bases[first].chat if bases else "")
    return layer


def _is_itself(place: str, tree: Tree, runs: Path) -> bool:
    """Whether `place` is the recipe's own run."""
    name = tree.get("name")
    return isinstance(name, str) and bool(name) and Path(place).resolve().is_relative_to((runs / name).resolve())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """An existing run."""

    resolved: Resolved[Recipe]
    newest: Path | None
    """Its newest checkpoint."""
    phase: int
    """The phase it has reached; -1: no checkpoint, so it starts from its base."""


def _begun(tree: Tree, runs: Path) -> _Begun | None:
    """The run of the recipe; None if there is none, or if its config cannot be read, which `open_run` reports."""
    name = tree.get("name")
    folder = runs / name if isinstance(name, str) and name else None
    if folder is None or not (folder / CONFIG).is_file():
        return None
    try:
        resolved = load_resolved(folder, Recipe)
    except UserError:
        return None
    checkpoints = list_checkpoints(folder / "checkpoints")
    phase = 0 if checkpoints else -1
    for path in reversed(checkpoints):
        with contextlib.suppress(DamagedCheckpoint):
            phase = read_checkpoint_manifest(path).phase
            break
    return _Begun(resolved=resolved, newest=checkpoints[-1] if checkpoints else None, phase=phase)


def _base(key: str, place: str, begun: _Begun | None) -> Base:
    before = (dict(flatten(begun.resolved.value)).get(key) or "") if begun else ""
    if begun is None or not _is_of(before, place):
        return open_base(place)
    if begun.phase >= (int(key.split(".")[2]) if "phases" in key else 0):
        return _remembered(place, before, begun)
    try:
        return dataclasses.replace(open_base(before), place=place)
    except DataError:
        return open_base(place)  # it has moved on, and nothing of this run depends on what was there before


def _is_of(path: str, place: str) -> bool:
    """Whether `place` could have resolved to the checkpoint or directory `path`."""
    return bool(path) and (Path(path) == Path(place) or Path(path).parent in (Path(place), Path(place) / "checkpoints"))


def _remembered(place: str, path: str, begun: _Begun) -> Base:
    """The base as the run recorded it."""
    values, origins = dict(flatten(begun.resolved.value)), begun.resolved.origins
    supplied = {key for key, origin in origins.items() if origin.startswith(_FROM)}
    model = {name: values.get(f"model.{name}") for name in Model.__dataclass_fields__}
    tokenizer = values["prepare.tokenizer.file"]
    if tokenizer and not Path(tokenizer).exists() and begun.newest:
        tokenizer = str(begun.newest / TOKENIZER)
    return Base(
        place=place,
        path=path,
        model={
            name: value
            for name, value in model.items()
            if value is not None and (name not in CHANGEABLE or f"model.{name}" in supplied)
        },
        sequence_length=None,
        tokenizer=tokenizer,
        taken={
            key: (values[key], origins[key])
            for key in ("load.sequence_length", "prepare.chat.template")
            if key in supplied
        },
    )


def _supply_model(layer: Layer, tree: Tree, where: Where, base: Base) -> None:
    origin = f"{_FROM}{base.place}"
    given = _table(tree, "model")
    for name, value in base.model.items():
        if name not in given:
            layer.add(f"model.{name}", value, origin)
        elif name not in CHANGEABLE and given[name] != value:
            key, remedy = f"model.{name}", "remove it: the model is that of `train.start_from`"
            if name in _SIZES and isinstance(given[name], int) and given[name] > value and can_grow(base):
                remedy = (
                    f"remove it, or grow the model first: ropewalk model grow {base.place} GROWN {key}={given[name]}"
                )
            what = f"`{key}` is {shown(given[name])}, {base.place} has {shown(value)}"
            layer.problems.append(Problem(where(key), what, remedy))
    if base.sequence_length:
        layer.add("load.sequence_length", base.sequence_length, origin)
    for key, (value, before) in (base.taken or {}).items():
        layer.add(key, value, before)


def _supply_tokenizer(layer: Layer, tree: Tree, where: Where, base: Base) -> None:
    load, table = _table(tree, "load"), _table(_table(tree, "prepare"), "tokenizer")
    given, key = table.get("file"), "prepare.tokenizer.file"
    if load.get("corpus"):
        given, key = load.get("tokenizer"), "load.tokenizer"
    elif not given and base.tokenizer:
        layer.add(key, base.tokenizer, f"{_FROM}{base.place}")
        if base.taken is None:
            _report_training(layer, table, where, base)
        return
    if isinstance(given, str) and given and base.taken is None and not _is_same(given, base):
        what = f'`{key}`: "{given}" is another tokenizer than that of {base.place}, whose token ids the model knows'
        layer.problems.append(Problem(where(key), what, f'set it to "{base.place}"'))


def _report_training(layer: Layer, table: Tree, where: Where, base: Base) -> None:
    """Problems: settings for training a tokenizer although the base's is used."""
    kind = str((_tokenizer_tree(base.tokenizer).get("model") or {}).get("type", "")).lower()
    found: dict[str, Any] = {"kind": kind}
    if "vocab_size" in table:
        from ropewalk.prepare.tokenizer import load, vocabulary_size

        found["vocab_size"] = vocabulary_size(load(Path(base.tokenizer)))
    for name, value in found.items():
        if name in table and table[name] != value:
            key = f"prepare.tokenizer.{name}"
            what = f"`{key}` is {shown(table[name])}, {base.place} has its own tokenizer with {shown(value)}"
            layer.problems.append(Problem(where(key), what, "remove it: no tokenizer is trained"))


def _compare(layer: Layer, first: Base, other: Base, key: str, where: Where) -> None:
    """Problems: phases of a run train one model, so all bases must have its shape."""
    if other.taken is not None:
        return
    differing = {
        name: (first.model.get(name), other.model.get(name))
        for name in Model.__dataclass_fields__
        if name not in CHANGEABLE and first.model.get(name) != other.model.get(name)
    }
    if differing:
        found = "; ".join(f"`model.{name}` {shown(two)}, not {shown(one)}" for name, (one, two) in differing.items())
        what = f"`{key}`: {other.place} is another model than {first.place}: it has {found}"
        layer.problems.append(Problem(where(key), what, "the phases of a run train one model"))
    elif first.taken is None and not _is_same(first.tokenizer, other):
        what = f"`{key}`: {other.place} has another tokenizer than {first.place}"
        layer.problems.append(Problem(where(key), what, "the phases of a run read the same tokens"))


def _supply_template(layer: Layer, tree: Tree, where: Where, *, chat: str) -> None:
    """The chat template of the base; `plain` if the given tokenizer cannot represent it."""
    prepare = _table(tree, "prepare")
    sources = prepare.get("sources")
    tables = [source for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []
    file = _table(prepare, "tokenizer").get("file") or layer.values.get("prepare.tokenizer.file")
    key = "prepare.chat.template"
    if key in layer.values or not isinstance(file, str) or all(source.get("format") != "chat" for source in tables):
        return
    from ropewalk.prepare.chat import TEMPLATES

    given = _table(prepare, "chat").get("template")
    wanted = given or chat or "chatml"
    added = _tokenizer_tree(file).get("added_tokens")
    if not isinstance(added, list) or wanted not in TEMPLATES:
        return  # reported by its reader
    known = {token.get("content") for token in added if isinstance(token, dict)}
    missing = [marker for marker in TEMPLATES[wanted].markers if marker not in known]
    fitting = next(name for name, template in TEMPLATES.items() if known.issuperset(template.markers))
    lacks = f"the tokenizer {file} has no special token {' and no '.join(missing)}"
    if missing and given:
        layer.problems.append(Problem(where(key), f'`{key}` is "{given}", but {lacks}', f'set it to "{fitting}"'))
    elif missing:
        _log.warning('`%s` is "%s": %s', key, fitting, lacks)
        layer.add(key, fitting, f"{_FROM}{file}: no {' and no '.join(missing)}")
    elif chat:
        layer.add(key, chat, f"{_FROM}{file}")


def _tokenizer_tree(file: str) -> Tree:
    """A `tokenizer.json` as JSON; empty if it cannot be read."""
    from ropewalk.prepare import tokenizer

    try:
        tree = json.loads(tokenizer.read(Path(file)))
    except (DataError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _is_same(file: str, base: Base) -> bool:
    """Whether the tokenizer `file` produces the base's token ids; True if it cannot be read, which its reader
    reports."""
    from ropewalk.prepare import tokenizer
    from ropewalk.prepare.foreign import same_meaning

    try:
        theirs, ours = (tokenizer.read(Path(place)) for place in (file, base.tokenizer))
        return same_meaning(theirs, ours, path=Path(file))
    except DataError:
        return True


def _table(tree: Tree, key: str) -> Tree:
    found = tree.get(key)
    return found if isinstance(found, dict) else {}
