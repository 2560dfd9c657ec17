"""What a model is before it exists: shapes, parameters, FLOPs. No torch.

`Spec` is the resolved form of the settings: nothing left to derive. The shapes here are the ones the modules build; a
test compares them name by name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from ropewalk.base.errors import UserError

from .config import Documents, Init, LoraTargets, Mlp, Model, Norm, NormPlace, Position, RopeScaling

Optimizer = Literal["adamw", "adamw-8bit", "lamb", "adafactor", "muon"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFlops:
    """Where the FLOPs of a token go."""

    blocks: int
    """The linear maps of all blocks."""
    head: int
    attention: float
    """Queries with keys, and their scores with values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A decoder-only transformer with every size decided."""

    vocabulary: int
    sequence_length: int
    """Longest row; the rotation table ends here, and learned positions unless `positions` says otherwise."""
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    norm: Norm
    mlp: Mlp
    position: Position
    rope_theta: float
    tie_embeddings: bool
    # Below: what came later, with the value that older checkpoints and plans mean by leaving it out.
    bias: bool = False
    norm_position: NormPlace = "pre"
    qk_norm: bool = False
    rope_scaling: RopeScaling = "none"
    rope_factor: float = 1.0
    window: int | None = None
    documents: Documents = "ignore"
    dropout: float = 0.0
    init: Init = "depth-scaled"
    lora_rank: int = 0
    """Rank of the adapters; 0: there are none."""
    lora_alpha: float = 16.0
    lora_targets: LoraTargets = "all"
    positions: int | None = None
    """Learned positions; None: `sequence_length`."""

    @property
    def learned_positions(self) -> int:
        """Rows of the table of learned positions; 0: the model has none."""
        return (self.positions or self.sequence_length) if self.position == "learned" else 0

    @property
    def adapted(self) -> tuple[str, ...]:
        """The linear maps of a block that have an adapter, in the order of the forward pass."""
        attention, feed_forward = ("attention.qkv", "attention.out"), ("mlp.up", "mlp.down")
        if not self.lora_rank:
            return ()
        return attention if self.lora_targets == "attention" else attention + feed_forward

    @property
    def gated(self) -> bool:
        """Whether the feed-forward part multiplies two projections."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def group_heads(self) -> int:
        """Heads in one group of the fused projection: its queries, one key, one value."""
        return self.heads // self.kv_heads + 2

    @property
    def mlp_chunk(self) -> int:
        """Rows of gate, then as many rows of up, alternate in the fused projection of a gated part.

        Chunks are as long as leaves a number of them that 8 divides, so that tensor degrees 2, 4 and 8 are
        possible wherever 8 divides `mlp_width`.
        """
        return next((size for size in (128, 64, 32, 16, 8, 4, 2) if self.mlp_width % (8 * size) == 0), 1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by name, in the order of the modules."""
        width = self.width
        vectors = {"rms": ("weight",), "layer": ("weight", "bias"), "none": ()}[self.norm]
        norm: dict[str, tuple[int, ...]] = {vector: (width,) for vector in vectors}
        block: dict[str, tuple[int, ...]] = {}
        block |= _inside("attention_norm", norm)
        block |= self._linear("attention.qkv", self.kv_heads * self.group_heads * self.head_size, width)
        if self.qk_norm:
            block |= {f"attention.{part}_norm.weight": (self.head_size,) for part in ("query", "key")}
        block |= self._linear("attention.out", width, self.heads * self.head_size)
        block |= _inside("attention_post_norm", norm) if self.norm_position == "both" else {}
        block |= _inside("mlp_norm", norm)
        block |= self._linear("mlp.up", self.mlp_width * (2 if self.gated else 1), width)
        block |= self._linear("mlp.down", width, self.mlp_width)
        block |= _inside("mlp_post_norm", norm) if self.norm_position == "both" else {}
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (self.vocabulary, width)}
        if self.learned_positions:
            shapes["positions.weight"] = (self.learned_positions, width)
        for layer in range(self.layers):
            shapes |= _inside(f"blocks.{layer}", block)
        # `post` ends each block with a norm: the last of them is the final one.
        shapes |= _inside("norm", norm) if self.norm_position != "post" else {}
        if not self.tie_embeddings:
            shapes["head.weight"] = (self.vocabulary, width)
        return shapes

    def parameters(self, *, trained: Collection[str] | None = None) -> int:
        """Numbers of all parameters, shared ones counted once; or of those named by `trained`."""
        return sum(prod(shape) for shape in self._trained_shapes(trained).values())

    def matmul_parameters(self) -> int:
        """Numbers that multiply every token: all matrices but the embedding and positions, with the head."""
        blocks = sum(
            prod(shape) for name, shape in self.shapes().items() if name.startswith("blocks.") and len(shape) == 2
        )
        return blocks + self.vocabulary * self.width

    def attended_pairs(self) -> int:
        """Pairs of a query and a key that it sees, in a full row of one document."""
        length, window = self.sequence_length, min(self.window or self.sequence_length, self.sequence_length)
        return window * (window + 1) // 2 + (length - window) * window

    def flops_per_token(
        self, attention: Literal["full", "causal"] = "full", *, trained: Collection[str] | None = None
    ) -> int:
        """Forward and backward FLOPs for a token of a full row, recomputation not counted.

        `full` is the convention of PaLM (Chowdhery et al. 2022, appendix B): 6 N + 12 L H D T, where a window takes the
        place of a longer T. `causal` counts only the pairs that are attended: without a window the mean query sees
        (T + 1) / 2 keys.

        When only the parameters named by `trained` are, what their gradients do not need is left out: the product that
        gives a frozen matrix its gradient, and everything below the lowest trained parameter.
        """
        flops = self.token_flops(attention, trained=trained)
        return round(flops.blocks + flops.head + flops.attention)

    def token_flops(
        self, attention: Literal["full", "causal"] = "full", *, trained: Collection[str] | None = None
    ) -> TokenFlops:
        """The terms of `flops_per_token`."""
        length = self.sequence_length
        keys = min(self.window or length, length) if attention == "full" else self.attended_pairs() / length
        gradients = _Gradients(self, trained)
        matrices = {n: s for n, s in self.shapes().items() if n.startswith("blocks.") and len(s) == 2}
        scores = sum(gradients.score_products(layer) for layer in range(self.layers))
        return TokenFlops(
            blocks=2 * sum(prod(shape) * gradients.products(name) for name, shape in matrices.items()),
            head=2 * self.vocabulary * self.width * gradients.products("head.weight"),
            attention=2 * self.heads * self.head_size * keys * scores,
        )

    def weight_bytes(self, number_bytes: int = 4) -> int:
        """Bytes of the weights at `number_bytes` a number."""
        return number_bytes * self.parameters()

    def gradient_bytes(self, number_bytes: int = 4, *, trained: Collection[str] | None = None) -> int:
        """Bytes of the gradients, of all weights or of those named by `trained`."""
        return number_bytes * self.parameters(trained=trained)

    def optimizer_bytes(self, optimizer: Optimizer = "adamw", *, trained: Collection[str] | None = None) -> int:
        """Bytes of the optimizer's moments, in float32 but for `adamw-8bit`; its step counters (a few bytes a parameter
        tensor) left out.

        AdamW and LAMB keep two numbers a weight. Adafactor (Shazeer and Stern 2018) keeps the row and column sums of a
        matrix, one number a weight for the rest. Muon keeps one number for each weight of the blocks' matrices and
        leaves the rest to AdamW. For these matrices `adamw-8bit` keeps two bytes a weight and two numbers a row.
        """
        total = narrow = 0
        for name, shape in self._trained_shapes(trained).items():
            if optimizer == "adafactor":
                total += sum(shape)
            elif optimizer == "muon" and len(shape) == 2 and name.startswith("blocks."):
                total += prod(shape)
            elif optimizer == "adamw-8bit" and len(shape) == 2 and name.startswith("blocks."):
                narrow += 2 * prod(shape)
                total += 2 * shape[0]
            else:
                total += 2 * prod(shape)
        return 4 * total + narrow

    def _linear(self, name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
        if self.bias:
            shapes[f"{name}.bias"] = (outputs,)
        if name in self.adapted:
            shapes |= {f"{name}.lora_a": (self.lora_rank, inputs), f"{name}.lora_b": (outputs, self.lora_rank)}
        return shapes

    def _trained_shapes(self, trained: Collection[str] | None) -> dict[str, tuple[int, ...]]:
        shapes = self.shapes()
        if trained is None:
            return shapes
        assert shapes.keys() >= set(trained), "parameters of another model"
        return {name: shapes[name] for name in trained}


CHANGEABLE = ("dropout", "documents", "window", "rope_theta", "rope_scaling", "rope_factor", "init")
"""Settings of a model that may change while its weights stay what they are: none of them has a weight, and the rest of
the model goes on meaning the same."""


def resolve(model: Model, *, vocabulary: int, sequence_length: int) -> Spec:
    """The spec of `model` for a tokenizer of `vocabulary` tokens and a row length."""
    if model.vocabulary and model.vocabulary < vocabulary:
        raise UserError(
            f"`model.vocabulary` is {model.vocabulary}, the tokenizer has {vocabulary} tokens; raise it or leave it out"
        )
    mlp_width = model.mlp_width
    if mlp_width is None:
        gated = model.mlp in ("swiglu", "geglu")
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
    )


def model_values(spec: Spec) -> dict[str, Any]:
    """The values of `[model]` that `resolve` makes `spec` of, adapters apart; those that are not set are left out."""
    values = {name: getattr(spec, name) for name in Model.__dataclass_fields__}
    values["positions"] = spec.learned_positions or None
    return {name: value for name, value in values.items() if value is not None}


class _Gradients:
    """Where gradients flow when only some parameters are trained.

    Whatever a parameter does reaches all that comes after it, through the residual stream: a gradient flows through
    everything above the lowest trained parameter and through nothing below.
    """

    def __init__(self, spec: Spec, trained: Collection[str] | None) -> None:
        names = list(spec.shapes())
        self._trained = set(names if trained is None else trained)
        if spec.tie_embeddings:
            # The same matrix twice: first as the embedding, last as the head.
            names.append("head.weight")
            if "embedding.weight" in self._trained:
                self._trained.add("head.weight")
        order = sorted(names, key=lambda name: _place(name, spec))
        self._places = {name: place for place, name in enumerate(order)}
        self._lowest = min((self._places[name] for name in self._trained), default=len(order))

    def products(self, name: str) -> int:
        """Matrix products of one linear map: for its output, for the gradient of its input where one flows there, and
        for its own where it is trained."""
        part, _, kind = name.rpartition(".")
        input_flows = self._flows_below(part) or (kind == "lora_b" and f"{part}.lora_a" in self._trained)
        return 1 + input_flows + (name in self._trained)

    def score_products(self, layer: int) -> int:
        """Products of one layer's queries with keys and of their scores with values: for the outputs, and for each
        factor where a gradient flows."""
        part = f"blocks.{layer}.attention"
        inside = {f"{part}.qkv.{kind}" for kind in ("weight", "bias", "lora_a", "lora_b")}
        values = self._flows_below(f"{part}.qkv") or not inside.isdisjoint(self._trained)
        queries, keys = (values or f"{part}.{of}_norm.weight" in self._trained for of in ("query", "key"))
        return 2 + queries + keys + (queries or keys) + values

    def _flows_below(self, part: str) -> bool:
        """Whether a gradient flows through the input of a linear map."""
        return self._lowest < self._places[f"{part}.weight"]


def _place(name: str, spec: Spec) -> tuple[int, ...]:
    """Sorts parameters into the order of the forward pass; those of one place keep theirs."""
    words = name.split(".")
    if words[0] != "blocks":
        return (0,) if words[0] in ("embedding", "positions") else (2,)
    last = spec.norm_position == "post" and words[2].endswith("_norm")
    return (1, int(words[1]), words[2].startswith("mlp"), last)


def _inside(name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{inner}": shape for inner, shape in shapes.items()}
