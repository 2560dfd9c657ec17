"""Cross-entropy and its gradient in one reading of the logits.

Twin: `losses_and_gradient_` of model/loss.py. A program owns a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8
"""The best of those tried: 2.8 TB/s for one reading and one writing of 50,304 columns (H200). A row held in registers
takes twice as long: they overflow."""


def losses_and_gradient_(logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor) -> Tensor:
    """The weighted loss of each token in float32; `logits_NV` becomes the gradient of their sum by it."""
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
    largest = -float("inf")
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), axis=0)
        largest = new
    log_total = largest + tl.log(total)
    tl.store(losses + row, (log_total - tl.load(logits + target).to(tl.float32)) * weight)
    tl.debug_barrier()
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        gradient = (tl.exp(x - log_total) - tl.where(at == target, 1.0, 0.0)) * weight
        tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < vocabulary)
