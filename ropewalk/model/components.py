"""Torch-free components of a decoder: norm, attention, feed-forward; model/modules.py builds them.

Each table (`NORMS`, `ACTIVATIONS`, `POSITIONS`) lists the components that a recipe may name, with their costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ropewalk.config.registry import Kind, Registry

from .component import REPLICATE, Component, ComponentFlops, GradientFlow, ParameterSpec, linear_parameters
from .sharding import Split

if TYPE_CHECKING:
    from .activations import Tape, TracedTensor
    from .spec import Spec

NORM_WIDTH = 8192
"""Maximum width that the GPU norm kernel supports (model/norms.py)."""
GATE_CHUNK = 16
"""Minimum chunk of gate and up that the GPU kernel supports (model/feed_forward.py): shorter ones would not fill its
32-byte memory accesses."""


def rms_saved(tape: Tape, x: TracedTensor, name: str) -> TracedTensor:
    """Saved by an unfused norm, as on a CPU: input and one value per token for the gradient of the input, normalized
    input for that of `weight`."""
    weight = f"{name}.weight" in tape.trained
    tape.save_norm(x, weight=weight, tokens=tape.stream_tokens, features=tape.width, means=1)
    return tape.stream(gradient=x.gradient or weight)


def _layer_saved(tape: Tape, x: TracedTensor, name: str) -> TracedTensor:
    """Saves the input, mean and deviation."""
    gradient = x.gradient or f"{name}.weight" in tape.trained or f"{name}.bias" in tape.trained
    if gradient:
        tape.save(x.storage, tape.numbers(2 * tape.stream_tokens))
    return tape.stream(gradient=gradient)


@dataclass(frozen=True, kw_only=True, slots=True)
class NormKind(Kind):
    """A norm. The target builds a module for a width; `settings`, if any, are its second argument."""

    vectors: tuple[str, ...] = ("weight",)
    """Parameters, one value per feature each. `weight` starts at 1, others at 0."""
    saved: Callable[[Tape, TracedTensor, str], TracedTensor] = rms_saved
    """Tensors saved by autograd without kernels."""
    kernel_numbers: int = 0
    """Values per token that the GPU kernel of model/norms.py saves besides its input; 0: no kernel."""


NORMS: Registry[NormKind] = Registry(
    "norm",
    {
        "rms": NormKind(
            target="ropewalk.model.norms:RmsNorm", kernel_numbers=1, doc="Root mean square (Zhang and Sennrich 2019)."
        ),
        "layer": NormKind(
            target="ropewalk.model.norms:LayerNorm",
            vectors=("weight", "bias"),
            saved=_layer_saved,
            kernel_numbers=2,
            doc="Mean and variance (Ba et al. 2016).",
        ),
        "none": NormKind(
            target="torch.nn:Identity",
            vectors=(),
            saved=lambda tape, x, name: x,
            doc='No norm; a deep model without any needs `init = "t-fixup"`.',
        ),
    },
    kind=NormKind,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationKind(Kind):
    """A feed-forward activation function: the target maps a tensor to one of the same shape."""

    gated: bool = False
    """Whether the feed-forward part is down(f(gate(x)) * up(x)) rather than down(f(up(x)))."""
    saved_tensors: int = 1
    """Saved tensors of the size of its input, counting its input but not its output."""
    has_gate_kernel: bool = False
    """Whether a GPU kernel computes f(gate) * up, saving only gate and up."""


ACTIVATIONS: Registry[ActivationKind] = Registry(
    "activation",
    {
        "swiglu": ActivationKind(
            target="torch.nn.functional:silu", gated=True, has_gate_kernel=True, doc="Gated by SiLU (Shazeer 2020)."
        ),
        "geglu": ActivationKind(target="torch.nn.functional:gelu", gated=True, doc="Gated by GELU (Shazeer 2020)."),
        "gelu": ActivationKind(target="torch.nn.functional:gelu", doc="GELU (Hendrycks and Gimpel 2016)."),
        "gelu-tanh": ActivationKind(
            target="ropewalk.model.feed_forward:gelu_tanh", doc="GELU approximated by tanh, as in GPT-2."
        ),
        "relu2": ActivationKind(target="ropewalk.model.feed_forward:relu2", doc="The square of ReLU (So et al. 2021)."),
    },
    kind=ActivationKind,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionKind(Kind):
    """A position encoding. The target is a function, called according to `how`."""

    how: Literal["add", "rotate", "table", "penalty", "none"] = "add"
    """`add`: (token embeddings, positions B T, spec) -> tensor of the same shape. `rotate`: (positions B T, spec, *,
    dtype) -> cosines and sines B 1 T D/2 that rotate queries and keys. Others are built in: a learned table, ALiBi,
    none."""


POSITIONS: Registry[PositionKind] = Registry(
    "position",
    {
        "rope": PositionKind(
            target="ropewalk.model.positions:rotation",
            how="rotate",
            doc="Rotation of queries and keys (Su et al. 2021).",
        ),
        "learned": PositionKind(target=None, how="table", doc="A learned vector added to the embedding."),
        "sinusoidal": PositionKind(
            target="ropewalk.model.positions:with_sinusoids",
            doc="The sinusoids of Vaswani et al. 2017, added to the embedding times sqrt(width).",
        ),
        "alibi": PositionKind(
            target="ropewalk.model.positions:alibi_slopes",
            how="penalty",
            doc="A penalty proportional to the distance (ALiBi, Press et al. 2022).",
        ),
        "none": PositionKind(target=None, how="none", doc="Not at all: causality is the only order."),
    },
    kind=PositionKind,
)


def made(kind: Kind, settings: object | None) -> Callable[..., Any]:
    """The target of `kind`, with its settings bound if any."""
    target: Callable[..., Any] = kind.load()
    if kind.settings is None:
        return target
    settings = kind.settings() if settings is None else settings
    if target is kind.settings:
        assert callable(settings), f"{kind.settings.__name__} has no `__call__`"
        return settings
    return lambda *args, **kwargs: target(*args, settings, **kwargs)


@dataclass(frozen=True, slots=True)
class Table(Component):
    """A matrix of one row per token or position: the embedding, learned positions, the head."""

    rows: int
    width: int
    by_vocabulary: bool = True
    is_head: bool = False

    def parameters(self) -> dict[str, ParameterSpec]:
        split = Split("vocabulary", self.rows) if self.by_vocabulary else REPLICATE
        return {"weight": ParameterSpec((self.rows, self.width), split, is_table=not self.is_head)}


@dataclass(frozen=True, slots=True)
class NormComponent(Component):
    """A norm over the width."""

    kind: NormKind
    width: int

    def parameters(self) -> dict[str, ParameterSpec]:
        return {name: ParameterSpec((self.width,)) for name in self.kind.vectors}

    def saved(self, tape: Tape, x: TracedTensor, name: str, *, branch: bool = False) -> TracedTensor:
        """For a `branch`, a kernel writes the output in the matmul's narrow dtype."""
        if not (self.kind.kernel_numbers and tape.on_gpu and self.width <= NORM_WIDTH):
            return self.kind.saved(tape, x, name)
        gradient = x.gradient or any(f"{name}.{vector}" in tape.trained for vector in self.kind.vectors)
        if gradient:
            tape.save(x.storage, tape.numbers(self.kind.kernel_numbers * tape.stream_tokens))
        return tape.stream(gradient=gradient, wide=not branch)


@dataclass(frozen=True, slots=True)
class AttentionComponent(Component):
    """Self-attention with one fused projection, whose rows are grouped by key-value head."""

    spec: Spec

    def parameters(self) -> dict[str, ParameterSpec]:
        spec, size = self.spec, self.spec.head_size
        parts = (("query", spec.heads // spec.kv_heads * size), ("key", size), ("value", size))
        found = linear_parameters(
            "qkv",
            spec,
            branch="attention",
            outputs=spec.kv_heads * spec.group_heads * size,
            inputs=spec.width,
            split=Split("column", spec.kv_heads, parts),
        )
        if spec.qk_norm:
            norm = ParameterSpec((size,), Split("replicate", partial_gradient=True))
            found |= {"query_norm.weight": norm, "key_norm.weight": norm}
        return found | linear_parameters(
            "out",
            spec,
            branch="attention",
            outputs=spec.width,
            inputs=spec.heads * size,
            split=Split("row", spec.kv_heads),
        )

    def flops(self, name: str, flow: GradientFlow) -> ComponentFlops:
        """Includes q k^T and p v: one matmul each for the output, and one for each operand that gets a gradient."""
        inside = {f"{name}.qkv.{kind}" for kind in ("weight", "bias", "lora_a", "lora_b")}
        values = flow.flows_below(f"{name}.qkv.weight") or not inside.isdisjoint(flow.trained)
        queries, keys = (values or f"{name}.{of}_norm.weight" in flow.trained for of in ("query", "key"))
        return ComponentFlops(
            linear=Component.flops(self, name, flow).linear,
            score_features=self.spec.heads * self.spec.head_size,
            score_matmuls=2 + queries + keys + (queries or keys) + values,
        )

    def saved(self, tape: Tape, x: TracedTensor, name: str) -> TracedTensor:
        spec, size = self.spec, self.spec.head_size
        heads, groups = spec.heads // tape.division.tensor, spec.kv_heads // tape.division.tensor
        has_kernel = tape.on_gpu and not spec.qk_norm and is_whole_head(size)
        mask, angles = self._mask(tape, heads), tape.shared("angles", tape.numbers(tape.tokens * size))
        tape.block_reads(*[angles] * spec.rotates, *[mask] * (mask is not None))
        fused = tape.linear(tape.entered(x), f"{name}.qkv")
        query = key = values = fused
        if 1 < groups < heads and not has_kernel:
            # Grouped queries are copied to be contiguous.
            query = tape.new(heads * size, gradient=fused.gradient)
        if spec.qk_norm:
            query = tape.head_norm(query, f"{name}.query_norm.weight", heads, size)
            key = tape.head_norm(key, f"{name}.key_norm.weight", groups, size)
        if spec.rotates and has_kernel:
            query, key, values = (tape.new(n * size, gradient=fused.gradient) for n in (heads, groups, groups))
            if fused.gradient:
                tape.save_whole(angles)
        elif spec.rotates:
            for each in (query, key):
                if each.gradient:
                    # Under autocast each layer's queries and keys save narrow copies of cosines and sines.
                    narrow = tape.numbers(tape.tokens * size, width=2)
                    tape.save_whole(narrow if tape.autocast else angles)
            query, key = (tape.new(n * size, gradient=each.gradient) for each, n in ((query, heads), (key, groups)))
        gradient = query.gradient or key.gradient or fused.gradient
        attended = tape.new(heads * size, gradient=gradient)
        if gradient:
            # The values are a view of the fused projection, which is therefore saved whole and never packed.
            tape.save_whole(query.storage, key.storage, values.storage)
            if not tape.recomputes_attention and not tape.attends_in_tiles:
                tape.save_whole(attended.storage, tape.numbers(tape.tokens * heads))  # and the log-sum-exp per head
            if mask is not None:
                tape.save_whole(mask)
        if (spec.rotates or spec.qk_norm) and not has_kernel and heads > 1 and not tape.attends_in_tiles:
            # New queries are heads first, and so is the result, which is copied to tokens first.
            attended = tape.new(heads * size, gradient=gradient)
        return tape.linear(attended, f"{name}.out")

    def _mask(self, tape: Tape, heads: int) -> Any:
        """The mask shared by all layers; context ranks build theirs piecewise."""
        spec = self.spec
        masked = spec.window is not None or spec.position == "alibi" or spec.documents == "separate"
        if not masked or tape.division.context > 1:
            return None
        pages = (tape.rows if spec.documents == "separate" else 1) * (heads if spec.position == "alibi" else 1)
        return tape.shared("mask", tape.numbers(pages * spec.sequence_length**2, width=tape.narrow))


@dataclass(frozen=True, slots=True)
class FeedForwardComponent(Component):
    """down(f(up(x))), or gated: the rows of gate and up alternate in chunks of one fused matrix."""

    spec: Spec
    kind: ActivationKind

    def parameters(self) -> dict[str, ParameterSpec]:
        spec, hidden, chunk = self.spec, self.spec.mlp_width, self.spec.mlp_chunk if self.kind.gated else 1
        parts = (("gate", chunk), ("up", chunk)) if self.kind.gated else ()
        return linear_parameters(
            "up",
            spec,
            branch="mlp",
            outputs=hidden * (2 if self.kind.gated else 1),
            inputs=spec.width,
            split=Split("column", hidden // chunk, parts),
        ) | linear_parameters(
            "down", spec, branch="mlp", outputs=spec.width, inputs=hidden, split=Split("row", hidden // chunk)
        )

    def saved(self, tape: Tape, x: TracedTensor, name: str) -> TracedTensor:
        """Gated: saves gate, up, f(gate) and the product. Otherwise input (ReLU: its positive part) and output of the
        activation."""
        inner = tape.linear(tape.entered(x), f"{name}.up")
        features = self.spec.mlp_width // tape.division.tensor
        hidden = tape.new(features, gradient=inner.gradient)
        if inner.gradient:
            has_kernel = self.kind.has_gate_kernel and tape.on_gpu and self.spec.mlp_chunk >= GATE_CHUNK
            more = self.kind.saved_tensors - 1 + (self.kind.gated and not has_kernel)
            tape.save(inner.storage, *(tape.numbers(tape.tokens * features, width=tape.narrow) for _ in range(more)))
        return tape.linear(hidden, f"{name}.down")


def is_whole_head(size: int) -> bool:
    """Whether GPU kernels can split and rotate heads of `size` features (model/heads.py): powers of two."""
    return size >= 32 and size & (size - 1) == 0


def decoder_components(spec: Spec) -> dict[str, Component]:
    """Components of a decoder by module name, in order."""
    norm = NormComponent(NORMS[spec.norm], spec.width)
    branches = {"attention": AttentionComponent(spec), "mlp": FeedForwardComponent(spec, ACTIVATIONS[spec.mlp])}
    found: dict[str, Component] = {"embedding": Table(spec.vocabulary, spec.width)}
    if spec.learned_positions:
        found["positions"] = Table(spec.learned_positions, spec.width, by_vocabulary=False)
    for layer in range(spec.layers):
        for branch, component in branches.items():
            name = f"blocks.{layer}.{branch}"
            found |= {f"{name}_norm": norm, name: component}
            if spec.norm_position == "both":
                found[f"{name}_post_norm"] = norm
    if spec.norm_position != "post":  # with `post` the last block ends with the final norm
        found["norm"] = norm
    if not spec.tie_embeddings:
        found["head"] = Table(spec.vocabulary, spec.width, is_head=True)
    return found


def decoder_order(spec: Spec) -> list[str]:
    """The same names, in the order of the forward pass."""
    names = list(decoder_components(spec))
    if spec.norm_position == "post":
        for branch in (f"blocks.{layer}.{part}" for layer in range(spec.layers) for part in ("attention", "mlp")):
            at = names.index(branch)
            names[at - 1 : at + 1] = [branch, f"{branch}_norm"]
    return names


def decoder_saved(spec: Spec, tape: Tape) -> None:
    """Records a forward pass and its loss."""
    components, has_post_norm = decoder_components(spec), spec.norm_position == "post"

    def block(x: TracedTensor, name: str) -> TracedTensor:
        for branch in (f"{name}.attention", f"{name}.mlp"):
            norm = components[f"{branch}_norm"]
            assert isinstance(norm, NormComponent)
            y = x if has_post_norm else norm.saved(tape, x, f"{branch}_norm", branch=True)
            y = tape.dropout(tape.left(components[branch].saved(tape, y, branch)))
            if spec.norm_position == "both":
                y = norm.saved(tape, tape.widened(y), f"{branch}_post_norm")
            x = tape.stream(gradient=x.gradient or y.gradient)
            x = norm.saved(tape, x, f"{branch}_norm") if has_post_norm else x
        return x

    x = tape.embedding()
    for layer in range(spec.layers):
        x = tape.block(layer, x, block)
    x = x if has_post_norm else components["norm"].saved(tape, x, "norm")
    tape.head(x, "embedding.weight" if spec.tie_embeddings else "head.weight")


def stack_saved(spec: Spec, tape: Tape) -> None:
    """`decoder_saved` for other blocks: components run in sequence, each added to the residual stream."""
    components = MODELS[spec.kind].components(spec)

    def block(x: TracedTensor, name: str) -> TracedTensor:
        for inner, component in components.items():
            if inner == name or inner.startswith(f"{name}."):
                x = tape.stream(gradient=component.saved(tape, x, inner).gradient or x.gradient)
        return x

    x = tape.embedding()
    for layer in range(spec.layers):
        x = tape.block(layer, x, block)
    tape.head(x, "embedding.weight" if spec.tie_embeddings else "head.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelKind(Kind):
    """A kind of model; its target is a `ModelStage` class (model/protocol.py)."""

    components: Callable[[Spec], Mapping[str, Component]]
    """By module name, in order. `embedding` embeds tokens, `blocks.N` or `blocks.N.part` are layers, `head` computes
    logits unless embeddings are tied."""
    order: Callable[[Spec], list[str]] | None = None
    """The names in the order of the forward pass; None: the same order."""
    saved: Callable[[Spec, Tape], None] = stack_saved
    """Records saved tensors of a forward pass and its loss."""
    shares_positions: bool = False
    """Whether ranks may share the positions of a sequence (`parallel.context`, `parallel.sequence`): positions then
    interact only in `ForwardPass.attention`."""


MODELS: Registry[ModelKind] = Registry(
    "model kind",
    {
        "decoder": ModelKind(
            target="ropewalk.model.decoder:Decoder",
            components=decoder_components,
            order=decoder_order,
            saved=decoder_saved,
            shares_positions=True,
            doc="A decoder-only transformer.",
        )
    },
    kind=ModelKind,
)
