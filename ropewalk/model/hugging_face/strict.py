"""Reads a spec from untrusted plain values. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ropewalk.base.errors import ConfigError, Problem, UserError
from ropewalk.config.read import parse_tree
from ropewalk.config.renames import upgraded_model

from ..spec import TABLES, Spec

MOST_LAYERS = 1 << 16
MOST_SIDE = 1 << 31
"""Maximum of a vocabulary, width or sequence length: far beyond any model, and sums of products stay small integers."""
MOST_NUMBERS = 1 << 53
_MOST_TEXT = 64


class NotImportedError(UserError):
    """A model has a custom component that no recipe or run has imported."""


def read_spec(tree: Mapping[str, Any], *, name: str) -> Spec:
    """Reads the spec in `tree` as strictly as a recipe table: a ConfigError lists all unknown keys, wrong types and
    values out of range. `name` is the location in messages. Cheap for any values."""
    # The reader suggests corrections for unknown words, which is slow for long words.
    for key, value in tree.items():
        text, own = value if isinstance(value, str) else "", key.removesuffix("_settings") in TABLES
        if (
            (isinstance(value, (dict, list)) and not own)
            or max(len(key), len(text)) > _MOST_TEXT
            or len(tree) > _MOST_TEXT
        ):
            raise ConfigError([Problem(name, f"`{key[:_MOST_TEXT]}` is not a setting of a model")])
        if own and ":" in text and not _is_imported(text):
            remedy = "name the run's directory, whose config.toml says where that module lies"
            raise NotImportedError(f"{name}: its `{key}` is `{text}`, which nothing here has imported; {remedy}")
    given = {key: value for key, value in upgraded_model(tree).items() if value is not None}
    return parse_tree(_Checked, given, name).plain()


def _is_imported(name: str) -> bool:
    """Whether a recipe has imported the module of `module:attr`: an untrusted model must not choose imports, nor reach
    through a module to its own imports (`torch:os._exit`)."""
    module, _, attribute = name.partition(":")
    is_brought = module in sys.modules and module.split(".")[0] not in sys.stdlib_module_names
    return is_brought and "." not in attribute


def spec_problems(spec: Spec) -> Iterator[tuple[str, str]]:
    """(key, error) for sizes and combinations that no model can have."""
    for key in ("vocabulary", "sequence_length", "width", "heads", "kv_heads", "head_size", "mlp_width"):
        if not 1 <= getattr(spec, key) <= MOST_SIDE:
            yield key, f"{getattr(spec, key)} is not between 1 and {MOST_SIDE}"
            return
    if not 1 <= spec.layers <= MOST_LAYERS:
        yield "layers", f"{spec.layers} is not between 1 and {MOST_LAYERS}"
        return
    if spec.heads % spec.kv_heads:
        yield "kv_heads", f"{spec.kv_heads} does not divide the {spec.heads} query heads"
        return
    if spec.window is not None and spec.window < 1:
        yield "window", f"{spec.window} is less than 1"
    if spec.positions is not None and not spec.sequence_length <= spec.positions <= MOST_SIDE:
        yield "positions", f"{spec.positions} is not between the longest row, {spec.sequence_length}, and {MOST_SIDE}"
        return
    if not 0 <= spec.lora_rank <= MOST_SIDE:
        yield "lora_rank", f"{spec.lora_rank} is not between 0 and {MOST_SIDE}"
        return
    if spec.rotates and spec.head_size % 2:
        yield "head_size", f"{spec.position} needs an even head size, not {spec.head_size}"
    if spec.rope_scaling == "ntk" and spec.head_size <= 2:
        yield "rope_scaling", "ntk needs a head size above 2"
    for key, least, below in (("rope_theta", 1e-6, 1e30), ("rope_factor", 1e-6, 1e9), ("dropout", 0.0, 1.0)):
        if not least <= getattr(spec, key) < below:
            yield key, f"{getattr(spec, key)} is not between {least:g} and {below:g}"
    if not 0 < spec.lora_alpha < 1e9:
        yield "lora_alpha", f"{spec.lora_alpha} is not between 0 and 1e9"
    if any(prod(shape) > MOST_NUMBERS for shape in _one_layer(spec).values()):
        yield "width", f"one parameter would have more than {MOST_NUMBERS} numbers"


def _one_layer(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Parameter shapes of a one-layer model: all layers are alike."""
    values = {name: getattr(spec, name) for name in Spec.__dataclass_fields__}
    return Spec(**{**values, "layers": 1}).shapes()


class _Checked(Spec):
    """A spec whose contradictions the recipe reader reports."""

    __slots__ = ()

    def check(self) -> Iterator[tuple[str, str]]:
        yield from spec_problems(self)

    def plain(self) -> Spec:
        """The equivalent `Spec`."""
        return Spec(**{name: getattr(self, name) for name in Spec.__dataclass_fields__})
