"""The decoder: embedding, blocks, final norm, head. Any of them may be absent: a pipeline stage is the same class."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .attend import Attend, attend_for
from .dropout import Dropout
from .init import initialize
from .modules import Block, make_norm
from .positions import rotation, sinusoids
from .spec import Spec

RunBlock = Callable[[Block, Tensor, Callable[[Block, Tensor], Tensor]], Tensor]
"""Runs a block on its input by calling the function given last; may do so twice, or keep what it saves elsewhere."""


def run_plainly(block: Block, x: Tensor, forward: Callable[[Block, Tensor], Tensor]) -> Tensor:
    """Once, as it is."""
    return forward(block, x)


class Decoder(nn.Module):
    """Tokens (or the hidden states of the stage before) -> hidden states.

    The loss is a function of hidden states and `head_weight` (model/loss.py), so that it can be chunked or split by
    vocabulary; `logits` is for generation.
    """

    def __init__(
        self, spec: Spec, *, layers: Iterable[int] | None = None, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = _table(spec.vocabulary, spec.width) if first else None
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
        if self.spec.position == "rope":
            wide = torch.promote_types(x.dtype, torch.float32)
            turn = rotation(positions_BT.t() if self.positions_first else positions_BT, self.spec, dtype=wide)

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
        if self.spec.position == "sinusoidal":
            # Vaswani et al. 2017, section 3.4: without the factor the sinusoids would drown the embedding.
            waves_BTC = sinusoids(positions_BT, width=self.spec.width, dtype=x_BTC.dtype)
            return x_BTC * self.spec.width**0.5 + waves_BTC
        return x_BTC

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
