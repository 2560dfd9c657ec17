"""What the backward pass will need: bytes that autograd keeps during a forward pass in eager mode. No torch.

The forward pass of model/modules.py and model/decoder.py over sizes in place of tensors: each operation keeps what the
gradients that will be asked for need, and a storage that several keep counts once. A test compares with the storages
that autograd really keeps on a CPU. On a GPU there are the kernels of model/kernels, which keep less; another test has
the peaks of whole steps that were measured there.

What is computed again in the backward pass (`Recompute`) and what several ranks share (`Division`) is left out; what
blocks keep in fewer bits (`Activations`) counts as these.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from .sharding import split_of
from .spec import Spec

Precision = Literal["fp32", "bf16", "fp16"]
"""Of matrix products."""
Device = Literal["cpu", "cuda"]
Recompute = Literal["none", "attention", "full"] | frozenset[int]
"""What is computed again: nothing, the inside of attention, all blocks, or the blocks of these layers."""
Activations = Literal["whole", "packed", "8-bit"]
"""How blocks keep tensors: as they are, masks as bits, or also the inputs of linear maps, norms and activation
functions as bytes (parallel/memory/activation_packing.py)."""
GROUP = 256
"""Numbers of a byte that share a scale, a float32."""
IN_TILES = 1024
"""Tokens of the longest rows whose attention in bfloat16 on a CPU goes through model/cpu_attention.py, which keeps
nothing but queries, keys and values. In longer ones torch's kernel is as quick."""
NORM_WIDTH = 8192
"""Features of the widest rows that a GPU's kernel normalises (model/norms.py)."""
GATE_CHUNK = 16
"""Features of the shortest chunks of gate and up that a GPU's kernel reads (model/gated.py): shorter ones would not
fill its memory accesses of 32 bytes."""
SMALL_SHARE = 2
"""Tensors of at most 1 / 2 as many numbers as the input of the block stay as they are: rotations are never larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Ranks that share the activations of a row; degrees must divide what they split."""

    tensor: int = 1
    """Ranks that share every matrix product, by heads and hidden features."""
    sequence: bool = False
    """Whether these also share what lies between the products, by places of the row."""
    context: int = 1
    """Ranks that share every row, by its places; masks are then made piece by piece and not kept."""
    partition: bool = False
    """Whether `tensor` ranks share the inputs of blocks that are computed again (ZeRO-R)."""

    @property
    def places(self) -> int:
        """Ranks over which the places of the stream between the products are dealt."""
        return self.context * (self.tensor if self.sequence else 1)


WHOLE = Division()


def is_whole_head(size: int) -> bool:
    """Whether a GPU's kernels split and turn heads of `size` features (model/heads.py), which they need as a power of
    two."""
    return size >= 32 and size & (size - 1) == 0


def saved_bytes(
    spec: Spec,
    *,
    rows: int,
    precision: Precision,
    trained: Collection[str] | None = None,
    recompute: Recompute = "none",
    division: Division = WHOLE,
    activations: Activations = "whole",
    device: Device = "cpu",
    pure: bool = False,
) -> int:
    """Bytes kept after the forward pass and loss of `rows` full rows: all but weights and logits.

    `trained` names the parameters that get a gradient; None: all. Blocks that are computed again also count rotations
    and masks, which they will use. `pure`: weights and stream are as narrow as the inputs of products.
    """
    record = _pass(spec, rows, precision, trained, recompute, division, activations, device, pure=pure)
    return sum(kept.bytes for kept in record.kept) + sum(kept.packed_bytes for kept in record.packed)


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """What one block keeps."""

    input: int
    """Of its input, which it also keeps when it is computed again."""
    inner: int
    """Of what is computed inside and goes when it is computed again."""
    copies: int = 0
    """Of narrow copies of weights: autocast holds them until the forward pass ends, computed again or not."""


def block_bytes(
    spec: Spec,
    *,
    rows: int,
    precision: Precision,
    trained: Collection[str] | None = None,
    division: Division = WHOLE,
    device: Device = "cpu",
    pure: bool = False,
) -> tuple[BlockBytes, ...]:
    """What each block keeps of `rows` full rows, where it is not or where it is computed again."""
    return tuple(_pass(spec, rows, precision, trained, "full", division, device=device, pure=pure).blocks)


def saved_logit_bytes(spec: Spec, *, tokens: int) -> int:
    """Bytes of the log-probabilities that the loss of `tokens` tokens keeps where tensor ranks share it and it is not
    cut into chunks."""
    return 4 * tokens * spec.vocabulary


@dataclass(frozen=True, eq=False, slots=True)
class _Storage:
    """Memory of a tensor and its views; equal only to itself."""

    bytes: int
    of_weight: bool = False
    number_bytes: int = 4
    """Of each of its numbers; 1 for those of a mask."""

    @property
    def numbers(self) -> int:
        return self.bytes // self.number_bytes

    @property
    def packed_bytes(self) -> int:
        """In fewer bits."""
        return -(-self.numbers // 8) if self.number_bytes == 1 else -(-self.numbers // GROUP) * (GROUP + 4)


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor of the forward pass."""

    storage: _Storage
    gradient: bool
    """Whether the backward pass computes its gradient."""
    wide: bool = True
    """float32 in any precision, as the residual stream; else as narrow as the inputs of matrix products."""


def _pass(
    spec: Spec,
    rows: int,
    precision: Precision,
    trained: Collection[str] | None,
    recompute: Recompute,
    division: Division,
    activations: Activations = "whole",
    device: Device = "cpu",
    *,
    pure: bool = False,
) -> _Pass:
    """A forward pass and its loss, recorded."""
    names = frozenset(spec.shapes() if trained is None else trained)
    record = _Pass(
        spec,
        rows,
        precision,
        names,
        attention_again=recompute == "attention",
        division=division,
        activations=activations,
        device=device,
        pure=pure,
    )
    layers = {"none": (), "attention": (), "full": range(spec.layers)}
    again = layers[recompute] if isinstance(recompute, str) else recompute
    x = record.embedding()
    for layer in range(spec.layers):
        run = record.block_again if layer in again else record.block_packed
        x = run(x, f"blocks.{layer}")
    x = x if spec.norm_position == "post" else record.norm(x, "norm")
    head = "embedding.weight" if spec.tie_embeddings else "head.weight"
    if division.tensor == 1:
        record.loss(x, head)
        return record
    record.product(record.entered(x), head, outputs=spec.vocabulary // division.tensor)
    # Targets, the logarithm of each sum, and who has the target.
    record.keep(_Storage((8 + 4 + 1) * record.tokens))
    return record


class _Pass:
    """One forward pass: what it has kept so far."""

    def __init__(
        self,
        spec: Spec,
        rows: int,
        precision: Precision,
        trained: frozenset[str],
        *,
        attention_again: bool,
        division: Division,
        activations: Activations,
        device: Device,
        pure: bool,
    ) -> None:
        self.spec, self.trained, self.division = spec, trained, division
        self.tokens = rows * spec.sequence_length // division.context
        """Of the products and of attention."""
        self.stream_tokens = rows * spec.sequence_length // division.places
        """Of all that lies between."""
        self.kept: set[_Storage] = set()
        """As they are."""
        self.packed: set[_Storage] = set()
        """In fewer bits."""
        self._activations, self._in_block = activations, False
        self.blocks: list[BlockBytes] = []
        """Of those that are computed again."""
        self._attention_again = attention_again
        self._shapes = {name: _part(name, shape, spec, division) for name, shape in spec.shapes().items()}
        self._heads, self._groups = spec.heads // division.tensor, spec.kv_heads // division.tensor
        self._hidden = spec.mlp_width // division.tensor
        self._autocast = precision != "fp32"
        self._narrow = 2 if self._autocast else 4
        self._wide = self._narrow if pure else 4
        """Bytes of a number of the stream."""
        self._copies = self._autocast and not pure
        """Whether products have narrow copies of what they multiply."""
        gpu = device == "cuda"
        self._norm_kernel = gpu and spec.width <= NORM_WIDTH
        self._gate_kernel = gpu and spec.mlp == "swiglu" and spec.mlp_chunk >= GATE_CHUNK
        self._turn_kernel = gpu and not spec.qk_norm and is_whole_head(spec.head_size)
        pages = (rows if spec.documents == "separate" else 1) * (self._heads if spec.position == "alibi" else 1)
        # All layers share them.
        self._mask = _Storage(self._narrow * pages * spec.sequence_length**2)
        self._turn = _Storage(4 * self.tokens * spec.head_size)
        masked = spec.window is not None or spec.position == "alibi" or spec.documents == "separate"
        self._masked = masked and division.context == 1
        self._in_tiles = (
            device == "cpu" and precision == "bf16" and spec.sequence_length <= IN_TILES and division.context == 1
        )

    def keep(self, *storages: _Storage) -> None:
        for storage in storages:
            packs = self._in_block and storage not in self.kept and self._packs(storage)
            (self.packed if packs else self.kept).add(storage)

    def _packs(self, storage: _Storage) -> bool:
        if storage.of_weight or storage.numbers <= self.stream_tokens * self.spec.width // SMALL_SHARE:
            return False
        return self._activations == "8-bit" or (self._activations == "packed" and storage.number_bytes == 1)

    def embedding(self) -> _Value:
        """Tables keep the numbers of the rows that were looked up, in int64."""
        tables = {"embedding.weight": self.tokens, "positions.weight": self.stream_tokens}
        tables = {name: tokens for name, tokens in tables.items() if name in self.trained}
        self.keep(*(_Storage(8 * tokens) for tokens in tables.values()))
        if "embedding.weight" in tables and self.division.tensor > 1:
            self.keep(_Storage(4 * self.tokens))  # which of them this rank has
        return self.dropout(self._stream(gradient=bool(tables)))

    def block_again(self, x: _Value, name: str) -> _Value:
        """A block that keeps its input and what all blocks share, in place of what it computes."""
        before, self.kept = self.kept, set()
        y = self.block(x, name)
        keeps = bool(self.kept)  # the gradient of a bias alone needs nothing, and nothing is computed again for it
        inside, self.kept = self.kept - {x.storage, self._turn, self._mask}, before
        inner = sum(storage.bytes for storage in inside if not storage.of_weight)
        share = _Storage(x.storage.bytes // self.division.tensor) if self.division.partition else x.storage
        copies = sum(storage.bytes for storage in inside if storage.of_weight)
        self.blocks.append(BlockBytes(share.bytes, inner, copies))
        if y.gradient and keeps:
            self.keep(share)
            self.keep(*[self._turn] * (self.spec.position == "rope"), *[self._mask] * self._masked)
        return y

    def block_packed(self, x: _Value, name: str) -> _Value:
        """A block that keeps what it computes, in as many bits as it should."""
        self._in_block = True
        y = self.block(x, name)
        self._in_block = False
        return y

    def block(self, x: _Value, name: str) -> _Value:
        for branch in ("attention", "mlp"):
            y = x if self.spec.norm_position == "post" else self.norm(x, f"{name}.{branch}_norm", branch=True)
            y = self.attention(y, f"{name}.attention") if branch == "attention" else self.mlp(y, f"{name}.mlp")
            y = self.dropout(self.left(y))
            if self.spec.norm_position == "both":
                y = self.norm(self._widened_stream(y), f"{name}.{branch}_post_norm")
            x = self._stream(gradient=x.gradient or y.gradient)
            if self.spec.norm_position == "post":
                x = self.norm(x, f"{name}.{branch}_norm")
        return x

    def dropout(self, x: _Value) -> _Value:
        """The mask takes a byte a feature."""
        if not self.spec.dropout:
            return x
        if x.gradient:
            self.keep(_Storage(self.stream_tokens * self.spec.width, number_bytes=1))
        return self._stream(gradient=x.gradient, wide=x.wide)

    def norm(self, x: _Value, name: str, *, branch: bool = False) -> _Value:
        """Of the stream; for a `branch` a kernel makes it as narrow as the product wants it."""
        if self.spec.norm == "none":
            return x
        weight, bias = f"{name}.weight" in self.trained, f"{name}.bias" in self.trained
        if self._norm_kernel:
            gradient, centred = x.gradient or weight or bias, self.spec.norm == "layer"
            if gradient:
                self.keep(x.storage, _Storage((8 if centred else 4) * self.stream_tokens))
            return self._stream(gradient=gradient, wide=not branch)
        if self.spec.norm == "rms":
            self._keep_rms(x, weight=weight, tokens=self.stream_tokens, features=self.spec.width, means=1)
            return self._stream(gradient=x.gradient or weight)
        gradient = x.gradient or weight or bias
        if gradient:
            self.keep(x.storage, _Storage(8 * self.stream_tokens))  # with mean and deviation
        return self._stream(gradient=gradient)

    def entered(self, x: _Value) -> _Value:
        """The stream as a product meets it: all places of it, gathered."""
        gathers = self.division.sequence and self.division.tensor > 1
        return self._new(self.spec.width, gradient=x.gradient, wide=x.wide) if gathers else x

    def left(self, y: _Value) -> _Value:
        """What a product leaves to the stream: partial sums of several ranks, added up."""
        return self._stream(gradient=y.gradient, wide=y.wide) if self.division.tensor > 1 else y

    def attention(self, x: _Value, name: str) -> _Value:
        spec = self.spec
        heads, groups, size = self._heads, self._groups, spec.head_size
        fused = self.linear(self.entered(x), f"{name}.qkv")
        query = key = fused
        if 1 < groups < heads and not self._turn_kernel:
            # Queries that stand in groups are copied side by side.
            query = self._new(heads * size, gradient=fused.gradient)
        if spec.qk_norm:
            query = self._head_norm(query, f"{name}.query_norm.weight", heads)
            key = self._head_norm(key, f"{name}.key_norm.weight", groups)
        values = fused
        if spec.position == "rope" and self._turn_kernel:
            query, key, values = (self._new(n * size, gradient=fused.gradient) for n in (heads, groups, groups))
            self.kept |= {self._turn} if fused.gradient else set()
        elif spec.position == "rope":
            query, key = self._rotated(query, heads), self._rotated(key, groups)
        gradient = query.gradient or key.gradient or fused.gradient
        attended = self._new(heads * size, gradient=gradient)
        if gradient:
            # The fused projection stays whole because the values are a view of it. All of it stays as it is, whatever
            # becomes of the rest.
            self.kept |= {query.storage, key.storage, values.storage}
            if not self._attention_again and not self._in_tiles:
                # With a logarithm a head.
                self.kept |= {attended.storage, _Storage(4 * self.tokens * heads)}
            if self._masked:
                self.kept.add(self._mask)
        turned = (spec.position == "rope" or spec.qk_norm) and not self._turn_kernel
        if turned and heads > 1 and not self._in_tiles:
            # New queries stand heads first, and so does the result: it is copied to tokens first.
            attended = self._new(heads * size, gradient=gradient)
        return self.linear(attended, f"{name}.out")

    def mlp(self, x: _Value, name: str) -> _Value:
        """Gated: gate, up, f(gate) and the product. Else input (ReLU: its positive part) and output of the
        activation."""
        inner = self.linear(self.entered(x), f"{name}.up")
        hidden = self._new(self._hidden, gradient=inner.gradient)
        if inner.gradient:
            self.keep(inner.storage)
            if self.spec.gated and not self._gate_kernel:
                self.keep(_Storage(self._narrow * self.tokens * self._hidden, number_bytes=self._narrow))
        return self.linear(hidden, f"{name}.down")

    def linear(self, x: _Value, name: str) -> _Value:
        """A linear map of a block, with its adapter."""
        y = self.product(x, f"{name}.weight", outputs=self._shapes[f"{name}.weight"][0])
        gradient = y.gradient or f"{name}.bias" in self.trained
        if f"{name}.lora_a" in self._shapes:
            inner = self.product(x, f"{name}.lora_a", outputs=self.spec.lora_rank)
            added = self.product(inner, f"{name}.lora_b", outputs=self._shapes[f"{name}.lora_b"][0])
            return replace(added, gradient=gradient or added.gradient)
        return replace(y, gradient=gradient)

    def product(self, x: _Value, name: str, *, outputs: int) -> _Value:
        """A matrix keeps its input for its own gradient, and itself for that of the input. Both are narrow copies under
        autocast, each product has its own."""
        if name in self.trained:
            inputs = self._shapes[name][1]
            copied = x.wide and self._copies
            self.keep(_Storage(2 * self.tokens * inputs, number_bytes=2) if copied else x.storage)
        if x.gradient and self._copies:
            self.keep(_Storage(2 * prod(self._shapes[name]), of_weight=True))
        return self._new(outputs, gradient=x.gradient or name in self.trained)

    def loss(self, x: _Value, head: str) -> None:
        """The gradients by hidden states and head, which are made in the forward pass (model/loss.py)."""
        if x.gradient:
            self.keep(_Storage(self._narrow * self.tokens * self.spec.width))
        if head in self.trained:
            self.keep(_Storage(4 * self.spec.vocabulary * self.spec.width))

    def _head_norm(self, x: _Value, name: str, heads: int) -> _Value:
        size = self.spec.head_size
        if x.gradient and self._copies:
            self.keep(_Storage(2 * size, of_weight=True))
        copied = self._autocast and not x.wide
        wide = self._new(heads * size, gradient=x.gradient, wide=True) if copied else x
        weight = name in self.trained
        self._keep_rms(wide, weight=weight, tokens=self.tokens, features=heads * size, means=heads)
        return self._new(heads * size, gradient=x.gradient or weight)

    def _keep_rms(self, x: _Value, *, weight: bool, tokens: int, features: int, means: int) -> None:
        """Unfused, as on a CPU: the input and its means for its gradient, the normalised input for the weight's."""
        if x.gradient:
            self.keep(x.storage, _Storage(4 * tokens * means))
        if weight:
            self.keep(_Storage(4 * tokens * features))

    def _rotated(self, x: _Value, heads: int) -> _Value:
        if x.gradient:
            # Cosines and sines; under autocast queries and keys of each layer have narrow copies.
            self.kept.add(_Storage(2 * self.tokens * self.spec.head_size) if self._autocast else self._turn)
        return self._new(heads * self.spec.head_size, gradient=x.gradient)

    def _widened_stream(self, x: _Value) -> _Value:
        copied = self._autocast and not x.wide
        return self._stream(gradient=x.gradient) if copied else x

    def _stream(self, *, gradient: bool, wide: bool = True) -> _Value:
        width = self._wide if wide else self._narrow
        return _Value(_Storage(width * self.stream_tokens * self.spec.width, number_bytes=width), gradient, wide)

    def _new(self, features: int, *, gradient: bool, wide: bool = False) -> _Value:
        width = 4 if wide else self._narrow
        return _Value(_Storage(width * self.tokens * features, number_bytes=width), gradient, wide)


def _part(name: str, shape: tuple[int, ...], spec: Spec, division: Division) -> tuple[int, ...]:
    """The shape of one rank's part of a parameter."""
    cut = split_of(name, spec).dimension
    # Biases of split outputs have no dimension 1 to cut: only matrices are `row`.
    return tuple(side // division.tensor if dim == cut else side for dim, side in enumerate(shape))
