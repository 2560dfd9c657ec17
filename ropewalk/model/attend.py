"""How queries meet keys. A model is given an `Attend`; a KV cache or a ring over devices is another one, not a patch.

Shapes: B rows, H query heads, G key and value heads, T tokens, S keys, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .positions import alibi_slopes
from .spec import Spec


class Attend(Protocol):
    """Attention of one layer, after positions are applied."""

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        """The attended values, B H T D."""


def attend_for(spec: Spec, *, documents_BT: Tensor | None = None, first_head: int = 0) -> Attend:
    """What the spec asks for in one forward pass over whole rows.

    `documents_BT` numbers the documents of each row, for a spec that separates them; `first_head` is the first of the
    heads that this process holds.
    """
    if spec.documents == "ignore":
        documents_BT = None
    if documents_BT is None and spec.window is None and spec.position != "alibi":
        return causal
    return MaskedAttend(spec, documents_BT=documents_BT, first_head=first_head)


def causal(layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """Each token sees itself and what came before it in its row."""
    return _attend(q_BHTD, k_BGTD, v_BGTD, mask=None)


class MaskedAttend:
    """Causal attention with a window, distance penalties or separate documents, for one forward pass.

    All layers share one mask of (B if documents) x (H if ALiBi) x T x T numbers, made at the first call. Price: it is
    held for the backward pass, and pairs outside a window are computed and thrown away.
    """

    def __init__(self, spec: Spec, *, documents_BT: Tensor | None = None, first_head: int = 0) -> None:
        self._spec = spec
        self._documents_BT = documents_BT
        self._first_head = first_head
        self._mask: Tensor | None = None

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        if self._mask is None:
            index_T = torch.arange(q_BHTD.shape[2], device=q_BHTD.device)
            self._mask = additive_mask(
                self._spec,
                index_T,
                index_T,
                heads=range(self._first_head, self._first_head + q_BHTD.shape[1]),
                dtype=q_BHTD.dtype,
                documents_BT=self._documents_BT,
            )
        return _attend(q_BHTD, k_BGTD, v_BGTD, mask=self._mask)


class CachedAttend:
    """Causal attention that remembers keys and values, for generation: each call brings only the new tokens.

    Memory: 2 x layers x B x G x length x D numbers, allocated once at the first call of each layer.
    """

    def __init__(self, spec: Spec, length: int) -> None:
        self._spec = spec
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
        # `is_causal` aligns the first query with the first key, so a continuation needs its own mask; the last token
        # alone sees everything, if nothing special is asked.
        mask = None
        if tokens > 1 or attend_for(self._spec) is not causal:
            key_S, heads = torch.arange(end, device=q_BHTD.device), range(q_BHTD.shape[1])
            mask = additive_mask(
                self._spec, key_S[self.seen :], key_S, heads=heads, dtype=q_BHTD.dtype, documents_BT=None
            )
        return F.scaled_dot_product_attention(
            q_BHTD,
            keys_BGSD[:, :, :end],
            values_BGSD[:, :, :end],
            attn_mask=mask,
            enable_gqa=q_BHTD.shape[1] != groups,
        )

    def advance(self, tokens: int) -> None:
        """The last forward pass brought `tokens` new tokens."""
        self.seen += tokens


def _attend(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, mask: Tensor | None) -> Tensor:
    """Attention under `mask`, or causal without one."""
    heads, groups = q_BHTD.shape[1], k_BGTD.shape[1]
    if heads != groups and q_BHTD.is_cuda and (mask is not None or q_BHTD.dtype == torch.float32):
        # The GPU kernels that take a mask or float32 know no groups, and torch would fall back to T x T matrices: 1.6
        # times the memory of all that a model of width 768 keeps at T = 1024 (H200, torch 2.11).
        k_BGTD, v_BGTD = (x.repeat_interleave(heads // groups, dim=1) for x in (k_BGTD, v_BGTD))
    grouped = heads != k_BGTD.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTD, k_BGTD, v_BGTD, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def additive_mask(
    spec: Spec, query_T: Tensor, key_S: Tensor, *, heads: range, dtype: torch.dtype, documents_BT: Tensor | None
) -> Tensor:
    """What is added to the scores of queries and keys at these places of a row: -inf where unseen.

    T x S, or with ALiBi or documents (1 or B) x (1 or H) x T x S: three dimensions would take torch's slow path.
    `documents_BT` are those of the whole rows.

    Numbers rather than booleans: torch would turn booleans into numbers again in every layer and keep each copy.
    """
    distance_TS = query_T.unsqueeze(1) - key_S
    seen = distance_TS >= 0
    if spec.window is not None:
        seen &= distance_TS < spec.window
    if documents_BT is not None:
        seen = seen & (documents_BT[:, query_T].unsqueeze(2) == documents_BT[:, key_S].unsqueeze(1)).unsqueeze(1)
    penalty = torch.zeros((), dtype=dtype, device=key_S.device)
    if spec.position == "alibi":
        # Press et al. 2022, equation in section 3: the score loses slope x distance.
        slopes_H = alibi_slopes(spec.heads, device=key_S.device)[heads.start : heads.stop]
        penalty = (slopes_H.view(1, -1, 1, 1) * -distance_TS).to(dtype)
    return torch.where(seen, penalty, float("-inf"))
