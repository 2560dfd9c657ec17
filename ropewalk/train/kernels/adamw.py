"""AdamW in one pass over memory, with gradients that may be narrower than the weights.

Reference: `Adam` of train/optim/adamw.py. torch's fused kernel requires gradients of the weights' dtype: bfloat16 ones
would first be copied to float32 and read at four bytes each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..optim.adamw import Adam

BLOCK = 1024


def update_(
    weight: Tensor,
    gradient: Tensor,
    moments: dict[str, Tensor],
    starts_2: Tensor,
    left_out: Tensor,
    scale: Tensor,
    *,
    adam: Adam,
    lr: float,
    decay: float,
    rounded: Tensor | None = None,
) -> None:
    """One in-place step of a weight and its moments; skipped if `left_out` is 1. Divides gradients by `scale`.
    `starts_2`: Adam's two bias corrections. `rounded` receives a low-precision copy of the weight."""
    _adamw[(triton.cdiv(weight.numel(), BLOCK),)](
        weight,
        gradient.contiguous(),
        moments["exp_avg"],
        moments["exp_avg_sq"],
        starts_2,
        left_out,
        scale,
        weight if rounded is None else rounded,
        weight.numel(),
        1 - lr * decay,
        lr,
        1 - adam.beta1,
        1 - adam.beta2,
        adam.epsilon,
        ROUNDS=rounded is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit
def _adamw(
    weights,
    gradients,
    means,
    squares,
    starts,
    left_out,
    scale,
    rounded,
    count,
    keep,
    lr,
    mean_share,
    square_share,
    epsilon,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(means + at, mask=inside, other=0.0)
    square = tl.load(squares + at, mask=inside, other=0.0)
    weight = tl.load(weights + at, mask=inside, other=0.0)
    kept = at < tl.where(tl.load(left_out) == 0, count, 0)  # a skipped step stores nothing
    # Common divisors are inverted once.
    gradient *= 1.0 / tl.load(scale)
    mean += mean_share * (gradient - mean)
    square += square_share * (gradient * gradient - square)
    root = tl.sqrt(square * (1.0 / tl.load(starts + 1)))
    weight = weight * keep - lr * (mean * (1.0 / tl.load(starts)) / (root + epsilon))
    tl.store(weights + at, weight, mask=kept)
    if ROUNDS:
        tl.store(rounded + at, weight.to(rounded.dtype.element_ty), mask=kept)
    tl.store(means + at, mean, mask=kept)
    tl.store(squares + at, square, mask=kept)
