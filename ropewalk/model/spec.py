"""Shapes, parameters and FLOPs of a model before it is built. No torch.

`Spec` is the resolved form of the settings, with nothing left to derive. Its shapes are those that the modules build; a
test compares them by name.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Annotated, Any, Literal

from ropewalk.base.errors import UserError
from ropewalk.config.registry import Registry
from ropewalk.config.schema import SettingsOf

from .component import Component, GradientFlow, ParameterSpec
from .components import ACTIVATIONS, MODELS, NORMS, POSITIONS
from .config import Documents, LoraTargets, Model, NormPlace, RopeScaling
from .init_laws import INITS

StateBytes = Callable[[str, tuple[int, ...]], int]
"""Name and shape of a parameter -> bytes of its optimizer state, without step counters."""


def two_moments(name: str, shape: tuple[int, ...]) -> int:
    """State of AdamW and LAMB: two float32 values per weight."""
    return 8 * prod(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFlops:
    """FLOPs per token, by kind."""

    blocks: int
    """Linear layers of all blocks."""
    head: int
    attention: float
    """q k^T and p v of all blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A decoder-only transformer with all sizes resolved."""

    vocabulary: int
    sequence_length: int
    """Maximum sequence length; size of the rotation table, and of learned positions unless `positions` is set."""
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    norm: Annotated[str, NORMS]
    mlp: Annotated[str, ACTIVATIONS]
    position: Annotated[str, POSITIONS]
    rope_theta: float
    tie_embeddings: bool
    # Later additions, with defaults for older checkpoints and plans that lack them.
    bias: bool = False
    norm_position: NormPlace = "pre"
    qk_norm: bool = False
    rope_scaling: RopeScaling = "none"
    rope_factor: float = 1.0
    window: int | None = None
    documents: Documents = "ignore"
    dropout: float = 0.0
    init: Annotated[str, INITS] = "depth-scaled"
    lora_rank: int = 0
    """Rank of the adapters; 0: none."""
    lora_alpha: float = 16.0
    lora_targets: LoraTargets = "all"
    positions: int | None = None
    """Learned positions; None: `sequence_length`."""
    # Checkpoints and plans omit these for models without custom components (`spec_tree`).
    kind: Annotated[str, MODELS] = "decoder"
    kind_settings: Annotated[object, SettingsOf("kind")] = None
    norm_settings: Annotated[object, SettingsOf("norm")] = None
    mlp_settings: Annotated[object, SettingsOf("mlp")] = None
    position_settings: Annotated[object, SettingsOf("position")] = None
    init_settings: Annotated[object, SettingsOf("init")] = None

    @property
    def learned_positions(self) -> int:
        """Rows of the table of learned positions; 0 without one."""
        return (self.positions or self.sequence_length) if POSITIONS[self.position].how == "table" else 0

    @property
    def adapted(self) -> tuple[str, ...]:
        """Linear layers of a block that have an adapter, in the order of the forward pass."""
        attention, feed_forward = ("attention.qkv", "attention.out"), ("mlp.up", "mlp.down")
        if not self.lora_rank:
            return ()
        return attention if self.lora_targets == "attention" else attention + feed_forward

    @property
    def gated(self) -> bool:
        """Whether the feed-forward part is gated, f(gate) x up."""
        return ACTIVATIONS[self.mlp].gated

    @property
    def group_heads(self) -> int:
        """Heads in one group of the fused projection: its queries, one key, one value."""
        return self.heads // self.kv_heads + 2

    @property
    def mlp_chunk(self) -> int:
        """Chunk size of the fused gate and up matrix: this many rows of gate alternate with as many of up.

        Chunks are as long as possible with a number of chunks divisible by 8, so that tensor degrees 2, 4 and 8 work
        wherever 8 divides `mlp_width`.
        """
        return next((size for size in (128, 64, 32, 16, 8, 4, 2) if self.mlp_width % (8 * size) == 0), 1)

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are rotated by position (RoPE)."""
        return POSITIONS[self.position].how == "rotate"

    def parameter_specs(self) -> Mapping[str, ParameterSpec]:
        """Declarations of all parameters by name, in the order of the modules."""
        return _declared(self).parameters

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters by name, in the order of the modules."""
        return {name: parameter.shape for name, parameter in self.parameter_specs().items()}

    def parameters(self, *, trained: Collection[str] | None = None) -> int:
        """Number of weights, shared ones counted once; of all parameters or those named by `trained`."""
        return sum(prod(shape) for shape in self._trained_shapes(trained).values())

    def matmul_parameters(self) -> int:
        """Number of weights that multiply every token: all matrices except embedding and positions, plus the head."""
        matrices = (p for name, p in self.parameter_specs().items() if name != "head.weight" and p.is_matmul)
        return sum(prod(matrix.shape) for matrix in matrices) + self.vocabulary * self.width

    def layer_sizes(self, layer: int) -> tuple[int, int]:
        """Number of weights in one layer's matrices, and features over which its attention scores are computed."""
        declared, names = _declared(self), (f"blocks.{layer}", f"blocks.{layer}.")
        flow, matrices, features = declared.flow(()), 0, 0
        for name, component in declared.components.items():
            if name == names[0] or name.startswith(names[1]):
                matrices += sum(prod(p.shape) for p in component.parameters().values() if p.is_matmul)
                features += component.flops(name, flow).score_features
        return matrices, features

    def attended_pairs(self) -> int:
        """Query-key pairs that attend, in a full sequence of one document."""
        length, window = self.sequence_length, min(self.window or self.sequence_length, self.sequence_length)
        return window * (window + 1) // 2 + (length - window) * window

    def flops_per_token(
        self, attention: Literal["full", "causal"] = "full", *, trained: Collection[str] | None = None
    ) -> int:
        """Forward and backward FLOPs per token of a full sequence, without recompute.

        `full` is the convention of PaLM (Chowdhery et al. 2022, appendix B): 6 N + 12 L H D T, where a window replaces
        a longer T. `causal` counts only attended pairs: without a window the mean query attends to (T + 1) / 2 keys.

        With `trained`, excludes work that only other parameters' gradients need: the matmul for a frozen matrix's
        gradient, and the backward pass below the lowest trained parameter.
        """
        flops = self.token_flops(attention, trained=trained)
        return round(flops.blocks + flops.head + flops.attention)

    def token_flops(
        self, attention: Literal["full", "causal"] = "full", *, trained: Collection[str] | None = None
    ) -> TokenFlops:
        """The terms of `flops_per_token`."""
        length = self.sequence_length
        keys = min(self.window or length, length) if attention == "full" else self.attended_pairs() / length
        flow = _declared(self).flow(self.shapes() if trained is None else trained)
        blocks, scores = 0, Counter[int]()
        for name, component in _declared(self).components.items():
            if name.startswith("blocks."):
                flops = component.flops(name, flow)
                blocks += flops.linear
                scores[flops.score_features] += flops.score_matmuls
        return TokenFlops(
            blocks=blocks,
            head=2 * self.vocabulary * self.width * flow.matmuls("head.weight"),
            attention=sum(2 * features * keys * matmuls for features, matmuls in scores.items()),
        )

    def weight_bytes(self, number_bytes: int = 4) -> int:
        """Bytes of the weights at `number_bytes` per weight."""
        return number_bytes * self.parameters()

    def gradient_bytes(self, number_bytes: int = 4, *, trained: Collection[str] | None = None) -> int:
        """Bytes of the gradients, of all parameters or those named by `trained`."""
        return number_bytes * self.parameters(trained=trained)

    def optimizer_bytes(self, state_bytes: StateBytes = two_moments, *, trained: Collection[str] | None = None) -> int:
        """Bytes of the optimizer state, AdamW's by default."""
        return sum(state_bytes(name, shape) for name, shape in self._trained_shapes(trained).items())

    def _trained_shapes(self, trained: Collection[str] | None) -> dict[str, tuple[int, ...]]:
        shapes = self.shapes()
        if trained is None:
            return shapes
        assert shapes.keys() >= set(trained), "parameters of another model"
        return {name: shapes[name] for name in trained}


TABLES: dict[str, Registry[Any]] = {
    "kind": MODELS,
    "norm": NORMS,
    "mlp": ACTIVATIONS,
    "position": POSITIONS,
    "init": INITS,
}
"""Model settings that name a component, possibly a custom one."""


def spec_tree(spec: Spec) -> dict[str, Any]:
    """Plain values for JSON; unchanged from older versions for models with only built-in components."""
    tree = {name: value for name, value in asdict(spec).items() if value is not None or not name.endswith("_settings")}
    return tree if spec.kind != "decoder" else {name: value for name, value in tree.items() if name != "kind"}


def spec_of_tree(tree: Mapping[str, Any]) -> Spec:
    """The inverse of `spec_tree`, for a trusted tree."""
    own = {
        key: TABLES[key.removesuffix("_settings")][tree[key.removesuffix("_settings")]].settings(**value)
        for key, value in tree.items()
        if key.endswith("_settings")
    }
    return Spec(**{**tree, **own})


CHANGEABLE = ("dropout", "documents", "window", "rope_theta", "rope_scaling", "rope_factor", "init")
"""Model settings that may change while weights stay the same: none has weights or changes the meaning of others."""


def resolve(model: Model, *, vocabulary: int, sequence_length: int) -> Spec:
    """Resolves `model` for a tokenizer of `vocabulary` tokens and a sequence length."""
    if model.vocabulary and model.vocabulary < vocabulary:
        raise UserError(
            f"`model.vocabulary` is {model.vocabulary}, the tokenizer has {vocabulary} tokens; raise it or leave it out"
        )
    mlp_width = model.mlp_width
    if mlp_width is None:
        gated = ACTIVATIONS[model.mlp].gated
        mlp_width = -(-8 * model.width // 3 // 64) * 64 if gated else 4 * model.width
    return Spec(
        vocabulary=model.vocabulary or vocabulary,
        sequence_length=sequence_length,
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        head_size=model.head_size or model.width // model.heads,
        mlp_width=mlp_width,
        norm=model.norm,
        mlp=model.mlp,
        position=model.position,
        rope_theta=model.rope_theta,
        tie_embeddings=model.tie_embeddings,
        bias=model.bias,
        norm_position=model.norm_position,
        qk_norm=model.qk_norm,
        rope_scaling=model.rope_scaling,
        rope_factor=model.rope_factor,
        window=model.window,
        documents=model.documents,
        dropout=model.dropout,
        init=model.init,
        positions=model.positions,
        kind=model.kind,
        kind_settings=model.kind_settings,
        norm_settings=model.norm_settings,
        mlp_settings=model.mlp_settings,
        position_settings=model.position_settings,
        init_settings=model.init_settings,
    )


def model_values(spec: Spec) -> dict[str, Any]:
    """The `[model]` values that `resolve` turns into `spec`, without adapters and unset values."""
    values = {**spec_tree(spec), "positions": spec.learned_positions or None}
    return {name: values[name] for name in Model.__dataclass_fields__ if values.get(name) is not None}


@dataclass(frozen=True, slots=True)
class _Declared:
    """Declarations of a spec's components."""

    components: Mapping[str, Component]
    parameters: Mapping[str, ParameterSpec]
    order: tuple[str, ...]
    """Parameters in the order of the forward pass; a tied matrix occurs twice, the second time as `head.weight`."""

    def flow(self, trained: Collection[str]) -> GradientFlow:
        """Gradient flow with these parameters trained."""
        assert self.parameters.keys() >= set(trained), "parameters of another model"
        tied = {"head.weight"} if "embedding.weight" in trained and "head.weight" not in self.parameters else set()
        return GradientFlow(self.order, {*trained, *tied})


@functools.lru_cache(maxsize=64)
def _declared(spec: Spec) -> _Declared:
    kind = MODELS[spec.kind]
    components = kind.components(spec)
    names = kind.order(spec) if kind.order else list(components)
    order = [f"{name}.{inner}" for name in names for inner in components[name].parameters()]
    return _Declared(
        components=components,
        parameters={f"{n}.{inner}": p for n, each in components.items() for inner, p in each.parameters().items()},
        order=tuple(dict.fromkeys([*order, "head.weight"])),
    )
