"""Settings of the model: a decoder-only transformer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from ropewalk.config.schema import Range, SettingsOf

from .components import ACTIVATIONS, MODELS, NORMS, POSITIONS
from .init_laws import INITS

NormPlace = Literal["pre", "post", "both"]
RopeScaling = Literal["none", "linear", "ntk"]
Documents = Literal["ignore", "separate"]
LoraTargets = Literal["attention", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021): a linear layer becomes W + alpha / rank x B A. W is frozen, A and B are
    trained; B starts at 0, so that a new adapter changes nothing."""

    rank: Annotated[int, Range(least=1)] = 8
    """Rows of A and columns of B. An adapter of an O x I matrix has rank x (O + I) parameters."""
    alpha: Annotated[float, Range(above=0)] = 16.0
    """Scale of the adapters. It is divided by the rank, so that another rank needs no other learning rate."""
    targets: LoraTargets = "all"
    """Which linear layers of a block have adapters: the two of attention, or those of the feed-forward part too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A decoder-only transformer. With `train.start_from`, settings that are not set here are those of that model."""

    kind: Annotated[str, MODELS] = "decoder"
    """Kind of model: a decoder-only transformer, or your own (`"module:attr"`), which reads the sizes below."""
    kind_settings: Annotated[object, SettingsOf("kind")] = None
    """Settings of a kind of model of your own."""
    layers: Annotated[int, Range(least=1, most=1 << 16)] = 4
    """Blocks of attention and feed-forward."""
    width: Annotated[int, Range(least=8)] = 256
    """Features of hidden states (the model dimension)."""
    heads: Annotated[int, Range(least=1)] = 4
    """Query heads."""
    head_size: Annotated[int, Range(least=1)] | None = None
    """Features of a head. Not set: `width / heads`."""
    kv_heads: Annotated[int, Range(least=1)] | None = None
    """Key and value heads (grouped-query attention). Not set: `heads`."""
    mlp_width: Annotated[int, Range(least=8)] | None = None
    """Features inside the feed-forward part (intermediate size). Not set: 8/3 x width, rounded up to a multiple of 64,
    for the gated kinds (`swiglu`, `geglu`); 4 x width for the others."""
    bias: bool = False
    """Whether the linear layers of blocks have a bias, as in GPT-2."""
    norm: Annotated[str, NORMS] = "rms"
    """Normalisation."""
    norm_settings: Annotated[object, SettingsOf("norm")] = None
    """Settings of a norm of your own (`model.norm = "module:attr"`)."""
    norm_position: NormPlace = "pre"
    """Where a block normalises. `pre`: x + f(norm(x)), and once more before the head. `post`: norm(x + f(x)), as in
    Vaswani et al. 2017; deep models then need `init = "lipschitz"` or `"ds-init"`. `both`: x + norm(f(norm(x)))."""
    qk_norm: bool = False
    """RMS norm with a learned scale over each head's queries and keys before rotation; bounds the attention scores
    (Henry et al. 2020; Dehghani et al. 2023)."""
    mlp: Annotated[str, ACTIVATIONS] = "swiglu"
    """Activation of the feed-forward part, and whether it is gated."""
    mlp_settings: Annotated[object, SettingsOf("mlp")] = None
    """Settings of an activation of your own (`model.mlp = "module:attr"`)."""
    position: Annotated[str, POSITIONS] = "rope"
    """Position encoding."""
    position_settings: Annotated[object, SettingsOf("position")] = None
    """Settings of a kind of position of your own (`model.position = "module:attr"`)."""
    rope_theta: Annotated[float, Range(above=1)] = 10_000.0
    """Base of the rotation frequencies (theta)."""
    rope_scaling: RopeScaling = "none"
    """How rotation reaches `rope_factor` times beyond the trained length. `linear` divides positions by the factor
    (Chen et al. 2023); `ntk` multiplies the base by factor^(D / (D - 2)), D the head size: the slowest pair turns
    `factor` times slower, the fastest as before (Peng et al. 2023, section 3.1)."""
    rope_factor: Annotated[float, Range(least=1)] = 1.0
    """Factor of `rope_scaling`; 1 changes nothing."""
    window: Annotated[int, Range(least=1)] | None = None
    """Sliding-window attention: tokens that a token attends to, itself included. Not set: all earlier tokens."""
    documents: Documents = "ignore"
    """Whether a token attends to earlier documents of its sequence (`ignore`) or to its own only (`separate`)."""
    dropout: Annotated[float, Range(least=0, below=1)] = 0.0
    """Dropout probability after the embedding, after attention and after feed-forward. Masks are a function of seed,
    step and position, the same under any layout of devices."""
    init: Annotated[str, INITS] = "depth-scaled"
    """Initialization of the weights."""
    init_settings: Annotated[object, SettingsOf("init")] = None
    """Settings of a rule of your own for first values (`model.init = "module:attr"`)."""
    tie_embeddings: bool = True
    """Whether the head shares the embedding's weights."""
    vocabulary: Annotated[int, Range(least=1)] | None = None
    """Rows of embedding and head, at least the number of the tokenizer's tokens; the rest is padding. Not set: that
    number."""
    positions: Annotated[int, Range(least=1)] | None = None
    """Number of learned positions, at least the longest sequence length. Not set: that length."""

    def check(self) -> Iterator[tuple[str, str]]:
        size = self.head_size or self.width // self.heads
        if self.width % self.heads and not self.head_size:
            yield "heads", f"{self.heads} heads do not divide the width {self.width}; choose a divisor"
        elif POSITIONS[self.position].how == "rotate" and size % 2:
            key, what = ("head_size", "it") if self.head_size else ("heads", "width / heads")
            yield key, f"{self.position} needs an even head size, {what} is {size}"
        elif self.rope_scaling == "ntk" and size == 2:
            yield "rope_scaling", "ntk needs a head size above 2; choose fewer heads or linear scaling"
        if self.positions and self.position != "learned":
            yield "positions", 'has no effect without `position = "learned"`; remove it'
        if self.rope_factor != 1 and (self.position != "rope" or self.rope_scaling == "none"):
            yield "rope_factor", 'has no effect without `position = "rope"` and a `rope_scaling`; leave it at 1'
        if self.kv_heads and self.heads % self.kv_heads:
            yield "kv_heads", f"{self.kv_heads} does not divide the {self.heads} query heads; choose a divisor"
