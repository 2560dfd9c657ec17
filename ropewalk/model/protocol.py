"""The interface of a model to the rest of the package: stages that map tensors to tensors, a loss, ways to split it.

A pipeline stage and a whole model are the same class: a `ModelStage` of some layers, with or without the start of the
model (embeddings) and its end (final norm, head). `parallel`, `train` and `evaluate` use no other class. A kind's
components declare how its parameters may be split (model/component.py).
Shapes: B sequences, T tokens, V vocabulary, N = B T.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ropewalk.base.errors import UserError

from .attend import Attend, attend_for
from .components import MODELS, made
from .dropout import Dropout
from .init import initialize
from .loss import token_scores, weighted_loss
from .modules import Linear
from .sharding import whole_name
from .slot_cache import SlotPositions
from .spec import Spec

RunBlock = Callable[[Any, Tensor, Callable[[Any, Tensor], Tensor]], Tensor]
"""Runs a block by calling the last argument on its input; may recompute it, or offload what it saves."""


def run_plainly(block: nn.Module, x: Tensor, forward: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """Runs the block once, without recompute."""
    return forward(block, x)


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor passed from one stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """None: the weights' dtype, as for hidden states."""
    has_gradient: bool = True
    """Whether the backward pass returns its gradient; false for masks or token numbers."""


class Edges(NamedTuple):
    """Tensors that a stage receives from the previous stage and sends to the next, in order."""

    inputs: tuple[Edge, ...]
    """Empty for the first stage, which reads tokens."""
    outputs: tuple[Edge, ...]
    """Empty for the last stage, whose outputs go into the loss."""


class Losses:
    """Auxiliary losses that layers report during a forward pass; the step adds them to the main loss.

    A value is a sum over the tokens of the microbatch, like the main loss: the step divides both by the number of
    counted tokens in the global batch. Reporting the same name and layer twice replaces the value, so that a block that
    runs twice counts once.
    """

    def __init__(self) -> None:
        self._terms: dict[tuple[str, int], tuple[Tensor, float]] = {}
        self._closed = False

    def add(self, name: str, value: Tensor, *, layer: int, coefficient: float) -> None:
        """Reports `value`, a scalar with gradient. Ignored after `total`, when the backward pass recomputes blocks."""
        if not self._closed:
            self._terms[name, layer] = (value, coefficient)

    def values(self) -> dict[str, Tensor]:
        """Sum of each loss over layers, by name, without coefficients or gradients, for metrics."""
        found: dict[str, Tensor] = {}
        for (name, _), (value, _) in self._terms.items():
            found[name] = found[name] + value.detach() if name in found else value.detach()
        return found

    def total(self) -> Tensor | None:
        """The weighted sum of all values; None if no layer reported any. Ends the collection."""
        self._closed = True
        terms = [value * coefficient for value, coefficient in self._terms.values()]
        return torch.stack([term.reshape(()) for term in terms]).sum() if terms else None


class MakeAttend(Protocol):
    """Chooses the attention implementation of a forward pass: one device, across ranks, by kernel."""

    def __call__(self, spec: Spec, *, documents_BT: Tensor | None) -> Attend:
        """Attention over whole sequences with these documents."""


class Cache(Protocol):
    """A model's cache of past tokens, for generation: slots for sequences of different lengths."""

    @property
    def room(self) -> int:
        """The most `keys` of a forward pass."""

    def begin(self, at: SlotPositions) -> None:
        """The next forward pass adds tokens at these positions."""

    def copy(self, sources: Sequence[int], targets: Sequence[int], *, tokens: int) -> None:
        """Copies the first `tokens` tokens of slots; a slot may be a source and a target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPass:
    """Inputs of a microbatch's forward pass that every stage may read besides its edges."""

    tokens_BT: Tensor
    """This rank's positions of each sequence."""
    positions_BT: Tensor | None = None
    """None: they count from 0."""
    documents_BT: Tensor | None = None
    """Document numbers over whole sequences, all ranks' positions."""
    attention: MakeAttend = attend_for
    cache: Cache | None = None
    """From `ModelStage.cache`, in generation, after its `begin`: `tokens_BT` then has only the new tokens."""
    dropout: Dropout | None = None
    """None: no dropout."""
    losses: Losses | None = None
    """Collects auxiliary losses; None outside training."""


class SplitVocabulary(Protocol):
    """Vocabulary-parallel loss: no rank has all logits of a token."""

    def losses(self, hidden: Tensor, head_VC: Tensor, targets_BT: Tensor) -> Tensor:
        """Negative log-probability of each target, B T."""

    def scores(self, hidden: Tensor, head_VC: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability of each target, whether it is the argmax), B T each, without gradients."""


class ModelStage(nn.Module, abc.ABC):
    """Some layers of a model, built as `kind(spec, layers=..., first=..., last=...)`, often on torch's `meta`."""

    spec: Spec
    first: bool
    """Whether the stage reads tokens."""
    last: bool
    """Whether the stage computes the loss."""
    blocks: nn.ModuleDict
    """Layers by number; each has the attribute `layer`. Recompute, ZeRO-3 and compilation act per block."""
    run_block: RunBlock
    """Called by `run` for every block."""

    @abc.abstractmethod
    def edges(self, sequences: int, positions: int) -> Edges:
        """Tensors from and to other stages, for a microbatch of which this rank has `positions` positions."""

    @abc.abstractmethod
    def run(self, inputs: tuple[Tensor, ...], forward: ForwardPass) -> tuple[Tensor, ...]:
        """The stage's outputs. `inputs` are those of `edges`; the first stage gets none."""

    @abc.abstractmethod
    def loss(
        self,
        outputs: tuple[Tensor, ...],
        targets_BT: Tensor,
        weights_BT: Tensor,
        *,
        vocabulary: SplitVocabulary | None = None,
        each_N: Tensor | None = None,
    ) -> Tensor:
        """Sum over tokens of weight times negative log-probability of the target; `each_N` receives the terms.
        Requires the last stage."""

    @abc.abstractmethod
    def scores(
        self, outputs: tuple[Tensor, ...], targets_BT: Tensor, *, vocabulary: SplitVocabulary | None = None
    ) -> tuple[Tensor, Tensor]:
        """(log-probability of each target, whether it is the argmax), B T each, without gradients. Requires the last
        stage."""

    @abc.abstractmethod
    def next_logits(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """Logits B V (this rank's part of V) of the token after the last one. Requires the last stage."""

    def cache(self, *, slots: int, room: int, first_head: int = 0) -> Cache | None:
        """An empty cache for `slots` sequences of at most `room` tokens; None if every pass needs all tokens so far.
        `first_head` is the first head of this rank."""
        return None

    def linears(self) -> dict[str, Linear]:
        """Linear layers of the blocks by full name, for tensor parallelism, kernel choice, FP8 matmuls and deferred
        weight gradients."""
        return {f"blocks.{name}": m for name, m in self.blocks.named_modules() if isinstance(m, Linear)}

    def split_over_ranks(
        self, *, look_up: Callable[[nn.Embedding, Tensor], Tensor], keep: Callable[[Tensor], Tensor] | None
    ) -> None:
        """Prepares a stage whose parameters are sharded along the tensor axis: `look_up` embeds tokens with a part of
        the embedding. With `keep`, which takes this rank's part of T B, hidden states are T B C."""
        raise UserError(f"{type(self).__name__} cannot be split over tensor ranks; set `parallel.tensor` to 1")

    def compile_blocks(self, compile: Callable[[Any], Any]) -> None:
        """Replaces the blocks' forward methods by their `compile` results; hooks stay uncompiled."""
        for block in self.blocks.values():
            block.forward = compile(block.forward)


class LanguageModel(ModelStage):
    """A stack of blocks over one residual stream, from an embedding to a head: the common base of language models.

    Subclasses build and run their blocks. The loss is a function of hidden states and `head_weight` (model/loss.py), so
    that it can be chunked or split by vocabulary.
    """

    def __init__(
        self, spec: Spec, *, layers: Iterable[int] | None = None, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.spec, self.first, self.last = spec, first, last
        self.run_block: RunBlock = run_plainly
        self.look_up: Callable[[nn.Embedding, Tensor], Tensor] | None = None
        """Embeds tokens when ranks share the embedding."""
        self.embedding = make_table(spec.vocabulary, spec.width) if first else None
        self.make_blocks(range(spec.layers) if layers is None else layers)
        # A separate last stage keeps a copy of the tied weight; `parallel` sums the two gradients.
        own_head = last and not (spec.tie_embeddings and first)
        self.head = nn.Linear(spec.width, spec.vocabulary, bias=False) if own_head else None

    @abc.abstractmethod
    def make_blocks(self, layers: Iterable[int]) -> None:
        """Sets `blocks`, and other modules between embedding and head."""

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeds tokens. Requires the first stage."""
        assert self.embedding is not None
        return self.look_up(self.embedding, tokens) if self.look_up else self.embedding(tokens)

    def edges(self, sequences: int, positions: int) -> Edges:
        hidden = (Edge((sequences, positions, self.spec.width)),)
        return Edges(() if self.first else hidden, () if self.last else hidden)

    def loss(
        self,
        outputs: tuple[Tensor, ...],
        targets_BT: Tensor,
        weights_BT: Tensor,
        *,
        vocabulary: SplitVocabulary | None = None,
        each_N: Tensor | None = None,
    ) -> Tensor:
        (hidden_BTC,), weights_N = outputs, weights_BT.flatten()
        if vocabulary is None:
            hidden_NC = hidden_BTC.flatten(0, 1)
            return weighted_loss(hidden_NC, self.head_weight, targets_BT.flatten(), weights_N, each_N=each_N)
        losses_N = vocabulary.losses(hidden_BTC, self.head_weight, targets_BT).flatten()
        losses_N = losses_N * weights_N.to(losses_N.dtype)
        if each_N is not None:
            each_N.copy_(losses_N.detach())
        return losses_N.sum()

    def scores(
        self, outputs: tuple[Tensor, ...], targets_BT: Tensor, *, vocabulary: SplitVocabulary | None = None
    ) -> tuple[Tensor, Tensor]:
        (hidden_BTC,) = outputs
        if vocabulary is not None:
            return vocabulary.scores(hidden_BTC, self.head_weight, targets_BT)
        score_N, choice_N = token_scores(hidden_BTC.flatten(0, 1), self.head_weight, targets_BT.flatten())
        return score_N.view(targets_BT.shape), choice_N.view(targets_BT.shape)

    def next_logits(self, outputs: tuple[Tensor, ...]) -> Tensor:
        return self.logits(outputs[0][:, -1:]).squeeze(1)

    def split_over_ranks(
        self, *, look_up: Callable[[nn.Embedding, Tensor], Tensor], keep: Callable[[Tensor], Tensor] | None
    ) -> None:
        assert keep is None, "the kind says that its positions cannot be split"
        self.look_up = look_up

    @property
    def head_weight(self) -> Tensor:
        owner = self.embedding if self.head is None else self.head
        assert owner is not None, "this stage has no head"
        return owner.weight

    def logits(self, hidden_BTC: Tensor) -> Tensor:
        """Logits of the next token at each position, B T V."""
        return nn.functional.linear(hidden_BTC, self.head_weight)


def make_table(rows: int, width: int) -> nn.Embedding:
    """An embedding table without initial values, which model/init.py sets: torch's initialization on the device `meta`
    would import its compiler, which takes a second and only training needs."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def build_stage(
    spec: Spec, *, layers: Iterable[int] | None = None, first: bool = True, last: bool = True
) -> ModelStage:
    """A stage with uninitialized parameters on torch's default device; the whole model without `layers`. Under
    `torch.device("meta")` it allocates no memory."""
    stage: ModelStage = made(MODELS[spec.kind], spec.kind_settings)(spec, layers=layers, first=first, last=last)
    shapes = spec.shapes()
    for name, parameter in stage.named_parameters():
        declared = shapes.get(whole_name(name, spec))
        if declared != tuple(parameter.shape):
            found = f"parameter `{name}` has shape {tuple(parameter.shape)}"
            wanted = "does not declare it" if declared is None else f"declares {tuple(declared)}"
            raise UserError(f"model `{spec.kind}`: {found}, but its component {wanted}; correct one of them")
    return stage


def build_model(
    spec: Spec, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> ModelStage:
    """A whole initialized model on `device`."""
    with torch.device("meta"):
        model = build_stage(spec)
    model = model.to(dtype).to_empty(device=device)
    initialize(model, spec, seed=seed)
    return model
