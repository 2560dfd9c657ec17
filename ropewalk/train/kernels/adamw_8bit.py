"""AdamW with moments in eight bits: decode, update, encode and the step of the weights in one kernel.

Twin: `Adam8` of train/optimizers/adamw_8bit.py. A program owns a row. It computes the row's new moments twice, first
for their largest, then to encode them by it: the second reading comes from the L2 cache, and nothing is written
between.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..optimizers.adamw import Adam
from ..optimizers.codes import middles, table

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
    """One step of a matrix and its moments in place; none where `left_out` is 1. Gradients are divided by `scale`;
    `starts_2` are the two corrections of Adam for its start at 0. `rounded` becomes the matrix in fewer bits."""
    rows, columns = weight.shape
    place = {"dtype": weight.dtype, "device": weight.device}
    _row[(rows,)](
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
    )


@triton.jit
def _row(
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
    mean_start, square_start = tl.load(starts), tl.load(starts + 1)
    divisor = tl.load(scale)
    new_mean_scale, new_root_scale = 0.0, 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        gradient = tl.div_rn(tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32), divisor)
        mean = _mean(mean_codes + at, inside, signed, mean_scale, gradient, mean_share)
        square = _square(root_codes + at, inside, unsigned, root_scale, gradient, square_share)
        new_mean_scale = tl.maximum(new_mean_scale, tl.max(tl.where(inside, tl.abs(mean), 0.0), axis=0))
        new_root_scale = tl.maximum(new_root_scale, tl.max(tl.where(inside, tl.sqrt_rn(square), 0.0), axis=0))
    mean_unit = tl.where(new_mean_scale > 0, new_mean_scale, 1.0)
    root_unit = tl.where(new_root_scale > 0, new_root_scale, 1.0)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        gradient = tl.div_rn(tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32), divisor)
        mean = _mean(mean_codes + at, inside, signed, mean_scale, gradient, mean_share)
        square = _square(root_codes + at, inside, unsigned, root_scale, gradient, square_share)
        weight = tl.load(weights + at, mask=inside, other=0.0)
        direction = mean / mean_start / (tl.sqrt_rn(square / square_start) + epsilon)
        weight = weight * keep - lr * direction
        tl.store(weights + at, weight, mask=inside)
        if ROUNDS:
            tl.store(rounded + at, weight.to(rounded.dtype.element_ty), mask=inside)
        root = tl.sqrt_rn(square)
        mean_code = _code(tl.div_rn(mean, mean_unit), signed_middles)
        # Above 0 it stays above: it divides.
        root_code = tl.maximum(_code(tl.div_rn(root, root_unit), unsigned_middles), (root > 0).to(tl.int32))
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
def _code(x, middles):
    """How many of 255 rising numbers are below each of `x`, by halving."""
    below = tl.zeros_like(x).to(tl.int32)
    for bit in tl.static_range(8):
        half = 128 >> bit
        below = tl.where(tl.load(middles + below + (half - 1)) < x, below + half, below)
    return below
