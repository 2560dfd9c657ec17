"""Attention over one tile of queries and keys, with results that merge across tiles.

A tile returns its output and log-sum-exp; two tiles of the same queries merge into the attention over both their keys
(Milakov and Gimelshein 2018; Dao et al. 2022). The backward pass of a tile takes the merged output and log-sum-exp.

`plain` and `plain_backward` are the reference in PyTorch; torch's fused kernels are faster for tiles without a mask.

Shapes: B sequences, H query heads, G key and value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KERNELS = torch.ops.aten


def attend_tile(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the attention output, B H T D, and the log-sum-exp over the keys, B H T, -inf where none is visible.

    `causal`: query i sees keys up to the i-th; `mask` is added to the scores.
    """
    if mask is None and has_kernel(q_BHTD):
        return fused(q_BHTD, k_BGSD, v_BGSD, causal=causal)
    return plain(q_BHTD, k_BGSD, v_BGSD, mask=_triangle(q_BHTD, k_BGSD) if causal else mask)


def attend_tile_backward(
    grad_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    out_BHTD: Tensor,
    logsum_BHT: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns this tile's gradients of queries, keys and values; `out` and `logsum` are those of all tiles."""
    given = (grad_BHTD, q_BHTD, k_BGSD, v_BGSD, out_BHTD, logsum_BHT)
    if mask is None and has_kernel(q_BHTD):
        return fused_backward(*given, causal=causal)
    return plain_backward(*given, mask=_triangle(q_BHTD, k_BGSD) if causal else mask)


def wide_type(x: Tensor) -> torch.dtype:
    """Returns the dtype for sums over `x`: float32 for narrower ones."""
    return torch.promote_types(x.dtype, torch.float32)


def has_kernel(q_BHTD: Tensor) -> bool:
    """Whether torch has a fused kernel for unmasked tiles."""
    if q_BHTD.is_cuda:
        # Both CUDA kernels need aligned heads.
        return q_BHTD.dtype != torch.float64 and q_BHTD.shape[-1] % 8 == 0
    return q_BHTD.device.type == "cpu"


def plain(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Reference softmax attention; materializes the T x S scores in `wide_type`, so keep tiles small."""
    scores_BHTS, _ = _scores(q_BHTD, k_BGSD, mask)
    logsum_BHT = scores_BHTS.logsumexp(-1)
    # A query without visible keys: exp(-inf - 0) is 0, exp(-inf + inf) is NaN.
    shift_BHT = logsum_BHT.masked_fill(logsum_BHT == float("-inf"), 0)
    weights_BHTS = scores_BHTS.sub_(shift_BHT.unsqueeze(-1)).exp_()
    return _by_head(_by_group(weights_BHTS, v_BGSD) @ v_BGSD.to(scores_BHTS.dtype), q_BHTD), logsum_BHT


def plain_backward(
    grad_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    out_BHTD: Tensor,
    logsum_BHT: Tensor,
    *,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference backward pass: with p = exp(scores - logsum), dS = p (dO V' - sum(dO O)) (Dao et al. 2022, appendix
    B.2)."""
    scores_BHTS, scale = _scores(q_BHTD, k_BGSD, mask)
    wide = scores_BHTS.dtype
    weights_BHTS = scores_BHTS.sub_(logsum_BHT.unsqueeze(-1)).exp_()
    keys, values, grad = k_BGSD.to(wide), v_BGSD.to(wide), grad_BHTD.to(wide)
    inner_BHT1 = (grad * out_BHTD).sum(-1, keepdim=True)
    weights, grad = _by_group(weights_BHTS, v_BGSD), _by_group(grad, v_BGSD)
    dv_BGSD = weights.mT @ grad
    slope = (grad @ values.mT).sub_(_by_group(inner_BHT1, v_BGSD)).mul_(weights).mul_(scale)
    dk_BGSD = slope.mT @ _by_group(q_BHTD.to(wide), k_BGSD)
    return _by_head(slope @ keys, q_BHTD), dk_BGSD, dv_BGSD


def fused(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Runs `plain` with torch's kernel for this device and dtype; the output has the dtype of the queries."""
    if not q_BHTD.is_cuda:
        return _KERNELS._scaled_dot_product_flash_attention_for_cpu(q_BHTD, k_BGSD, v_BGSD, 0.0, causal)
    if q_BHTD.dtype != torch.float32:
        return _KERNELS._scaled_dot_product_flash_attention(q_BHTD, k_BGSD, v_BGSD, 0.0, causal)[:2]
    k_BHSD, v_BHSD = (_for_each_head(x, q_BHTD) for x in (k_BGSD, v_BGSD))
    out_BHTD, logsum = _KERNELS._scaled_dot_product_efficient_attention(
        q_BHTD, k_BHSD, v_BHSD, None, True, 0.0, causal
    )[:2]
    return out_BHTD, logsum[:, :, : q_BHTD.shape[2]]  # the kernel pads them


def fused_backward(
    grad_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    out_BHTD: Tensor,
    logsum_BHT: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `plain_backward` with torch's kernel for this device and dtype; gradients have the dtype of the queries."""
    logsum_BHT = logsum_BHT.contiguous()
    if not q_BHTD.is_cuda:
        return _KERNELS._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BHTD, q_BHTD, k_BGSD, v_BGSD, out_BHTD, logsum_BHT, 0.0, causal
        )
    queries, keys = q_BHTD.shape[2], k_BGSD.shape[2]
    unused = torch.empty(0, dtype=torch.int64, device=q_BHTD.device)  # dropout state
    if q_BHTD.dtype != torch.float32:
        return _KERNELS._scaled_dot_product_flash_attention_backward(
            grad_BHTD, q_BHTD, k_BGSD, v_BGSD, out_BHTD, logsum_BHT, None, None, queries, keys, 0.0, causal,
            unused, unused,
        )  # fmt: skip
    padded_BHT = torch.nn.functional.pad(logsum_BHT, (0, -queries % 32), value=float("inf"))
    k_BHSD, v_BHSD = (_for_each_head(x, q_BHTD) for x in (k_BGSD, v_BGSD))
    dq_BHTD, dk_BHSD, dv_BHSD, _ = _KERNELS._scaled_dot_product_efficient_attention_backward(
        grad_BHTD, q_BHTD, k_BHSD, v_BHSD, None, out_BHTD, padded_BHT, unused, unused, 0.0,
        [True, True, True, False], causal,
    )  # fmt: skip
    dk_BGSD, dv_BGSD = (x.unflatten(1, (k_BGSD.shape[1], -1)).sum(2) for x in (dk_BHSD, dv_BHSD))
    return dq_BHTD, dk_BGSD, dv_BGSD


def _scores(q_BHTD: Tensor, k_BGSD: Tensor, mask: Tensor | None) -> tuple[Tensor, float]:
    """Returns scaled and masked scores B H T S, and the scale."""
    scale, wide = q_BHTD.shape[-1] ** -0.5, wide_type(q_BHTD)
    scores = _by_group(q_BHTD.to(wide) * scale, k_BGSD) @ k_BGSD.to(wide).mT
    scores_BHTS = scores.view(*q_BHTD.shape[:3], k_BGSD.shape[2])
    return scores_BHTS if mask is None else scores_BHTS.add_(mask), scale


def _by_group(x_BHTX: Tensor, like_BGSD: Tensor) -> Tensor:
    """Flattens each group's query heads, B G (H/G T) X, so that one matmul serves them all."""
    return x_BHTX.reshape(x_BHTX.shape[0], like_BGSD.shape[1], -1, x_BHTX.shape[-1])


def _by_head(x: Tensor, like_BHTD: Tensor) -> Tensor:
    return x.view(like_BHTD.shape)


def _for_each_head(x_BGSD: Tensor, q_BHTD: Tensor) -> Tensor:
    """Repeats key or value heads for every query head, as CUDA's float32 kernel needs."""
    return x_BGSD.repeat_interleave(q_BHTD.shape[1] // x_BGSD.shape[1], dim=1)


def _triangle(q_BHTD: Tensor, k_BGSD: Tensor) -> Tensor:
    shape = (q_BHTD.shape[2], k_BGSD.shape[2])
    return torch.full(shape, float("-inf"), dtype=wide_type(q_BHTD), device=q_BHTD.device).triu_(1)
