"""AdamW with 8-bit moments: dequantize, update, requantize and weight step in one kernel.

Reference: `Adam8` of train/optim/adamw_8bit.py. One program per row. It computes the row's new moments twice, first
for their maximum, then to quantize them: the second pass reads from the cache, and nothing is stored in between.
Keeping a row in registers is slower (H200).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..optim.adamw import Adam
from ..optim.adamw_8bit import middles, table

BLOCK, WARPS = 1024, 4


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
    """One in-place step of a matrix and its moments; skipped if `left_out` is 1. Divides gradients by `scale`.
    `starts_2`: Adam's two bias corrections. `rounded` receives a low-precision copy of the matrix."""
    rows, columns = weight.shape
    place = {"dtype": weight.dtype, "device": weight.device}
    _adamw_8bit[(rows,)](
        weight,
        gradient.contiguous(),
        moments["mean_code"],
        moments["mean_scale"],
        moments["root_code"],
        moments["root_scale"],
        starts_2,
        left_out,
        scale,
        weight if rounded is None else rounded,
        table(signed=True, **place),
        middles(signed=True, **place),
        table(signed=False, **place),
        middles(signed=False, **place),
        columns,
        1 - lr * decay,
        lr,
        1 - adam.beta1,
        1 - adam.beta2,
        adam.epsilon,
        ROUNDS=rounded is not None,
        BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        num_warps=WARPS,
    )


@triton.jit
def _adamw_8bit(
    weights,
    gradients,
    mean_codes,
    mean_scales,
    root_codes,
    root_scales,
    starts,
    left_out,
    scale,
    rounded,
    signed,
    signed_middles,
    unsigned,
    unsigned_middles,
    columns,
    keep,
    lr,
    mean_share,
    square_share,
    epsilon,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weights += row * columns
    rounded += row * columns
    gradients += row * columns
    mean_codes += row * columns
    root_codes += row * columns
    applies = tl.load(left_out) == 0
    width = tl.where(applies, columns, 0)
    mean_scale, root_scale = tl.load(mean_scales + row), tl.load(root_scales + row)
    # Common divisors are inverted once: divisions and roots dominate the time.
    share = 1 / tl.load(scale)
    mean_start, root_start = 1 / tl.load(starts), 1 / tl.sqrt(tl.load(starts + 1))
    most_mean, most_square = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32) * share
        mean = _mean(mean_codes + at, inside, signed, mean_scale, gradient, mean_share)
        square = _square(root_codes + at, inside, unsigned, root_scale, gradient, square_share)
        most_mean = tl.maximum(most_mean, tl.where(inside, tl.abs(mean), 0.0))
        most_square = tl.maximum(most_square, tl.where(inside, square, 0.0))
    new_mean_scale, new_root_scale = tl.max(most_mean, axis=0), tl.sqrt(tl.max(most_square, axis=0))
    mean_unit = tl.where(new_mean_scale > 0, 1 / new_mean_scale, 1.0)
    root_unit = tl.where(new_root_scale > 0, 1 / new_root_scale, 1.0)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32) * share
        mean = _mean(mean_codes + at, inside, signed, mean_scale, gradient, mean_share)
        square = _square(root_codes + at, inside, unsigned, root_scale, gradient, square_share)
        weight = tl.load(weights + at, mask=inside, other=0.0)
        root = tl.sqrt(square)
        weight = weight * keep - lr * (mean * mean_start) / (root * root_start + epsilon)
        tl.store(weights + at, weight, mask=inside)
        if ROUNDS:
            tl.store(rounded + at, weight.to(rounded.dtype.element_ty), mask=inside)
        mean_code = _signed_code(mean * mean_unit, signed_middles)
        # A positive root never rounds to 0: it is a divisor.
        root_code = tl.maximum(_unsigned_code(root * root_unit, unsigned_middles), (root > 0).to(tl.int32))
        tl.store(mean_codes + at, mean_code.to(tl.uint8), mask=inside)
        tl.store(root_codes + at, root_code.to(tl.uint8), mask=inside)
    tl.store(mean_scales + row, new_mean_scale, mask=applies)
    tl.store(root_scales + row, new_root_scale, mask=applies)


@triton.jit
def _mean(codes, inside, signed, scale, gradient, share):
    mean = tl.load(signed + tl.load(codes, mask=inside, other=0)) * scale
    return mean + share * (gradient - mean)


@triton.jit
def _square(codes, inside, unsigned, scale, gradient, share):
    root = tl.load(unsigned + tl.load(codes, mask=inside, other=0)) * scale
    return root * root + share * (gradient * gradient - root * root)


@triton.jit
def _signed_code(x, middles):
    """The number of the 255 ascending `middles` below each `x` in [-1, 1]."""
    size = tl.minimum(tl.abs(x), 1.0)
    code = tl.maximum(_at_least(size, 64 / 0.9), 0)
    middle = tl.load(middles + 127 + code)
    above = tl.where(x < 0, size >= middle, size > middle)
    code += above.to(tl.int32)
    return tl.where(x < 0, 127 - tl.minimum(code, 127), 127 + code)


@triton.jit
def _unsigned_code(x, middles):
    """As `_signed_code`, for `x` in [0, 1]."""
    code = tl.maximum(_at_least(tl.minimum(x, 1.0), 128 / 0.9) - 1, 0)
    return code + (x > tl.load(middles + code)).to(tl.int32)


@triton.jit
def _at_least(size, steps):
    """The code or the one before it. Codes of a decade start at a power of two: the largest decade has 0.9 `steps`
    codes and starts at `steps`, the next one at half of that. A decade starts 0.2 codes before the midpoint between its
    smallest value and the one below, hence the offset of 0.21."""
    for _ in tl.static_range(6):
        below = size < 0.1
        size = tl.where(below, size * 10, size)
        steps = tl.where(below, steps * 0.5, steps)
    return ((size + 0.8) * steps - 0.21).to(tl.int32)
