"""Fused cross-entropy and gradient in one pass over the logits; and scaling of that gradient.

Twin: `losses_and_gradient_` of model/loss.py. Each program handles one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 16
"""The fastest tried: 2.9 TB/s for one read and one write of 50,304 columns (H200). Holding a row in registers takes
twice as long, because they spill."""

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-1e30)
"""Below all logits, and finite, so that its difference to itself is not NaN."""


def losses_and_gradient_(logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor) -> Tensor:
    """Weighted loss of each token in float32; overwrites `logits_NV` with the gradient of the sum."""
    rows, vocabulary = logits_NV.shape
    losses_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    if rows:
        _cross_entropy[(rows,)](
            logits_NV,
            targets_N,
            weights_N,
            losses_N,
            vocabulary,
            logits_NV.stride(0),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return losses_N


@triton.jit
def _cross_entropy(logits, targets, weights, losses, vocabulary, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    weight = tl.load(weights + row).to(tl.float32)
    # Each lane keeps its own maximum and sum, so that lanes synchronize once per row. In powers of two.
    largest = tl.full([BLOCK], LEAST, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocabulary, other=-float("inf"), eviction_policy="evict_last")
        x = tl.maximum(x.to(tl.float32) * LOG2_E, LEAST)
        new = tl.maximum(largest, x)
        totals = totals * tl.exp2(largest - new) + tl.where(at < vocabulary, tl.exp2(x - new), 0.0)
        largest = new
    most = tl.max(largest, axis=0)
    log_total = most + tl.log2(tl.sum(totals * tl.exp2(largest - most), axis=0))
    tl.store(losses + row, (log_total / LOG2_E - tl.load(logits + target).to(tl.float32)) * weight)
    tl.debug_barrier()
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocabulary, other=-float("inf"), eviction_policy="evict_first")
        share = tl.exp2(x.to(tl.float32) * LOG2_E - log_total)
        gradient = (share - tl.where(at == target, 1.0, 0.0)) * weight
        tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < vocabulary, eviction_policy="evict_first")


def scaled(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """The contiguous `x` times a device scalar, in another dtype. Twin: `(x * by).to(dtype)`.

    torch reads the scalar for every element: 0.5 TB/s, and needs a separate pass for the dtype (H200).
    """
    out = torch.empty_like(x, dtype=dtype)
    _scaled[(triton.cdiv(x.numel(), BLOCK),)](x, by, out, x.numel(), BLOCK=BLOCK, num_warps=8)
    return out


@triton.jit
def _scaled(xs, by, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(xs + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(by).to(tl.float32)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=at < count)
