"""How queries meet keys. A model is given an `Attend`; a KV cache or a ring over devices is another one, not a patch.

Shapes: B rows, H query heads, G key and value heads, T tokens, S keys, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Attend(Protocol):
    """Attention of one layer, after positions are applied."""

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        """The attended values, B H T D."""


def causal(layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """Each token sees itself and what came before it in its row."""
    grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
    return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=grouped)


class CachedAttend:
    """Causal attention that remembers keys and values, for generation: each call brings only the new tokens.

    Memory: 2 x layers x B x G x length x D numbers, allocated once at the first call of each layer.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.seen = 0
        """Tokens already in the cache; the caller raises it by `advance` after each forward pass."""

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        batch, groups, tokens, size = k_BGTD.shape
        if layer not in self._cache:
            shape = (batch, groups, self._length, size)
            self._cache[layer] = (k_BGTD.new_empty(shape), v_BGTD.new_empty(shape))
        keys_BGSD, values_BGSD = self._cache[layer]
        end = self.seen + tokens
        keys_BGSD[:, :, self.seen : end] = k_BGTD
        values_BGSD[:, :, self.seen : end] = v_BGTD
        # `is_causal` aligns the first query with the first key, so a continuation needs its own mask.
        position_S = torch.arange(end, device=q_BHTD.device)
        mask_TS = position_S <= torch.arange(self.seen, end, device=q_BHTD.device).unsqueeze(1)
        return F.scaled_dot_product_attention(
            q_BHTD,
            keys_BGSD[:, :, :end],
            values_BGSD[:, :, :end],
            attn_mask=mask_TS if tokens > 1 else None,
            enable_gqa=q_BHTD.shape[1] != groups,
        )

    def advance(self, tokens: int) -> None:
        """The last forward pass brought `tokens` new tokens."""
        self.seen += tokens
