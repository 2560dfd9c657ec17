"""The decoder: embedding, blocks, final norm, head. Any may be absent: a pipeline stage is the same class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .attend import Attend, attend_for
from .components import POSITIONS, made
from .dropout import Dropout
from .init import initialize
from .modules import Block, make_norm
from .positions import Rotation
from .protocol import Edges, ForwardPass, LanguageModel, make_table
from .slot_cache import SlotCache
from .spec import Spec


class Decoder(LanguageModel):
    """A decoder-only transformer: tokens (or the previous stage's hidden states) -> hidden states."""

    def __init__(
        self, spec: Spec, *, layers: Iterable[int] | None = None, first: bool = True, last: bool = True
    ) -> None:
        super().__init__(spec, layers=layers, first=first, last=last)
        position = POSITIONS[spec.position]
        function = made(position, spec.position_settings) if position.how in ("rotate", "add") else None
        self.rotation: Callable[..., Rotation] | None = function if position.how == "rotate" else None
        self.add_positions: Callable[[Tensor, Tensor, Spec], Tensor] | None = None
        if position.how == "add":
            self.add_positions = function
        self.keep: Callable[[Tensor], Tensor] | None = None
        """Takes this rank's positions of T B, if ranks share them."""
        self.positions_first = False
        """Whether hidden states are T B C rather than B T C, inside and between stages; `set_positions_first`."""

    def make_blocks(self, layers: Iterable[int]) -> None:
        spec = self.spec
        learned = spec.learned_positions if self.first else 0
        self.positions = make_table(learned, spec.width) if learned else None
        self.blocks = nn.ModuleDict({str(layer): Block(spec, layer) for layer in layers})
        self.norm = make_norm(spec) if self.last and spec.norm_position != "post" else None

    def forward(
        self,
        x: Tensor,
        *,
        positions_BT: Tensor | None = None,
        attend: Attend | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Hidden states B T C, or T B C with `positions_first`, from tokens B T (or from hidden states, without an
        embedding).

        Defaults: positions count from 0, `attend` is the spec's own over full sequences of one document, no dropout.
        """
        if positions_BT is None:
            positions_BT = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        attend = attend or attend_for(self.spec)
        if self.embedding is not None:
            x = self.lookup(x, positions_BT)
            x = x if dropout is None else dropout(x, site="embedding")
        angles = None
        if self.rotation is not None:
            wide = torch.promote_types(x.dtype, torch.float32)
            angles = self.rotation(positions_BT.t() if self.positions_first else positions_BT, self.spec, dtype=wide)

        def forward(block: Block, x: Tensor) -> Tensor:
            return block(x, angles=angles, attend=attend, dropout=dropout.at(block.layer) if dropout else None)

        for block in self.blocks.values():
            assert isinstance(block, Block)
            x = self.run_block(block, x, forward)
        return x if self.norm is None else self.norm(x)

    def lookup(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """Token embeddings in the layout of hidden states, with the spec's position embeddings; requires the first
        stage."""
        if self.positions_first:
            tokens_BT, positions_BT = tokens_BT.t(), positions_BT.t()
        x_BTC = self.embedded(tokens_BT)
        positions_BT = self.keep(positions_BT) if self.keep else positions_BT
        if self.positions is not None:
            return x_BTC + self.positions(positions_BT)
        return x_BTC if self.add_positions is None else self.add_positions(x_BTC, positions_BT, self.spec)

    def edges(self, sequences: int, positions: int) -> Edges:
        return super().edges(positions, sequences) if self.positions_first else super().edges(sequences, positions)

    def run(self, inputs: tuple[Tensor, ...], forward: ForwardPass) -> tuple[Tensor, ...]:
        if forward.cache is None:
            attend = forward.attention(self.spec, documents_BT=forward.documents_BT)
        else:
            assert isinstance(forward.cache, SlotCache)
            attend = forward.cache
        (x,) = inputs or (forward.tokens_BT,)
        return (self(x, positions_BT=forward.positions_BT, attend=attend, dropout=forward.dropout),)

    def cache(self, *, slots: int, room: int, first_head: int = 0) -> SlotCache:
        return SlotCache(self.spec, slots=slots, room=room, first_head=first_head)

    def split_over_ranks(
        self, *, look_up: Callable[[nn.Embedding, Tensor], Tensor], keep: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.look_up, self.keep = look_up, keep
        self.set_positions_first(keep is not None)

    def compile_blocks(self, compile: Callable[[Any], Any]) -> None:
        super().compile_blocks(compile)
        if self.embedding is not None and self.look_up is None:
            self.lookup = compile(self.lookup)  # type: ignore[method-assign]

    def set_positions_first(self, first: bool) -> None:
        """Makes hidden states T B C, so that splits by position are contiguous on every device."""
        self.positions_first = first
        for block in self.blocks.values():
            assert isinstance(block, Block)
            block.attention.positions_first = first


def build(spec: Spec, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """A whole initialized model on `device`."""
    with torch.device("meta"):
        model = Decoder(spec)
    model = model.to(dtype).to_empty(device=device)
    initialize(model, spec, seed=seed)
    return model
