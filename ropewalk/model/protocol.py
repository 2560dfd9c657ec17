"""A model as the rest of the package sees it: stages that consume and produce tensors, a loss, and seams to split it.

A pipeline stage and a whole model are the same class: a `ModelStage` of some layers, which may hold the first part of
the model (embeddings), the last (final norm, head), both or neither. `parallel`, `train` and `evaluate` know no other
class. A kind's components declare how its parameters may be split (model/component.py).

Shapes: B sequences, T tokens, V vocabulary, N = B T.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .attend import Attend, attend_for
from .components import MODELS, made
from .dropout import Dropout
from .init import initialize
from .loss import token_scores, weighted_loss
from .modules import Linear
from .spec import Spec

RunBlock = Callable[[Any, Tensor, Callable[[Any, Tensor], Tensor]], Tensor]
"""Runs a block on its input by calling the function given last; may recompute it, or store elsewhere what it saves."""


def run_plainly(block: nn.Module, x: Tensor, forward: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """Once, nothing recomputed."""
    return forward(block, x)


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that one stage hands to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """None: that of the weights, as hidden states have."""
    has_gradient: bool = True
    """Whether the backward pass returns its gradient; not for masks or token numbers."""


class Edges(NamedTuple):
    """What a stage receives from the stage before it and hands to the stage after it, in order."""

    inputs: tuple[Edge, ...]
    """Empty for the first stage, which reads tokens."""
    outputs: tuple[Edge, ...]
    """Empty for the last stage, whose outputs go into the loss."""


class Losses:
    """Auxiliary losses that layers report during a forward pass; the step adds them to the main loss.

    A value is a sum over the tokens of the microbatch, as the main loss is: the step divides both by the number of
    tokens that count in the global batch. Reporting again under the same name and layer replaces the value, so that a
    block that is run twice counts once.
    """

    def __init__(self) -> None:
        self._terms: dict[tuple[str, int], tuple[Tensor, float]] = {}
        self._closed = False

    def add(self, name: str, value: Tensor, *, layer: int, coefficient: float) -> None:
        """`value` is a number with a gradient. Ignored after `total`: blocks are recomputed in the backward pass."""
        if not self._closed:
            self._terms[name, layer] = (value, coefficient)

    def values(self) -> dict[str, Tensor]:
        """The sum over layers of each loss by name, without coefficients or gradients, for metrics."""
        found: dict[str, Tensor] = {}
        for (name, _), (value, _) in self._terms.items():
            found[name] = found[name] + value.detach() if name in found else value.detach()
        return found

    def total(self) -> Tensor | None:
        """The sum of values times coefficients; None when no layer reported any. Ends the collection."""
        self._closed = True
        terms = [value * coefficient for value, coefficient in self._terms.values()]
        return torch.stack([term.reshape(()) for term in terms]).sum() if terms else None


class MakeAttend(Protocol):
    """How attention is computed in a forward pass: on one device, across ranks, by which kernel."""

    def __call__(self, spec: Spec, *, documents_BT: Tensor | None) -> Attend:
        """Attention over whole sequences with these documents."""


class Cache(Protocol):
    """What a model remembers of the tokens it has seen, for generation."""

    seen: int
    """Tokens per sequence in the cache."""

    def advance(self, tokens: int) -> None:
        """The last forward pass brought `tokens` new tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPass:
    """A microbatch's forward pass: what every stage may read beside its inputs."""

    tokens_BT: Tensor
    """The positions of each sequence that this rank works on."""
    positions_BT: Tensor | None = None
    """None: they count from 0."""
    documents_BT: Tensor | None = None
    """Document numbers over whole sequences, all ranks' positions."""
    attention: MakeAttend = attend_for
    cache: Cache | None = None
    """In generation, made by `ModelStage.cache`: `tokens_BT` are then the new tokens only."""
    dropout: Dropout | None = None
    """None: nothing is dropped."""
    losses: Losses | None = None
    """Collects auxiliary losses; None outside of training."""


class SplitVocabulary(Protocol):
    """The losses where ranks share the vocabulary: no rank has all logits of a token."""

    def losses(self, hidden: Tensor, head_VC: Tensor, targets_BT: Tensor) -> Tensor:
        """The negative log-probability of each target, B T."""

    def scores(self, hidden: Tensor, head_VC: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability of each target, whether it is the first choice), B T each, without gradients."""


class ModelStage(nn.Module, abc.ABC):
    """Some layers of a model, built as `kind(spec, layers=..., first=..., last=...)`, often on torch's `meta`."""

    spec: Spec
    first: bool
    """Whether the stage reads tokens."""
    last: bool
    """Whether the stage ends in the loss."""
    blocks: nn.ModuleDict
    """The layers by number; each has the attribute `layer`. Recompute, ZeRO-3 and compilation act per block."""
    run_block: RunBlock
    """`run` calls it for every block."""

    @abc.abstractmethod
    def edges(self, sequences: int, positions: int) -> Edges:
        """The tensors to and from other stages, for a microbatch of which this rank holds `positions` positions."""

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
        """The sum over tokens of weight times negative log-probability of the target; `each_N` receives the terms.
        Needs the last stage."""

    @abc.abstractmethod
    def scores(
        self, outputs: tuple[Tensor, ...], targets_BT: Tensor, *, vocabulary: SplitVocabulary | None = None
    ) -> tuple[Tensor, Tensor]:
        """(log-probability of each target, whether it is the first choice), B T each, without gradients. Needs the last
        stage."""

    @abc.abstractmethod
    def next_logits(self, outputs: tuple[Tensor, ...]) -> Tensor:
        """Logits B V (the part of V that this rank holds) of the token after the last one. Needs the last stage."""

    def cache(self, *, room: int, first_head: int = 0) -> Cache | None:
        """An empty cache for sequences of at most `room` tokens; None: every pass needs all tokens so far."""
        return None

    def linears(self) -> dict[str, Linear]:
        """The linear layers of the blocks by full name: what tensor parallelism, kernel choice, 8-bit matmuls and
        deferred weight gradients act on."""
        return {f"blocks.{name}": m for name, m in self.blocks.named_modules() if isinstance(m, Linear)}

    @property
    def head_weight(self) -> Tensor:
        """The matrix V C that turns hidden states into logits. Needs the last stage."""
        raise NotImplementedError(f"{type(self).__name__} has no head")

    def split_over_ranks(
        self, *, look_up: Callable[[nn.Embedding, Tensor], Tensor], keep: Callable[[Tensor], Tensor] | None
    ) -> None:
        """Prepares a stage whose parameters were cut along the tensor axis: `look_up` finds the vectors of tokens in
        a part of the embedding. With `keep`, which takes this rank's part of T B, hidden states are T B C."""
        raise NotImplementedError(f"{type(self).__name__} declares no tensor splits")

    def compile_blocks(self, compile: Callable[[Any], Any]) -> None:
        """Replaces the forward methods of the blocks by `compile` of them; hooks stay outside."""
        for block in self.blocks.values():
            block.forward = compile(block.forward)


class LanguageModel(ModelStage):
    """A stack of blocks over one stream of hidden states, from an embedding to a head: what language models share.

    Subclasses make their blocks and run them. The loss is a function of hidden states and `head_weight`
    (model/loss.py), so that it can be chunked or split by vocabulary.
    """

    def __init__(
        self, spec: Spec, *, layers: Iterable[int] | None = None, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.spec, self.first, self.last = spec, first, last
        self.run_block: RunBlock = run_plainly
        self.look_up: Callable[[nn.Embedding, Tensor], Tensor] | None = None
        """Looks tokens up where ranks share the embedding."""
        self.embedding = make_table(spec.vocabulary, spec.width) if first else None
        self.make_blocks(range(spec.layers) if layers is None else layers)
        # A last stage of its own keeps a copy of the tied weight; `parallel` adds up the two gradients.
        own_head = last and not (spec.tie_embeddings and first)
        self.head = nn.Linear(spec.width, spec.vocabulary, bias=False) if own_head else None

    @abc.abstractmethod
    def make_blocks(self, layers: Iterable[int]) -> None:
        """Sets `blocks`, and what else lies between embedding and head."""

    def embedded(self, tokens: Tensor) -> Tensor:
        """The vectors of tokens. Needs the first stage."""
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
        """Scores of every next token, B T V."""
        return nn.functional.linear(hidden_BTC, self.head_weight)


def make_table(rows: int, width: int) -> nn.Embedding:
    """Vectors to look up. Their first values are model/init.py's: torch's own, on the device `meta`, would import its
    compiler, which takes a second and which only training needs."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def build_stage(
    spec: Spec, *, layers: Iterable[int] | None = None, first: bool = True, last: bool = True
) -> ModelStage:
    """A stage with uninitialised parameters on torch's default device; the whole model without `layers`. Under
    `torch.device("meta")` it takes no memory."""
    stage: ModelStage = made(MODELS[spec.kind], spec.kind_settings)(spec, layers=layers, first=first, last=last)
    return stage


def build_model(
    spec: Spec, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> ModelStage:
    """A whole initialised model on `device`."""
    with torch.device("meta"):
        model = build_stage(spec)
    model = model.to(dtype).to_empty(device=device)
    initialize(model, spec, seed=seed)
    return model
