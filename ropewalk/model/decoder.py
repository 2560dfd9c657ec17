"""The decoder: embedding, blocks, final norm, head. Any of them may be absent: a pipeline stage is the same class."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .attend import Attend, CachedAttend, attend_for
from .components import POSITIONS, made
from .dropout import Dropout
from .init import initialize
from .loss import token_scores, weighted_loss
from .modules import Block, make_norm
from .positions import Rotation
from .protocol import Edge, Edges, ForwardPass, ModelStage, RunBlock, SplitVocabulary, run_plainly
from .spec import Spec


class Decoder(ModelStage):
    """A decoder-only transformer: tokens (or the hidden states of the stage before) -> hidden states.

    The loss is a function of hidden states and `head_weight` (model/loss.py), so that it can be chunked or split by
    vocabulary.
    """

    def __init__(
        self, spec: Spec, *, layers: Iterable[int] | None = None, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.spec, self.first, self.last = spec, first, last
        self.embedding = _table(spec.vocabulary, spec.width) if first else None
        position = POSITIONS[spec.position]
        function = made(position, spec.position_settings) if position.how in ("rotate", "add") else None
        self.rotation: Callable[..., Rotation] | None = function if position.how == "rotate" else None
        self.add_positions: Callable[[Tensor, Tensor, Spec], Tensor] | None = (
            function if position.how == "add" else None
        )
        learned = spec.learned_positions if first else 0
        self.positions = _table(learned, spec.width) if learned else None
        self.embed: Callable[[Tensor], Tensor] | None = None
        """Looks tokens up where the embedding is split over devices."""
        self.keep: Callable[[Tensor], Tensor] | None = None
        """Of T B, the positions that this device works on where they are split too."""
        self.positions_first = False
        """Whether hidden states are T B C rather than B T C, inside and between stages; `set_positions_first`."""
        owned = range(spec.layers) if layers is None else layers
        self.blocks = nn.ModuleDict({str(layer): Block(spec, layer) for layer in owned})
        self.norm = make_norm(spec) if last and spec.norm_position != "post" else None
        # A last stage of its own keeps a copy of the tied weight; `parallel` adds up the two gradients.
        own_head = last and not (spec.tie_embeddings and first)
        self.run_block: RunBlock = run_plainly
        self.head = nn.Linear(spec.width, spec.vocabulary, bias=False) if own_head else None

    def forward(
        self,
        x: Tensor,
        *,
        positions_BT: Tensor | None = None,
        attend: Attend | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Hidden states B T C, or T B C with `positions_first`, of tokens B T (or of hidden states, without an
        embedding).

        Positions count from 0 unless given; `attend` is the spec's own over whole rows of one document unless given;
        nothing is dropped unless `dropout` is given.
        """
        if positions_BT is None:
            positions_BT = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        attend = attend or attend_for(self.spec)
        if self.embedding is not None:
            x = self.lookup(x, positions_BT)
            x = x if dropout is None else dropout(x, site="embedding")
        turn = None
        if self.rotation is not None:
            wide = torch.promote_types(x.dtype, torch.float32)
            turn = self.rotation(positions_BT.t() if self.positions_first else positions_BT, self.spec, dtype=wide)

        def forward(block: Block, x: Tensor) -> Tensor:
            return block(x, turn=turn, attend=attend, dropout=dropout.at(block.layer) if dropout else None)

        for block in self.blocks.values():
            assert isinstance(block, Block)
            x = self.run_block(block, x, forward)
        return x if self.norm is None else self.norm(x)

    def lookup(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """The vectors of tokens, as hidden states lie, with what the spec adds for their positions; needs the first
        stage."""
        assert self.embedding is not None
        if self.positions_first:
            tokens_BT, positions_BT = tokens_BT.t(), positions_BT.t()
        x_BTC = self.embed(tokens_BT) if self.embed else self.embedding(tokens_BT)
        positions_BT = self.keep(positions_BT) if self.keep else positions_BT
        if self.positions is not None:
            return x_BTC + self.positions(positions_BT)
        return x_BTC if self.add_positions is None else self.add_positions(x_BTC, positions_BT, self.spec)

    def edges(self, sequences: int, positions: int) -> Edges:
        shape = (positions, sequences) if self.positions_first else (sequences, positions)
        hidden = (Edge((*shape, self.spec.width)),)
        return Edges(() if self.first else hidden, () if self.last else hidden)

    def run(self, inputs: tuple[Tensor, ...], forward: ForwardPass) -> tuple[Tensor, ...]:
        if forward.cache is None:
            attend = forward.attention(self.spec, documents_BT=forward.documents_BT)
        else:
            assert isinstance(forward.cache, CachedAttend)
            attend = forward.cache
        (x,) = inputs or (forward.tokens_BT,)
        return (self(x, positions_BT=forward.positions_BT, attend=attend, dropout=forward.dropout),)

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

    def cache(self, *, room: int, first_head: int = 0) -> CachedAttend:
        return CachedAttend(self.spec, room, first_head=first_head)

    def split_over_ranks(
        self, *, look_up: Callable[[nn.Embedding, Tensor], Tensor], keep: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.set_positions_first(keep is not None)
        if self.embedding is not None:
            self.embed, self.keep = functools.partial(look_up, self.embedding), keep

    def compile_blocks(self, compile: Callable[[Any], Any]) -> None:
        super().compile_blocks(compile)
        if self.embedding is not None and self.embed is None:
            self.lookup = compile(self.lookup)  # type: ignore[method-assign]

    def set_positions_first(self, first: bool) -> None:
        """Makes hidden states T B C: what is split by positions is then contiguous on every device."""
        self.positions_first = first
        for block in self.blocks.values():
            assert isinstance(block, Block)
            block.attention.positions_first = first

    @property
    def head_weight(self) -> Tensor:
        """The matrix V C that turns hidden states into logits; needs the last stage."""
        owner = self.embedding if self.head is None else self.head
        assert owner is not None, "this stage has no head"
        return owner.weight

    def logits(self, hidden_BTC: Tensor) -> Tensor:
        """Scores of every next token, B T V."""
        return nn.functional.linear(hidden_BTC, self.head_weight)


def _table(rows: int, width: int) -> nn.Embedding:
    """Vectors to look up. Their first values are model/init.py's: torch's own, on the device `meta`, would import its
    compiler, which takes a second and which only training needs."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def build(spec: Spec, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """A whole initialised model on `device`."""
    with torch.device("meta"):
        model = Decoder(spec)
    model = model.to(dtype).to_empty(device=device)
    initialize(model, spec, seed=seed)
    return model
