"""Attention kernels and masks behind one interface, `Attend`; a KV cache or ring attention is another `Attend`.

Shapes: B sequences, H query heads, G key and value heads, T tokens, S keys, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from .activations import IN_TILES
from .cpu_attention import attend_in_tiles
from .positions import alibi_slopes
from .spec import Spec

Kernel = Literal["flash", "cudnn", "efficient", "math"]
KERNELS: dict[Kernel, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


SMALL_HEADS: Any = {
    "fwd_BLOCK_M": 128,
    "fwd_BLOCK_N": 64,
    "fwd_num_warps": 4,
    "fwd_num_stages": 3,
    "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 4,
    "bwd_num_stages": 3,
}
"""FlexAttention's tiles for heads of up to 64 features in half precision. With 64 sequences of 1024 tokens, 12 heads
and documents of about 300, forward alone takes 0.34 ms instead of 0.46, forward and backward 1.83 instead of 2.00 with
the latter tiles (H200)."""


class Attend(Protocol):
    """Attention of one layer, after rotation. A forward pass calls it once per layer, in order."""

    def __call__(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        """Attention output, B H T D."""


def attend_for(
    spec: Spec,
    *,
    documents_BT: Tensor | None = None,
    first_head: int = 0,
    kernel: Kernel | None = None,
    tiles: bool = False,
) -> Attend:
    """Builds the spec's attention for one forward pass over whole sequences.

    `documents_BT` numbers the documents of each sequence, for a spec that separates them; `first_head` is the first
    head of this rank; `kernel` is preferred for plain causal attention (None: torch's choice). `tiles` is for compiled
    blocks: FlexAttention then skips fully masked tiles.
    """
    separate = documents_BT is not None and spec.documents == "separate"
    if not separate and spec.window is None and spec.position != "alibi":
        return causal if kernel is None else CausalAttend((kernel, *(other for other in KERNELS if other != kernel)))
    if tiles and documents_BT is not None:
        return TiledAttend(spec, documents_BT, first_head=first_head)
    return MaskedAttend(spec, documents_BT=documents_BT if separate else None, first_head=first_head)


def attend_shared(spec: Spec, *, documents_BT: Tensor | None) -> Attend:
    """Attention over rows that hold a beginning, document 0, and continuations of it, documents 1, 2, ...: each token
    sees the beginning and earlier tokens of its own document. For scoring texts that begin alike."""
    assert documents_BT is not None, "documents tell the continuations apart"
    assert attend_for(spec) is causal, "windows and ALiBi count distances in rows"
    return _SharedAttend(documents_BT)


def causal(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """Causal attention: each token attends to itself and to earlier tokens of its sequence."""
    return _attend(q_BHTD, k_BGTD, v_BGTD, mask=None)


@dataclass(frozen=True, slots=True)
class CausalAttend:
    """`causal` with the first of these torch kernels that supports the shapes."""

    kernels: tuple[Kernel, ...]

    def __call__(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        with sdpa_kernel([KERNELS[kernel] for kernel in self.kernels], set_priority=True):
            return _attend(q_BHTD, k_BGTD, v_BGTD, mask=None)


class _SharedAttend:
    """One forward pass of `attend_shared`; all layers share one mask of B x T x T numbers."""

    def __init__(self, documents_BT: Tensor) -> None:
        self._documents_BT = documents_BT
        self._mask: Tensor | None = None

    def __call__(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        if self._mask is None:
            document_BT = self._documents_BT
            index_T = torch.arange(q_BHTD.shape[2], device=q_BHTD.device)
            seen_BTT = (document_BT.unsqueeze(2) == document_BT.unsqueeze(1)) | (document_BT == 0).unsqueeze(1)
            seen_BTT &= index_T.unsqueeze(1) >= index_T
            # Not boolean: torch would convert it in every layer.
            zero = torch.zeros((), dtype=q_BHTD.dtype, device=q_BHTD.device)
            self._mask = torch.where(seen_BTT, zero, float("-inf")).unsqueeze(1)
        return _attend(q_BHTD, k_BGTD, v_BGTD, mask=self._mask)


class MaskedAttend:
    """Causal attention with a window, ALiBi or separate documents, for one forward pass.

    All layers share one mask of (B if documents) x (H if ALiBi) x T x T numbers, built at the first call. Price: it is
    kept for the backward pass, and pairs outside a window are computed and discarded.
    """

    def __init__(self, spec: Spec, *, documents_BT: Tensor | None = None, first_head: int = 0) -> None:
        self._spec = spec
        self._documents_BT = documents_BT
        self._first_head = first_head
        self._mask: Tensor | None = None

    def __call__(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
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


class TiledAttend:
    """`MaskedAttend` through FlexAttention, for compiled blocks: no mask in memory; fully masked tiles are skipped."""

    def __init__(self, spec: Spec, documents_BT: Tensor, *, first_head: int = 0) -> None:
        rows, length = documents_BT.shape
        self._score = _alibi_score(spec, first_head, documents_BT.device) if spec.position == "alibi" else None
        separate = spec.documents == "separate"
        documents_BT = documents_BT.contiguous()

        def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            found = query >= key
            if spec.window is not None:
                found = found & (query - key < spec.window)
            if separate:
                found = found & (documents_BT[row, query] == documents_BT[row, key])
            return found

        self._mask = _block_mask(seen, rows if separate else None, length, documents_BT.device)

    def __call__(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        small = q_BHTD.is_cuda and q_BHTD.shape[3] <= 64 and q_BHTD.dtype in (torch.bfloat16, torch.float16)
        out = flex_attention(
            q_BHTD,
            k_BGTD,
            v_BGTD,
            score_mod=self._score,
            block_mask=self._mask,
            enable_gqa=q_BHTD.shape[1] != k_BGTD.shape[1],
            kernel_options=SMALL_HEADS if small else None,
        )
        assert isinstance(out, Tensor)
        return out


def _block_mask(seen: Callable[..., Tensor], rows: int | None, length: int, device: torch.device) -> BlockMask:
    make = _compiled_block_mask() if device.type == "cuda" else create_block_mask
    return make(seen, rows, None, length, length, device=device)


@functools.cache
def _compiled_block_mask() -> Callable[..., BlockMask]:
    """Compiled, since eager code would materialize all pairs of positions."""
    return torch.compile(create_block_mask, dynamic=False)


def _alibi_score(spec: Spec, first_head: int, device: torch.device) -> Callable[..., Tensor]:
    slopes_H = alibi_slopes(spec.heads, device=device)[first_head:].float()

    def score(value: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return value - slopes_H[head] * (query - key)

    return score


def _attend(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, *, mask: Tensor | None) -> Tensor:
    """Attention under `mask`, or causal without one."""
    heads, groups = q_BHTD.shape[1], k_BGTD.shape[1]
    if q_BHTD.device.type == "cpu" and q_BHTD.dtype == torch.bfloat16 and q_BHTD.shape[2] <= IN_TILES:
        return attend_in_tiles(q_BHTD, k_BGTD, v_BGTD, mask)
    if heads != groups and q_BHTD.is_cuda and (mask is not None or q_BHTD.dtype == torch.float32):
        # GPU kernels for a mask or float32 lack grouped queries; torch would fall back to T x T matrices: 1.6 times
        # all activations that a model of width 768 saves at T = 1024 (H200, torch 2.11).
        k_BGTD, v_BGTD = (x.repeat_interleave(heads // groups, dim=1) for x in (k_BGTD, v_BGTD))
    grouped = heads != k_BGTD.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTD, k_BGTD, v_BGTD, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def additive_mask(
    spec: Spec, query_T: Tensor, key_S: Tensor, *, heads: range, dtype: torch.dtype, documents_BT: Tensor | None
) -> Tensor:
    """Additive attention mask for queries and keys at these positions: -inf where masked.

    T x S, or with ALiBi or documents (1 or B) x (1 or H) x T x S: three dimensions would take torch's slow path.
    `documents_BT` covers whole sequences. Not boolean: torch would convert it in every layer and save each copy.
    """
    distance_TS = query_T.unsqueeze(1) - key_S
    separate = None
    if documents_BT is not None:
        separate = (documents_BT[:, query_T].unsqueeze(2) == documents_BT[:, key_S].unsqueeze(1)).unsqueeze(1)
    return seen_or_masked(spec, distance_TS, heads=heads, dtype=dtype, also=separate)


def seen_or_masked(
    spec: Spec, distance: Tensor, *, heads: range, dtype: torch.dtype, also: Tensor | None = None
) -> Tensor:
    """The additive mask of queries at these distances (... T x S) after the keys; `also`: pairs that may attend. With
    ALiBi, which has a dimension of heads, `distance` is T x S or B x 1 x T x S."""
    seen = distance >= 0
    if spec.window is not None:
        seen &= distance < spec.window
    if also is not None:
        seen = seen & also
    penalty = torch.zeros((), dtype=dtype, device=distance.device)
    if spec.position == "alibi":
        # Press et al. 2022, equation in section 3: subtract slope x distance from the score.
        slopes_H = alibi_slopes(spec.heads, device=distance.device)[heads.start : heads.stop]
        penalty = (slopes_H.view(1, -1, 1, 1) * -distance).to(dtype)
    return torch.where(seen, penalty, float("-inf"))
