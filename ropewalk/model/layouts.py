"""Hugging Face's `config.json` <-> our spec, for the two layouts that most tools read. No torch.

`llama`: RMS norm, gated feed-forward, rotation, grouped queries. `gpt2`: layer norm, plain feed-forward, learned
positions, biases. A model fits a layout when the same weights give the same logits there; every option that does not
is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ropewalk.base.errors import DataError, UserError

from .config import Mlp, RopeScaling
from .spec import Spec

Layout = Literal["llama", "gpt2"]
LAYOUTS: tuple[Layout, ...] = ("llama", "gpt2")

LLAMA_ACTIVATIONS: dict[Mlp, str] = {"swiglu": "silu", "geglu": "gelu"}
GPT2_ACTIVATIONS: dict[Mlp, str] = {"gelu": "gelu", "gelu-tanh": "gelu_new", "relu2": "relu2"}
# Other names in use for the same functions.
SYNONYMS = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}

CONFIG = "config.json"
"""The file that makes a folder a Hugging Face directory."""

NORM_EPSILON = {"rms": 1e-6, "layer": 1e-5}
"""What our norms add under the root (model/modules.py); a test compares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """What a `config.json` says."""

    layout: Layout
    spec: Spec
    norm_epsilon: float
    """What the norms of these weights add under the root."""


def choose_layout(spec: Spec, asked: Layout | Literal["auto"] = "auto") -> Layout:
    """The layout that holds the model, the asked one if it does; a UserError names the options that stand against."""
    wrong = {layout: list(misfits(spec, layout)) for layout in LAYOUTS if asked in ("auto", layout)}
    for layout, reasons in wrong.items():
        if not reasons:
            return layout
    lines = [f"  {layout} needs {'; '.join(reasons)}" for layout, reasons in wrong.items()]
    what = "no Hugging Face layout holds" if asked == "auto" else f"the layout `{asked}` does not hold"
    raise UserError("\n".join([f"{what} this model:", *lines, "train a model with other options to export it"]))


def misfits(spec: Spec, layout: Layout) -> Iterator[str]:
    """What `layout` needs and the spec has not, option by option."""
    activations = LLAMA_ACTIVATIONS if layout == "llama" else GPT2_ACTIVATIONS
    wanted: dict[str, tuple[object, ...]] = {
        "norm": ("rms",) if layout == "llama" else ("layer",),
        "norm_place": ("pre",),
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
    """The `config.json` of the model in a layout that holds it."""
    shared = {
        "vocab_size": spec.vocabulary,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": dtype,
    }
    return {**(_llama_config(spec) if layout == "llama" else _gpt2_config(spec)), **shared}


def describe_config(config: Mapping[str, Any], *, path: Path) -> Described:
    """The model that a `config.json` means; `path` stands for it in a DataError about what we cannot build."""
    kind = config.get("model_type")
    if kind not in LAYOUTS:
        raise DataError(f'{path}: `model_type` is "{kind}"; only {" and ".join(LAYOUTS)} can be imported')
    reader = _Reader(config, path)
    reader.only("quantization_config", None)
    reader.only("add_cross_attention", False)
    return _llama_described(reader) if kind == "llama" else _gpt2_described(reader)


def _llama_config(spec: Spec) -> dict[str, Any]:
    base, scaling = spec.rope_base, None
    if spec.rope_scaling == "linear":
        scaling = {"rope_type": "linear", "type": "linear", "factor": spec.rope_factor}
    elif spec.rope_scaling == "ntk":
        # A fixed factor is the same as another base (model/positions.py), which every reader knows.
        base *= spec.rope_factor ** (spec.head_size / (spec.head_size - 2))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.width,
        "intermediate_size": spec.hidden,
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
        "n_inner": spec.hidden,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_positions": spec.sequence_length,
        "activation_function": GPT2_ACTIVATIONS[spec.mlp],
        "layer_norm_epsilon": NORM_EPSILON["layer"],
        # Left out, each would be 0.1. We drop nothing inside attention.
        "embd_pdrop": spec.dropout,
        "resid_pdrop": spec.dropout,
        "attn_pdrop": 0.0,
    }


class _Reader:
    """Values of a `config.json`, with Hugging Face's defaults for what it leaves out."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._config, self._path = config, path

    def number(self, key: str, default: Any = None) -> Any:
        """The number under `key`."""
        value = self._config.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or value <= 0:
            raise DataError(f"{self._path}: `{key}` is {value!r}; it must be a number above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._config.get(key, default))

    def only(self, key: str, wanted: object) -> None:
        """Refuses any value of `key` but the wanted one."""
        value = self._config.get(key, wanted)
        if value != wanted:
            raise DataError(f"{self._path}: `{key}` is {value!r}; models with it cannot be imported")

    def activation(self, key: str, default: str, known: Mapping[Mlp, str]) -> Mlp:
        name = self._config.get(key, default)
        for mlp, theirs in known.items():
            if SYNONYMS.get(name, name) == theirs:
                return mlp
        raise DataError(f'{self._path}: `{key}` is "{name}"; known are {", ".join(known.values())}')

    def rope(self) -> tuple[float, RopeScaling, float]:
        """Base, scaling and factor, under the names of any version of transformers."""
        nested = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        base = float(nested.get("rope_theta") or self.number("rope_theta", 10_000.0))
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind == "default" and nested.get("partial_rotary_factor", 1.0) == 1.0:
            return base, "none", 1.0
        if kind == "linear":
            return base, "linear", float(nested["factor"])
        raise DataError(f"{self._path}: rotation is scaled by {nested}; only the linear kind can be imported")

    def refuse(self, what: str) -> DataError:
        return DataError(f"{self._path}: {what}")


def _llama_described(reader: _Reader) -> Described:
    width, heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    bias = reader.flag("attention_bias", False)
    if bias != reader.flag("mlp_bias", False):
        raise reader.refuse("`attention_bias` and `mlp_bias` differ; ours are in all linear layers or in none")
    base, scaling, factor = reader.rope()
    spec = Spec(
        vocabulary=reader.number("vocab_size"),
        sequence_length=reader.number("max_position_embeddings", 2048),
        layers=reader.number("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=reader.number("num_key_value_heads", heads),
        head_size=reader.number("head_dim", width // heads),
        hidden=reader.number("intermediate_size"),
        norm="rms",
        mlp=reader.activation("hidden_act", "silu", LLAMA_ACTIVATIONS),
        position="rope",
        rope_base=base,
        rope_scaling=scaling,
        rope_factor=factor,
        tied=reader.flag("tie_word_embeddings", False),
        bias=bias,
    )
    return Described(layout="llama", spec=spec, norm_epsilon=reader.number("rms_norm_eps", 1e-6))


def _gpt2_described(reader: _Reader) -> Described:
    reader.only("scale_attn_weights", True)
    reader.only("scale_attn_by_inverse_layer_idx", False)
    width, heads = reader.number("n_embd", 768), reader.number("n_head", 12)
    spec = Spec(
        vocabulary=reader.number("vocab_size", 50_257),
        sequence_length=reader.number("n_positions", 1024),
        layers=reader.number("n_layer", 12),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=width // heads,
        hidden=reader.number("n_inner", 4 * width),
        norm="layer",
        mlp=reader.activation("activation_function", "gelu_new", GPT2_ACTIVATIONS),
        position="learned",
        rope_base=10_000.0,
        tied=reader.flag("tie_word_embeddings", True),
        bias=True,
    )
    return Described(layout="gpt2", spec=spec, norm_epsilon=reader.number("layer_norm_epsilon", 1e-5))
