"""Keys of recipes that have new names: one table for the error, for `recipe upgrade` and for old files.

A recipe with an old key is refused with the new name. What ropewalk itself wrote under old names (`config.toml` of a
run) is upgraded when it is read. Hashes of settings are made of the old names, so that prepared data and runs of
earlier versions stay what they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from ropewalk.base.errors import ConfigError, Problem

MOVED = {"prepare.substring": "prepare.deduplicate.substring"}
"""Tables, old to new."""

_SCHEDULE = {"final_share": "final_lr_ratio", "min_gain": "min_delta"}
_PHASE = {
    "batch_rows": "batch_size",
    "batch_ramp.from_rows": "from_size",
    "mixture.most_epochs": "max_epochs",
    **{f"schedule.{old}": new for old, new in _SCHEDULE.items()},
}
RENAMED = {
    "prepare.compress": "compression",
    "prepare.stages": "artifacts",
    "prepare.sources.licence": "license",
    "prepare.sources.licence_key": "license_key",
    # Limits in bytes became limits in characters, the same number: for text in ASCII that is the same limit.
    "prepare.filter.min_bytes": "min_characters",
    "prepare.filter.max_bytes": "max_characters",
    "prepare.filter.gopher.max_hash_share": "max_hash_ratio",
    "prepare.filter.gopher.max_ellipsis_share": "max_ellipsis_ratio",
    "prepare.deduplicate.bloom.items": "expected_items",
    "prepare.deduplicate.bloom.false_positives": "false_positive_rate",
    "prepare.deduplicate.near.distance": "max_distance",
    "prepare.deduplicate.substring.min_left_bytes": "min_remaining_bytes",
    "prepare.tokenizer.vocabulary": "vocab_size",
    "load.ahead_bytes": "prefetch_bytes",
    "load.adapt": "autotune",
    "load.remote.ahead_bytes": "prefetch_bytes",
    "load.remote.requests": "max_requests",
    "load.media.ahead_bytes": "prefetch_bytes",
    "load.media.batch": "batch_size",
    "model.hidden": "mlp_width",
    "model.rope_base": "rope_theta",
    "model.tied": "tie_embeddings",
    "model.norm_place": "norm_position",
    "plan.microbatch_rows": "microbatch_size",
    "parallel.context_kind": "context_method",
    "parallel.activations": "saved_activations",
    "parallel.fusion_bytes": "bucket_bytes",
    "parallel.compression": "gradient_compression",
    "parallel.compression_rank": "powersgd_rank",
    **{f"train.{old}": new for old, new in _PHASE.items()},
    **{f"train.phases.{old}": new for old, new in _PHASE.items()},
    "train.early_stop.min_gain": "min_delta",
    "train.guard.memory_steps": "window_steps",
    "train.guard.most_in_a_row": "max_consecutive",
    "train.validate_rows": "validation_sequences",
    "train.layers_every_steps": "layer_stats_every_steps",
    "checkpoint.packing": "compression",
    "checkpoint.overhead": "max_overhead",
    "evaluate.new_tokens": "max_new_tokens",
}
"""Keys, by their place below the new name of their table -> the new last part."""

VALUES = {"load.remote.policy": {"climb": "hill-climb"}}
"""Values, by the new key."""

MODEL = {"hidden": "mlp_width", "rope_base": "rope_theta", "tied": "tie_embeddings", "norm_place": "norm_position"}
"""The same in the spec of a model, as checkpoints and plans hold it."""

PLAN = {
    "batch_rows": "batch_size",
    "microbatch_rows": "microbatch_size",
    "context_kind": "context_method",
    "activations": "saved_activations",
    "fusion_bytes": "bucket_bytes",
    "compression": "gradient_compression",
    "compression_rank": "powersgd_rank",
}
"""The same in the layout of a plan."""


Key = tuple[str | int, ...]


def new_key(key: Key) -> Key:
    """The key as it is named now; keys below a table that has moved move with it."""
    for old, new in MOVED.items():
        before = tuple(old.split("."))
        if key[: len(before)] == before:
            key = (*new.split("."), *key[len(before) :])
    leaf = RENAMED.get(dotted(key))
    return key if leaf is None else (*key[:-1], leaf)


def upgraded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's values under the names of now; ConfigError where one setting is given under both names."""
    moved = copy.deepcopy(dict(tree))
    for old, new in MOVED.items():
        _move(moved, old.split("."), new.split("."))
    plain: dict[str, Any] = _walked(moved, (), _RENAMED, VALUES)
    return plain


def upgraded_model(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of a model under the names of now."""
    return {MODEL.get(key, key): value for key, value in spec.items()}


def old_names(tree: Mapping[str, Any], table: str) -> dict[str, Any]:
    """The values of `table` under the names that hashes are made of: the first that each setting had. Settings in
    `ADDED` are left out at their defaults: runs from before them stay trained and evaluated."""
    whole: dict[str, Any] = dict(tree)
    for part in reversed(table.split(".")):
        whole = {part: whole}
    plain: dict[str, Any] = _walked(whole, (), _OLD, _OLD_VALUES)
    for old, new in MOVED.items():
        _move(plain, new.split("."), old.split("."))
    for part in table.split("."):
        plain = plain[part]
    return {key: value for key, value in plain.items() if ADDED.get(f"{table}.{key}", _NEVER) != value}


def old_plan(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A plan of several phases under the names that hashes are made of."""
    model, layout = ({new: old for old, new in names.items()} for names in (MODEL, PLAN))
    phases = [
        phase
        | {
            "spec": {model.get(key, key): value for key, value in phase["spec"].items()},
            "plan": {layout.get(key, key): value for key, value in phase["plan"].items()},
        }
        for phase in tree["phases"]
    ]
    return {**tree, "phases": phases}


ADDED: dict[str, Any] = {"model.kind": "decoder", "train.hooks": [], "evaluate.tasks": ["held-out", "completions"]}
"""Settings that are younger than the hashes of runs, with their defaults."""
_NEVER = object()
_RENAMED = {tuple(key.split(".")): leaf for key, leaf in RENAMED.items()}
_OLD = {(*key[:-1], leaf): key[-1] for key, leaf in _RENAMED.items()}
_OLD_VALUES = {key: {new: old for old, new in values.items()} for key, values in VALUES.items()}


def _walked(
    node: Any, table: tuple[str, ...], names: Mapping[tuple[str, ...], str], values: Mapping[str, Mapping[str, str]]
) -> Any:
    """`node`, which stands at `table`, with keys and values exchanged."""
    if isinstance(node, (list, tuple)):
        return [_walked(item, table, names, values) for item in node]
    if not isinstance(node, Mapping):
        known = values.get(dotted(table), {})
        return known.get(node, node) if isinstance(node, str) else node
    result: dict[str, Any] = {}
    for key, value in node.items():
        name = names.get((*table, key), key)
        if name != key and name in node:
            where = dotted((*table, key))
            raise ConfigError([Problem("", f"`{where}` and `{name}` are the same setting", "remove the first")])
        result[name] = _walked(value, (*table, name), names, values)
    return result


def _move(tree: dict[str, Any], old: list[str], new: list[str]) -> None:
    holder: Any = tree
    for part in old[:-1]:
        holder = holder.get(part) if isinstance(holder, dict) else None
    if not isinstance(holder, dict) or old[-1] not in holder:
        return
    target: Any = tree
    for part in new[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            return  # refused when it is read
    if new[-1] in target:
        raise ConfigError([Problem("", f"`{dotted(old)}` and `{dotted(new)}` are the same table", "remove the first")])
    target[new[-1]] = holder.pop(old[-1])


def dotted(key: Iterable[str | int]) -> str:
    """A key without the numbers of items."""
    return ".".join(part for part in key if isinstance(part, str))
