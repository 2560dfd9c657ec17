"""The decoder: embedding, blocks, final norm, head. Any of them may be absent: a pipeline stage is the same class."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .attend import Attend, causal
from .init import initialize
from .modules import Block, make_norm, rotation
from .spec import Spec


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
        self.embedding = nn.Embedding(spec.vocabulary, spec.width) if first else None
        learned = first and spec.position == "learned"
        self.positions = nn.Embedding(spec.sequence_length, spec.width) if learned else None
        owned = range(spec.layers) if layers is None else layers
        self.blocks = nn.ModuleDict({str(layer): Block(spec, layer) for layer in owned})
        self.norm = make_norm(spec) if last else None
        # A last stage of its own keeps a copy of the tied weight; `parallel` adds up the two gradients.
        own_head = last and not (spec.tied and first)
        self.head = nn.Linear(spec.width, spec.vocabulary, bias=False) if own_head else None

    def forward(self, x: Tensor, *, positions_BT: Tensor | None = None, attend: Attend = causal) -> Tensor:
        """Hidden states B T C of tokens B T (or of hidden states, without an embedding).

        Positions count from 0 unless given.
        """
        if positions_BT is None:
            positions_BT = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        if self.embedding is not None:
            x = self.embedding(x)
        if self.positions is not None:
            x = x + self.positions(positions_BT)
        turn = None
        if self.spec.position == "rope":
            wide = torch.promote_types(x.dtype, torch.float32)
            turn = rotation(positions_BT, head_size=self.spec.head_size, base=self.spec.rope_base, dtype=wide)
        for block in self.blocks.values():
            x = block(x, turn=turn, attend=attend)
        return x if self.norm is None else self.norm(x)

    @property
    def head_weight(self) -> Tensor:
        """The matrix V C that turns hidden states into logits; needs the last stage."""
        owner = self.embedding if self.head is None else self.head
        assert owner is not None, "this stage has no head"
        return owner.weight

    def logits(self, hidden_BTC: Tensor) -> Tensor:
        """Scores of every next token, B T V."""
        return nn.functional.linear(hidden_BTC, self.head_weight)


def build(spec: Spec, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    """A whole initialised model on `device`."""
    with torch.device("meta"):
        model = Decoder(spec)
    model = model.to(dtype).to_empty(device=device)
    initialize(model, spec, seed=seed)
    return model
