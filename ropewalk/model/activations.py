"""Counts activation bytes: what autograd saves for the backward pass of an eager forward pass. No torch.

Runs a forward pass over sizes instead of tensors: each component (model/components.py) records on a `Tape` what its
gradients need; a storage saved several times counts once. A test compares with the storages that autograd saves on a
CPU. On GPUs the kernels of model/kernels save less; another test has measured peaks of whole steps there.

Excludes what is recomputed in the backward pass (`Recompute`) and other ranks' shares (`Division`); blocks that pack
activations into fewer bits (`Activations`) count packed bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Required, TypedDict, Unpack

from .components import MODELS
from .spec import Spec

Precision = Literal["fp32", "bf16", "fp16"]
"""Dtype of matmuls."""
Device = Literal["cpu", "cuda"]
Recompute = Literal["none", "attention", "full"] | frozenset[int]
"""Recompute: none, attention only, all blocks, or the blocks of these layers."""
Activations = Literal["whole", "packed", "8-bit"]
"""How blocks save tensors: unchanged, masks as bits, or also inputs of linear layers, norms and activation functions as
bytes (parallel/memory/activation_packing.py)."""
GROUP = 256
"""Packed values that share a scale, a float32."""
IN_TILES = 1024
"""Maximum sequence length for which bfloat16 attention on a CPU uses model/cpu_attention.py, which saves only queries,
keys and values. For longer ones torch's kernel is as fast."""
SMALL_SHARE = 2
"""Tensors of at most half as many elements as the block's input are not packed: rotations are never larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Ranks that share the activations of a sequence; degrees must divide the dimensions that they split."""

    tensor: int = 1
    """Ranks that share every matmul, by heads and hidden features."""
    sequence: bool = False
    """Whether these ranks also split activations between matmuls by position (sequence parallelism)."""
    context: int = 1
    """Ranks that split every sequence by position; masks are then built piecewise and not saved."""
    partition: bool = False
    """Whether `tensor` ranks split the saved inputs of recomputed blocks (ZeRO-R)."""

    @property
    def places(self) -> int:
        """Ranks over which the stream's positions are split between matmuls."""
        return self.context * (self.tensor if self.sequence else 1)


WHOLE = Division()


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes saved by one block."""

    input: int
    """The block's input, also saved with recompute."""
    inner: int
    """Tensors inside the block, not saved with recompute."""
    copies: int = 0
    """Narrow copies of weights: autocast holds them until the forward pass ends, with recompute or not."""


class Pass(TypedDict, total=False):
    """The forward pass whose saved bytes are counted."""

    rows: Required[int]
    """Full sequences."""
    precision: Required[Precision]
    trained: Collection[str] | None
    """Parameters that get a gradient; None: all."""
    recompute: Recompute
    """Recomputed blocks also count rotations and masks, which they will read."""
    division: Division
    activations: Activations
    device: Device
    pure: bool
    """Whether weights and stream have the narrow dtype of matmul inputs."""


def saved_bytes(spec: Spec, **of: Unpack[Pass]) -> int:
    """Bytes saved after a forward pass and its loss, except weights and logits."""
    tape = Tape(spec, **of)
    return sum(saved.bytes for saved in tape.saved) + sum(saved.packed_bytes for saved in tape.packed)


def block_bytes(spec: Spec, **of: Unpack[Pass]) -> tuple[BlockBytes, ...]:
    """Bytes saved by each block, with and without recompute."""
    of["recompute"] = "full"
    return tuple(Tape(spec, **of).blocks)


def saved_logit_bytes(spec: Spec, *, tokens: int) -> int:
    """Bytes of the log-probabilities saved by the loss of `tokens` tokens, if tensor ranks share it and it is not
    chunked."""
    return 4 * tokens * spec.vocabulary


@dataclass(frozen=True, eq=False, slots=True)
class Storage:
    """Memory of a tensor and its views; compared by identity."""

    bytes: int
    of_weight: bool = False
    number_bytes: int = 4
    """Bytes per element; 1 for masks."""

    @property
    def numbers(self) -> int:
        return self.bytes // self.number_bytes

    @property
    def packed_bytes(self) -> int:
        """Bytes when packed."""
        return -(-self.numbers // 8) if self.number_bytes == 1 else -(-self.numbers // GROUP) * (GROUP + 4)


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor of the traced forward pass."""

    storage: Storage
    gradient: bool
    """Whether the backward pass computes its gradient."""
    wide: bool = True
    """float32 in any precision, like the residual stream; otherwise the narrow dtype of matmul inputs."""


class Tape:
    """Records what autograd saves in one forward pass and its loss."""

    def __init__(
        self,
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
    ) -> None:
        parameters = spec.parameter_specs()
        self.trained = frozenset(parameters if trained is None else trained)
        self.rows, self.width, self.division = rows, spec.width, division
        self.tokens = rows * spec.sequence_length // division.context
        """Tokens in matmuls and attention."""
        self.stream_tokens = rows * spec.sequence_length // division.places
        """Tokens between matmuls."""
        self.saved: set[Storage] = set()
        """Saved unpacked."""
        self.packed: set[Storage] = set()
        """Saved packed."""
        self.blocks: list[BlockBytes] = []
        """Of recomputed blocks."""
        self.autocast = precision != "fp32"
        self.narrow = 2 if self.autocast else 4
        """Bytes per element of matmul inputs."""
        self.on_gpu = device == "cuda"
        self.recomputes_attention = recompute == "attention"
        self.attends_in_tiles = (
            device == "cpu" and precision == "bf16" and spec.sequence_length <= IN_TILES and division.context == 1
        )
        self._spec, self._activations, self._in_block = spec, activations, False
        self._wide = self.narrow if pure else 4
        """Bytes per element of the stream."""
        self._copies = self.autocast and not pure
        """Whether matmuls make narrow copies of their operands."""
        self._shapes = {
            name: tuple(
                side // division.tensor if dim == parameter.split.dimension and len(parameter.shape) > dim else side
                for dim, side in enumerate(parameter.shape)
            )
            for name, parameter in parameters.items()
        }
        self._shared: dict[str, Storage] = {}
        self._read: set[Storage] = set()
        layers = {"none": (), "attention": (), "full": range(spec.layers)}
        self._recomputed = layers[recompute] if isinstance(recompute, str) else recompute
        MODELS[spec.kind].saved(spec, self)

    def save(self, *storages: Storage) -> None:
        """Saves storages for the backward pass, packed if the setting says so."""
        for storage in storages:
            packs = self._in_block and storage not in self.saved and self._packs(storage)
            (self.packed if packs else self.saved).add(storage)

    def save_whole(self, *storages: Storage) -> None:
        """Saves storages, never packed."""
        self.saved.update(storages)

    def shared(self, name: str, storage: Storage) -> Storage:
        """The storage of this name, shared by all layers: `storage` at the first call."""
        return self._shared.setdefault(name, storage)

    def block_reads(self, *storages: Storage) -> None:
        """Storages that a block reads besides its input, and also when recomputed."""
        self._read.update(storages)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's part of a parameter."""
        return self._shapes[name]

    def numbers(self, count: int, *, width: int = 4) -> Storage:
        """Storage of `count` elements of `width` bytes."""
        return Storage(width * count, number_bytes=width)

    def new(self, features: int, *, gradient: bool, wide: bool = False) -> TracedTensor:
        """A tensor of `features` features per token of a matmul."""
        return TracedTensor(self.numbers(self.tokens * features, width=4 if wide else self.narrow), gradient, wide)

    def stream(self, *, gradient: bool, wide: bool = True) -> TracedTensor:
        """New hidden states."""
        width = self._wide if wide else self.narrow
        return TracedTensor(self.numbers(self.stream_tokens * self.width, width=width), gradient, wide)

    def widened(self, x: TracedTensor) -> TracedTensor:
        """Hidden states in the stream's dtype."""
        return self.stream(gradient=x.gradient) if self.autocast and not x.wide else x

    def embedding(self) -> TracedTensor:
        """Tables save the looked-up row indices, in int64."""
        tables = {"embedding.weight": self.tokens, "positions.weight": self.stream_tokens}
        tables = {name: tokens for name, tokens in tables.items() if name in self.trained}
        self.save(*(Storage(8 * tokens) for tokens in tables.values()))
        if "embedding.weight" in tables and self.division.tensor > 1:
            self.save(Storage(4 * self.tokens))  # which of the tokens this rank has
        return self.dropout(self.stream(gradient=bool(tables)))

    def block(self, layer: int, x: TracedTensor, run: Callable[[TracedTensor, str], TracedTensor]) -> TracedTensor:
        """Records the block of `layer` with `run`, or only its input if recomputed."""
        name = f"blocks.{layer}"
        if layer in self._recomputed:
            return self._block_recomputed(x, name, run)
        self._in_block = True
        y = run(x, name)
        self._in_block = False
        return y

    def _block_recomputed(
        self, x: TracedTensor, name: str, run: Callable[[TracedTensor, str], TracedTensor]
    ) -> TracedTensor:
        before, self.saved, self._read = self.saved, set(), set()
        y = run(x, name)
        saves = bool(self.saved)  # a bias gradient alone needs no saved tensors and no recompute
        inside, self.saved = self.saved - {x.storage} - self._read, before
        inner = sum(storage.bytes for storage in inside if not storage.of_weight)
        share = Storage(x.storage.bytes // self.division.tensor) if self.division.partition else x.storage
        copies = sum(storage.bytes for storage in inside if storage.of_weight)
        self.blocks.append(BlockBytes(share.bytes, inner, copies))
        if y.gradient and saves:
            self.save(share, *self._read)
        return y

    def dropout(self, x: TracedTensor) -> TracedTensor:
        """The mask takes one byte per feature."""
        if not self._spec.dropout:
            return x
        if x.gradient:
            self.save(self.numbers(self.stream_tokens * self.width, width=1))
        return self.stream(gradient=x.gradient, wide=x.wide)

    def entered(self, x: TracedTensor) -> TracedTensor:
        """The stream as input of a matmul: all positions, gathered."""
        gathers = self.division.sequence and self.division.tensor > 1
        return self.new(self.width, gradient=x.gradient, wide=x.wide) if gathers else x

    def left(self, y: TracedTensor) -> TracedTensor:
        """The matmul's output for the stream: partial sums of several ranks, reduced."""
        return self.stream(gradient=y.gradient, wide=y.wide) if self.division.tensor > 1 else y

    def linear(self, x: TracedTensor, name: str) -> TracedTensor:
        """A linear layer of a block, with its adapter."""
        y = self.matmul(x, f"{name}.weight", outputs=self._shapes[f"{name}.weight"][0])
        gradient = y.gradient or f"{name}.bias" in self.trained
        if f"{name}.lora_a" in self._shapes:
            inner = self.matmul(x, f"{name}.lora_a", outputs=self._spec.lora_rank)
            added = self.matmul(inner, f"{name}.lora_b", outputs=self._shapes[f"{name}.lora_b"][0])
            return replace(added, gradient=gradient or added.gradient)
        return replace(y, gradient=gradient)

    def matmul(self, x: TracedTensor, name: str, *, outputs: int) -> TracedTensor:
        """A matmul saves its input for the gradient of the matrix, and the matrix for that of the input; under autocast
        each saves narrow copies of its own."""
        if name in self.trained:
            inputs = self._shapes[name][1]
            copied = x.wide and self._copies
            self.save(self.numbers(self.tokens * inputs, width=2) if copied else x.storage)
        if x.gradient and self._copies:
            self.save(Storage(2 * prod(self._shapes[name]), of_weight=True))
        return self.new(outputs, gradient=x.gradient or name in self.trained)

    def head(self, x: TracedTensor, name: str) -> None:
        """The loss with the head of this name: gradients of hidden states and head, computed in the forward pass
        (model/loss.py); with a shared vocabulary also targets, log-sum-exps, and which rank has each target."""
        if self.division.tensor > 1:
            self.matmul(self.entered(x), name, outputs=self._shapes[name][0])
            self.save(Storage((8 + 4 + 1) * self.tokens))
            return
        if x.gradient:
            self.save(Storage(self.narrow * self.tokens * self.width))
        if name in self.trained:
            self.save(Storage(4 * prod(self._shapes[name])))

    def head_norm(self, x: TracedTensor, name: str, heads: int, size: int) -> TracedTensor:
        """The norm of queries or keys, per head."""
        if x.gradient and self._copies:
            self.save(Storage(2 * size, of_weight=True))
        copied = self.autocast and not x.wide
        wide = self.new(heads * size, gradient=x.gradient, wide=True) if copied else x
        weight = name in self.trained
        self.save_norm(wide, weight=weight, tokens=self.tokens, features=heads * size, means=heads)
        return self.new(heads * size, gradient=x.gradient or weight)

    def save_norm(self, x: TracedTensor, *, weight: bool, tokens: int, features: int, means: int) -> None:
        """Unfused, as on a CPU: input and means for the input's gradient, normalized input for the weight's."""
        if x.gradient:
            self.save(x.storage, Storage(4 * tokens * means))
        if weight:
            self.save(Storage(4 * tokens * features))

    def _packs(self, storage: Storage) -> bool:
        if storage.of_weight or storage.numbers <= self.stream_tokens * self.width // SMALL_SHARE:
            return False
        return self._activations == "8-bit" or (self._activations == "packed" and storage.number_bytes == 1)
