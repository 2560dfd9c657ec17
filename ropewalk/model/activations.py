"""What the backward pass will need: bytes that autograd saves during a forward pass in eager mode. No torch.

A forward pass over sizes in place of tensors: each component (model/components.py) records on a `Tape` what the
gradients that will be asked for need, and a storage that several save counts once. A test compares with the storages
that autograd really saves on a CPU. On a GPU there are the kernels of model/kernels, which save less; another test has
the peaks of whole steps that were measured there.

What is recomputed in the backward pass (`Recompute`) and what several ranks share (`Division`) is left out; what blocks
keep in fewer bits (`Activations`) counts as these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Required, TypedDict, Unpack

from .components import MODELS
from .spec import Spec

Precision = Literal["fp32", "bf16", "fp16"]
"""Of matmuls."""
Device = Literal["cpu", "cuda"]
Recompute = Literal["none", "attention", "full"] | frozenset[int]
"""What is recomputed: nothing, the inside of attention, all blocks, or the blocks of these layers."""
Activations = Literal["whole", "packed", "8-bit"]
"""How blocks keep tensors: as they are, masks as bits, or also the inputs of linear layers, norms and activation
functions as bytes (parallel/memory/activation_packing.py)."""
GROUP = 256
"""Numbers of a byte that share a scale, a float32."""
IN_TILES = 1024
"""Tokens of the longest sequences whose attention in bfloat16 on a CPU goes through model/cpu_attention.py, which saves
nothing but queries, keys and values. In longer ones torch's kernel is as quick."""
SMALL_SHARE = 2
"""Tensors of at most 1 / 2 as many numbers as the input of the block stay as they are: rotations are never larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Ranks that share the activations of a sequence; degrees must divide what they split."""

    tensor: int = 1
    """Ranks that share every matmul, by heads and hidden features."""
    sequence: bool = False
    """Whether these also share what lies between the matmuls, by positions of the sequence."""
    context: int = 1
    """Ranks that share every sequence, by its positions; masks are then made piece by piece and not kept."""
    partition: bool = False
    """Whether `tensor` ranks share the inputs of blocks that are recomputed (ZeRO-R)."""

    @property
    def places(self) -> int:
        """Ranks over which the positions of the stream between the matmuls are dealt."""
        return self.context * (self.tensor if self.sequence else 1)


WHOLE = Division()


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """What one block saves."""

    input: int
    """Of its input, which it also saves when it is recomputed."""
    inner: int
    """Of what is computed inside and goes when it is recomputed."""
    copies: int = 0
    """Of narrow copies of weights: autocast holds them until the forward pass ends, recomputed or not."""


class Pass(TypedDict, total=False):
    """A forward pass whose saved bytes are counted."""

    rows: Required[int]
    """Full sequences."""
    precision: Required[Precision]
    trained: Collection[str] | None
    """The parameters that get a gradient; None: all."""
    recompute: Recompute
    """Blocks that are recomputed also count rotations and masks, which they will use."""
    division: Division
    activations: Activations
    device: Device
    pure: bool
    """Whether weights and stream are as narrow as the inputs of matmuls."""


def saved_bytes(spec: Spec, **of: Unpack[Pass]) -> int:
    """Bytes saved after a forward pass and its loss: all but weights and logits."""
    tape = Tape(spec, **of)
    return sum(saved.bytes for saved in tape.saved) + sum(saved.packed_bytes for saved in tape.packed)


def block_bytes(spec: Spec, **of: Unpack[Pass]) -> tuple[BlockBytes, ...]:
    """What each block saves, where it is not or where it is recomputed."""
    of["recompute"] = "full"
    return tuple(Tape(spec, **of).blocks)


def saved_logit_bytes(spec: Spec, *, tokens: int) -> int:
    """Bytes of the log-probabilities that the loss of `tokens` tokens saves where tensor ranks share it and it is not
    cut into chunks."""
    return 4 * tokens * spec.vocabulary


@dataclass(frozen=True, eq=False, slots=True)
class Storage:
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
class TracedTensor:
    """A tensor of the forward pass."""

    storage: Storage
    gradient: bool
    """Whether the backward pass computes its gradient."""
    wide: bool = True
    """float32 in any precision, as the residual stream; else as narrow as the inputs of matmuls."""


class Tape:
    """One forward pass and its loss, recorded: what autograd has saved."""

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
        """Of the matmuls and of attention."""
        self.stream_tokens = rows * spec.sequence_length // division.places
        """Of all that lies between."""
        self.saved: set[Storage] = set()
        """As they are."""
        self.packed: set[Storage] = set()
        """In fewer bits."""
        self.blocks: list[BlockBytes] = []
        """Of those that are recomputed."""
        self.autocast = precision != "fp32"
        self.narrow = 2 if self.autocast else 4
        """Bytes of a number in the inputs of matmuls."""
        self.on_gpu = device == "cuda"
        self.recomputes_attention = recompute == "attention"
        self.attends_in_tiles = (
            device == "cpu" and precision == "bf16" and spec.sequence_length <= IN_TILES and division.context == 1
        )
        self._spec, self._activations, self._in_block = spec, activations, False
        self._wide = self.narrow if pure else 4
        """Bytes of a number of the stream."""
        self._copies = self.autocast and not pure
        """Whether matmuls have narrow copies of what they multiply."""
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
        """Saves what the backward pass will need, in as many bits as the setting says."""
        for storage in storages:
            packs = self._in_block and storage not in self.saved and self._packs(storage)
            (self.packed if packs else self.saved).add(storage)

    def save_whole(self, *storages: Storage) -> None:
        """The same, never packed."""
        self.saved.update(storages)

    def shared(self, name: str, storage: Storage) -> Storage:
        """The one storage of this name that all layers share: `storage` at the first call."""
        return self._shared.setdefault(name, storage)

    def block_reads(self, *storages: Storage) -> None:
        """What a block reads beside its input, and needs again when it is recomputed."""
        self._read.update(storages)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's part of a parameter."""
        return self._shapes[name]

    def numbers(self, count: int, *, width: int = 4) -> Storage:
        """Memory of `count` numbers of `width` bytes."""
        return Storage(width * count, number_bytes=width)

    def new(self, features: int, *, gradient: bool, wide: bool = False) -> TracedTensor:
        """A tensor of so many features of each token that matmuls meet."""
        return TracedTensor(self.numbers(self.tokens * features, width=4 if wide else self.narrow), gradient, wide)

    def stream(self, *, gradient: bool, wide: bool = True) -> TracedTensor:
        """New hidden states."""
        width = self._wide if wide else self.narrow
        return TracedTensor(self.numbers(self.stream_tokens * self.width, width=width), gradient, wide)

    def widened(self, x: TracedTensor) -> TracedTensor:
        """Hidden states in the type of the stream."""
        return self.stream(gradient=x.gradient) if self.autocast and not x.wide else x

    def embedding(self) -> TracedTensor:
        """Tables keep the numbers of the rows that were looked up, in int64."""
        tables = {"embedding.weight": self.tokens, "positions.weight": self.stream_tokens}
        tables = {name: tokens for name, tokens in tables.items() if name in self.trained}
        self.save(*(Storage(8 * tokens) for tokens in tables.values()))
        if "embedding.weight" in tables and self.division.tensor > 1:
            self.save(Storage(4 * self.tokens))  # which of them this rank has
        return self.dropout(self.stream(gradient=bool(tables)))

    def block(self, layer: int, x: TracedTensor, run: Callable[[TracedTensor, str], TracedTensor]) -> TracedTensor:
        """The block of `layer`, which `run` records: what it computes, or its input where it is recomputed."""
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
        saves = bool(self.saved)  # the gradient of a bias alone needs nothing, and nothing is recomputed for it
        inside, self.saved = self.saved - {x.storage} - self._read, before
        inner = sum(storage.bytes for storage in inside if not storage.of_weight)
        share = Storage(x.storage.bytes // self.division.tensor) if self.division.partition else x.storage
        copies = sum(storage.bytes for storage in inside if storage.of_weight)
        self.blocks.append(BlockBytes(share.bytes, inner, copies))
        if y.gradient and saves:
            self.save(share, *self._read)
        return y

    def dropout(self, x: TracedTensor) -> TracedTensor:
        """The mask takes a byte per feature."""
        if not self._spec.dropout:
            return x
        if x.gradient:
            self.save(self.numbers(self.stream_tokens * self.width, width=1))
        return self.stream(gradient=x.gradient, wide=x.wide)

    def entered(self, x: TracedTensor) -> TracedTensor:
        """The stream as a matmul meets it: all positions of it, gathered."""
        gathers = self.division.sequence and self.division.tensor > 1
        return self.new(self.width, gradient=x.gradient, wide=x.wide) if gathers else x

    def left(self, y: TracedTensor) -> TracedTensor:
        """What a matmul leaves to the stream: partial sums of several ranks, added up."""
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
        """A matrix saves its input for its own gradient, and itself for that of the input. Both are narrow copies under
        autocast, each matmul has its own."""
        if name in self.trained:
            inputs = self._shapes[name][1]
            copied = x.wide and self._copies
            self.save(self.numbers(self.tokens * inputs, width=2) if copied else x.storage)
        if x.gradient and self._copies:
            self.save(Storage(2 * prod(self._shapes[name]), of_weight=True))
        return self.new(outputs, gradient=x.gradient or name in self.trained)

    def head(self, x: TracedTensor, name: str) -> None:
        """The loss with the head of this name: the gradients by hidden states and head, which are made in the forward
        pass (model/loss.py); where ranks share the vocabulary, targets, the logarithm of each sum, and who has the
        target."""
        if self.division.tensor > 1:
            self.matmul(self.entered(x), name, outputs=self._shapes[name][0])
            self.save(Storage((8 + 4 + 1) * self.tokens))
            return
        if x.gradient:
            self.save(Storage(self.narrow * self.tokens * self.width))
        if name in self.trained:
            self.save(Storage(4 * prod(self._shapes[name])))

    def head_norm(self, x: TracedTensor, name: str, heads: int, size: int) -> TracedTensor:
        """The norm of queries or keys, head by head."""
        if x.gradient and self._copies:
            self.save(Storage(2 * size, of_weight=True))
        copied = self.autocast and not x.wide
        wide = self.new(heads * size, gradient=x.gradient, wide=True) if copied else x
        weight = name in self.trained
        self.save_norm(wide, weight=weight, tokens=self.tokens, features=heads * size, means=heads)
        return self.new(heads * size, gradient=x.gradient or weight)

    def save_norm(self, x: TracedTensor, *, weight: bool, tokens: int, features: int, means: int) -> None:
        """Unfused, as on a CPU: the input and its means for its gradient, the normalised input for the weight's."""
        if x.gradient:
            self.save(x.storage, Storage(4 * tokens * means))
        if weight:
            self.save(Storage(4 * tokens * features))

    def _packs(self, storage: Storage) -> bool:
        if storage.of_weight or storage.numbers <= self.stream_tokens * self.width // SMALL_SHARE:
            return False
        return self._activations == "8-bit" or (self._activations == "packed" and storage.number_bytes == 1)
