"""A KV cache of sequences of different lengths, for generation.

Each sequence has a slot with room for its keys and values. A forward pass gets only new tokens, of some slots, each at
its own position; padding has position -1 and stands before the tokens, so that the last position of every row counts.

Shapes: B sequences, H query heads, G key and value heads, T new tokens, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .attend import seen_or_masked
from .spec import Spec

ALIGNMENT = 64
"""Room is rounded up to a multiple: GPU kernels read masks in aligned pieces."""


@dataclass(frozen=True, slots=True)
class SlotPositions:
    """Where the new tokens of a forward pass belong."""

    slots: slice | Tensor
    """The slot of each row; adjacent ones as a slice, which avoids a copy of their keys and values."""
    positions_BT: Tensor
    """Positions in the sequence; -1: padding."""
    keys: int
    """Positions to attend to at most: one more than the last position, or anything above."""

    @property
    def embedded_BT(self) -> Tensor:
        """Positions to embed: 0 for padding."""
        return self.positions_BT.clamp(min=0)


class SlotCache:
    """Attention of all layers over the cached and the new tokens.

    Memory: 2 x layers x slots x G x room x D numbers, allocated at the first call of each layer. `first_head` is the
    first head of this rank.
    """

    def __init__(self, spec: Spec, *, slots: int, room: int, first_head: int = 0) -> None:
        self._spec, self._first_head = spec, first_head
        # Padding is written to the last position, which no query reads.
        self._shape = (slots, -(-(room + 1) // ALIGNMENT) * ALIGNMENT)
        self._layers: list[tuple[Tensor, Tensor]] = []

    @property
    def room(self) -> int:
        """The most `keys` of a forward pass."""
        return self._shape[1]

    @property
    def bytes(self) -> int:
        """Memory of the layers that were called."""
        return sum(x.nbytes for layer in self._layers for x in layer)

    def begin(self, at: SlotPositions) -> None:
        """The layers' next calls, in order, get the queries, keys and values of these tokens."""
        self._at, self._layer = at, 0
        self._mask: Tensor | None = None
        slots = at.slots
        if isinstance(slots, slice):
            slots = torch.arange(slots.start, slots.stop, device=at.positions_BT.device)
        padding_BT = at.positions_BT < 0
        self._where = slots.unsqueeze(1), torch.where(padding_BT, self.room - 1, at.positions_BT)

    def copy(self, sources: Sequence[int], targets: Sequence[int], *, tokens: int) -> None:
        """Copies the first `tokens` tokens of slots; a slot may be a source and a target."""
        for x_SGTD in (x for layer in self._layers for x in layer):
            x_SGTD[list(targets), :, :tokens] = x_SGTD[list(sources), :, :tokens]

    def __call__(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        keys_SGTD, values_SGTD = self._written(k_BGTD, v_BGTD)
        heads, groups, tokens = q_BHTD.shape[1], k_BGTD.shape[1], q_BHTD.shape[2]
        if self._mask is None:
            self._mask = self._make_mask(heads, q_BHTD)
        slots, keys = self._at.slots, self._at.keys
        k_BGSD, v_BGSD = keys_SGTD[slots, :, :keys], values_SGTD[slots, :, :keys]
        mask = self._mask
        if tokens == 1:
            # The queries of a group as so many tokens: torch would copy keys and values for each of them.
            grouped_BGTD = q_BHTD.reshape(-1, groups, heads // groups, q_BHTD.shape[3])
            if mask.shape[1] > 1:
                mask = mask.reshape(-1, groups, heads // groups, mask.shape[3])
            return F.scaled_dot_product_attention(grouped_BGTD, k_BGSD, v_BGSD, attn_mask=mask).reshape(q_BHTD.shape)
        if heads != groups and q_BHTD.is_cuda:  # model/attend.py says why
            k_BGSD, v_BGSD = (x.repeat_interleave(heads // groups, dim=1) for x in (k_BGSD, v_BGSD))
        grouped = heads != k_BGSD.shape[1]
        return F.scaled_dot_product_attention(q_BHTD, k_BGSD, v_BGSD, attn_mask=mask, enable_gqa=grouped)

    def _written(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of the layer, with the new ones."""
        if self._layer == len(self._layers):
            # Zeros, because a masked NaN would still be NaN.
            slots, room = self._shape
            shape = (slots, k_BGTD.shape[1], room, k_BGTD.shape[3])
            self._layers.append((k_BGTD.new_zeros(shape), v_BGTD.new_zeros(shape)))
        layer = self._layers[self._layer]
        self._layer += 1
        slots_B1, where_BT = self._where
        for x_SGTD, new_BGTD in zip(layer, (k_BGTD, v_BGTD), strict=True):
            x_SGTD[slots_B1, :, where_BT] = new_BGTD.transpose(1, 2)
        return layer

    def _make_mask(self, heads: int, q_BHTD: Tensor) -> Tensor:
        """B x (1 or H) x T x S; one for all layers."""
        key_S = torch.arange(self._at.keys, device=q_BHTD.device)
        distance_BTS = self._at.embedded_BT.unsqueeze(2) - key_S
        own = range(self._first_head, self._first_head + heads)
        return seen_or_masked(self._spec, distance_BTS.unsqueeze(1), heads=own, dtype=q_BHTD.dtype)
