"""Converts between Hugging Face's `config.json` and our spec, for the two most common layouts. No torch.

`llama`: RMS norm, gated feed-forward, rotation, grouped queries. `gpt2`: layer norm, plain feed-forward, learned
positions, biases. A model fits a layout if the same weights give the same logits there; errors name every option that
does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ropewalk.base.errors import DamagedModel, UserError
from ropewalk.base.untrusted import plain_tree

from ..config import RopeScaling
from ..spec import Spec
from .strict import MOST_SIDE, spec_problems

Layout = Literal["llama", "gpt2"]
LAYOUTS: tuple[Layout, ...] = ("llama", "gpt2")

LLAMA_ACTIVATIONS: dict[str, str] = {"swiglu": "silu", "geglu": "gelu"}
GPT2_ACTIVATIONS: dict[str, str] = {"gelu": "gelu", "gelu-tanh": "gelu_new", "relu2": "relu2"}
# Aliases in use for the same functions.
SYNONYMS = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}

CONFIG = "config.json"
"""The file that identifies a Hugging Face directory."""

NORM_EPSILON = {"rms": 1e-6, "layer": 1e-5}
"""Epsilon of our norms (model/modules.py); a test compares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """The model described by a `config.json`."""

    layout: Layout
    spec: Spec
    norm_epsilon: float
    """Epsilon of the norms these weights were trained with."""


def choose_layout(spec: Spec, asked: Layout | Literal["auto"] = "auto") -> Layout:
    """The layout that can represent the model, preferably `asked`; a UserError names the options that prevent it."""
    wrong = {layout: list(misfits(spec, layout)) for layout in LAYOUTS if asked in ("auto", layout)}
    for layout, reasons in wrong.items():
        if not reasons:
            return layout
    lines = [f"  {layout} needs {'; '.join(reasons)}" for layout, reasons in wrong.items()]
    what = "no Hugging Face layout holds" if asked == "auto" else f"the layout `{asked}` does not hold"
    raise UserError("\n".join([f"{what} this model:", *lines, "train a model with other options to export it"]))


def misfits(spec: Spec, layout: Layout) -> Iterator[str]:
    """Options of the spec that `layout` does not support."""
    activations = LLAMA_ACTIVATIONS if layout == "llama" else GPT2_ACTIVATIONS
    wanted: dict[str, tuple[object, ...]] = {
        "kind": ("decoder",),
        "norm": ("rms",) if layout == "llama" else ("layer",),
        "norm_position": ("pre",),
        "position": ("rope",) if layout == "llama" else ("learned",),
        "mlp": tuple(activations),
        "qk_norm": (False,),
    }
    if layout == "gpt2":
        wanted["kv_heads"] = (spec.heads,)
        wanted["head_size"] = (spec.width // spec.heads,)
    for option, values in wanted.items():
        value = getattr(spec, option)
        if value not in values:
            yield f"`model.{option}` {' or '.join(map(str, values))}, not {value}"
    if spec.window is not None and spec.window < spec.sequence_length:
        yield f"`model.window` not set, not {spec.window}"


def config_of(spec: Spec, layout: Layout, *, end_of_text: int, dtype: str) -> dict[str, Any]:
    """The `config.json` of the model in a layout that supports it."""
    shared = {
        "vocab_size": spec.vocabulary,
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": dtype,
    }
    return {**(_llama_config(spec) if layout == "llama" else _gpt2_config(spec)), **shared}


def describe_config(config: Mapping[str, Any], *, path: Path) -> Described:
    """The model that a `config.json` describes; a DataError names `path` and the unsupported setting."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in LAYOUTS:
        raise DamagedModel(f"{path}: `model_type` is {_shown(kind)}; only {' and '.join(LAYOUTS)} can be imported")
    reader = _Reader(config, path)
    reader.only("quantization_config", None)
    reader.only("add_cross_attention", False)
    described = _llama_described(reader) if kind == "llama" else _gpt2_described(reader)
    for key, what in spec_problems(described.spec):
        raise reader.refuse(f"no model: its {key}: {what}")
    return described


def _llama_config(spec: Spec) -> dict[str, Any]:
    base, scaling = spec.rope_theta, None
    if spec.rope_scaling == "linear":
        scaling = {"rope_type": "linear", "type": "linear", "factor": spec.rope_factor}
    elif spec.rope_scaling == "ntk":
        # A fixed factor equals another base (model/positions.py), which every reader supports.
        base *= spec.rope_factor ** (spec.head_size / (spec.head_size - 2))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.width,
        "intermediate_size": spec.mlp_width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "hidden_act": LLAMA_ACTIVATIONS[spec.mlp],
        "max_position_embeddings": spec.sequence_length,
        "rms_norm_eps": NORM_EPSILON["rms"],
        "rope_theta": base,
        "rope_scaling": scaling,
        "attention_bias": spec.bias,
        "mlp_bias": spec.bias,
    }


def _gpt2_config(spec: Spec) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": spec.width,
        "n_inner": spec.mlp_width,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_positions": spec.learned_positions,
        "activation_function": GPT2_ACTIVATIONS[spec.mlp],
        "layer_norm_epsilon": NORM_EPSILON["layer"],
        # The defaults are 0.1. We have no dropout inside attention.
        "embd_pdrop": spec.dropout,
        "resid_pdrop": spec.dropout,
        "attn_pdrop": 0.0,
    }


class _Reader:
    """Reads values of a `config.json`, with Hugging Face's defaults for missing keys."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._config, self._path = config, path

    def count(self, key: str, default: int | None = None) -> int:
        """The integer under `key`."""
        value = self._config.get(key)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= MOST_SIDE:
            raise DamagedModel(f"{self._path}: `{key}` is {_shown(value)}; it must be a whole number above 0")
        return value

    def number(self, key: str, default: float) -> float:
        """The number under `key`."""
        value = self._config.get(key)
        return self._checked(key, default if value is None else value)

    def epsilon(self, key: str, default: float) -> float:
        """Epsilon of the norms. Extreme values would make weights infinite or zero."""
        value = self.number(key, default)
        if not 1e-12 <= value <= 1e-1:
            raise DamagedModel(f"{self._path}: `{key}` is {value:g}; it must be between 1e-12 and 0.1")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._config.get(key)
        if value is not None and type(value) is not bool:
            raise DamagedModel(f"{self._path}: `{key}` is {_shown(value)}; it must be true or false")
        return default if value is None else value

    def _checked(self, key: str, value: Any) -> float:
        # An integer may be too large for a float.
        sound = type(value) in (int, float) and 0 < value <= MOST_SIDE and math.isfinite(value)
        if not sound:
            raise DamagedModel(f"{self._path}: `{key}` is {_shown(value)}; it must be a number above 0")
        return float(value)

    def only(self, key: str, wanted: object) -> None:
        """Refuses any value of `key` but the wanted one."""
        value = self._config.get(key, wanted)
        if value != wanted:
            raise DamagedModel(f"{self._path}: `{key}` is {_shown(value)}; models with it cannot be imported")

    def activation(self, key: str, default: str, known: Mapping[str, str]) -> str:
        name = self._config.get(key, default)
        for mlp, theirs in known.items():
            if isinstance(name, str) and SYNONYMS.get(name, name) == theirs:
                return mlp
        raise DamagedModel(f"{self._path}: `{key}` is {_shown(name)}; known are {', '.join(known.values())}")

    def rope(self) -> tuple[float, RopeScaling, float]:
        """Base, scaling and factor, under the key names of any version of transformers."""
        nested = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        if not isinstance(nested, dict):
            raise DamagedModel(f"{self._path}: `rope_scaling` is {_shown(nested)}; it must be an object")
        inner = nested.get("rope_theta")
        base = self.number("rope_theta", 10_000.0) if inner is None else self._checked("rope_theta", inner)
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind == "default" and nested.get("partial_rotary_factor", 1.0) == 1.0:
            return base, "none", 1.0
        if kind == "linear":
            return base, "linear", self._checked("factor", nested.get("factor"))
        raise DamagedModel(
            f"{self._path}: rotation is scaled by {_shown(nested)}; only the linear kind can be imported"
        )

    def refuse(self, what: str) -> DamagedModel:
        return DamagedModel(f"{self._path}: {what}")


def _shown(value: object) -> str:
    """An untrusted value for a message: short, whatever its nesting."""
    if isinstance(value, str):
        return f'"{value[:60]}"'
    return repr(value)[:80] if not isinstance(value, (dict, list)) or plain_tree(value) else f"a {type(value).__name__}"


def _llama_described(reader: _Reader) -> Described:
    width, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    bias = reader.flag("attention_bias", False)
    if bias != reader.flag("mlp_bias", False):
        raise reader.refuse("`attention_bias` and `mlp_bias` differ; ours are in all linear layers or in none")
    base, scaling, factor = reader.rope()
    spec = Spec(
        vocabulary=reader.count("vocab_size"),
        sequence_length=reader.count("max_position_embeddings", 2048),
        layers=reader.count("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=reader.count("num_key_value_heads", heads),
        head_size=reader.count("head_dim", width // heads),
        mlp_width=reader.count("intermediate_size"),
        norm="rms",
        mlp=reader.activation("hidden_act", "silu", LLAMA_ACTIVATIONS),
        position="rope",
        rope_theta=base,
        rope_scaling=scaling,
        rope_factor=factor,
        tie_embeddings=reader.flag("tie_word_embeddings", False),
        bias=bias,
    )
    return Described(layout="llama", spec=spec, norm_epsilon=reader.epsilon("rms_norm_eps", 1e-6))


def _gpt2_described(reader: _Reader) -> Described:
    reader.only("scale_attn_weights", True)
    reader.only("scale_attn_by_inverse_layer_idx", False)
    width, heads = reader.count("n_embd", 768), reader.count("n_head", 12)
    spec = Spec(
        vocabulary=reader.count("vocab_size", 50_257),
        sequence_length=reader.count("n_positions", 1024),
        layers=reader.count("n_layer", 12),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=width // heads,
        mlp_width=reader.count("n_inner", 4 * width),
        norm="layer",
        mlp=reader.activation("activation_function", "gelu_new", GPT2_ACTIVATIONS),
        position="learned",
        rope_theta=10_000.0,
        tie_embeddings=reader.flag("tie_word_embeddings", True),
        bias=True,
    )
    return Described(layout="gpt2", spec=spec, norm_epsilon=reader.epsilon("layer_norm_epsilon", 1e-5))
