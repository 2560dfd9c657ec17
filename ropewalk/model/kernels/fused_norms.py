"""Fused RMS and layer norms with residual add, and their backward pass including the residual stream's gradient.

Twin: `normed_plainly` of model/norms.py. Each program handles one row, or strided rows when it sums over rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROCESSORS = 132
"""Of an H200. The backward pass launches as many programs as fit at a time, each of which sums over its share of the
rows: more would wait for the first ones to end."""
NUMBERS, NUMBERS_BACK = 16, 16
"""Elements of a row per thread, forward and backward: fewer threads per row synchronize less; with more elements
backward, the sums do not fit into registers."""


@torch.library.custom_op(
    "ropewalk::norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? added, Tensor? shift, Tensor weight, Tensor? bias, float epsilon, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def norm(
    x: Tensor,
    added: Tensor | None,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`x` plus `added` plus `shift`, broadcast over rows (nothing if nothing is added); its RMS norm times `weight`, or
    with a bias its layer norm. For the backward pass also returns the mean of each row (layer norm only) and the
    reciprocal root mean square."""
    stream, out, means, scales = _room(x, added, shift, weight, bias, epsilon, dtype)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    _norm[(x.numel() // width,)](
        x,
        x if added is None else added,
        weight if shift is None else shift,
        weight,
        weight if bias is None else bias,
        stream,
        out,
        means,
        scales,
        width,
        epsilon,
        ADDED=added is not None,
        SHIFTED=shift is not None,
        CENTRED=bias is not None,
        BLOCK=block,
        num_warps=_warps(block, NUMBERS),
    )
    return stream, out, means, scales


@norm.register_fake
def _room(
    x: Tensor,
    added: Tensor | None,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocates the result."""
    rows = x.numel() // x.shape[-1]
    means, scales = (x.new_empty(rows if wanted else 0, dtype=torch.float32) for wanted in (bias is not None, True))
    stream = x.new_empty(0) if added is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, added.dtype))
    return stream, x.new_empty(x.shape, dtype=dtype), means, scales


@torch.library.custom_op(
    "ropewalk::norm_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor means, Tensor scales, Tensor by_norm, Tensor? by_stream, bool shifted,"
    " bool streams) -> (Tensor, Tensor)",
)
def norm_backward(
    x: Tensor,
    weight: Tensor,
    means: Tensor,
    scales: Tensor,
    by_norm: Tensor,
    by_stream: Tensor | None,
    shifted: bool,
    streams: bool,
) -> tuple[Tensor, Tensor]:
    """Gradient of `x`, given those of the norm's output and of the residual stream; and partial sums over rows, to be
    reduced: gradients of `weight`, of the bias if present, of the shift if `shifted`, and the sum of `by_stream` if
    `streams`."""
    by_x, parts = _gradients(x, weight, means, scales, by_norm, by_stream, shifted, streams)
    width = x.shape[-1]
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    _norm_backward[(parts.shape[1],)](
        x,
        weight,
        means,
        scales,
        by_norm,
        x if by_stream is None else by_stream,
        by_x,
        parts,
        rows,
        width,
        CENTRED=means.numel() > 0,
        PASSING=by_stream is not None,
        SHIFTED=shifted,
        STREAMS=streams,
        BLOCK=block,
        num_warps=_warps(block, NUMBERS_BACK),
    )
    return by_x, parts


@norm_backward.register_fake
def _gradients(
    x: Tensor,
    weight: Tensor,
    means: Tensor,
    scales: Tensor,
    by_norm: Tensor,
    by_stream: Tensor | None,
    shifted: bool,
    streams: bool,
) -> tuple[Tensor, Tensor]:
    """Allocates the result."""
    sums = 1 + (means.numel() > 0) + shifted + streams
    width = x.shape[-1]
    programs = PROCESSORS * min(6, max(1, 20 // _warps(triton.next_power_of_2(width), NUMBERS_BACK)))
    parts = x.new_empty(sums, programs, width, dtype=torch.float32)
    return torch.empty_like(x), parts


def _warps(block: int, numbers: int) -> int:
    return min(max(block // (32 * numbers), 1), 16)


@triton.jit
def _add_pairs(a, b, c, d):
    """Two sums in one reduction: threads synchronize once."""
    return a + c, b + d


@triton.jit
def _norm(
    rows,
    added,
    shifts,
    weights,
    biases,
    stream,
    out,
    means,
    scales,
    width,
    epsilon,
    ADDED: tl.constexpr,
    SHIFTED: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(rows + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        x += tl.load(added + row * width + at, mask=inside, other=0.0).to(tl.float32)
        if SHIFTED:
            x += tl.load(shifts + at, mask=inside, other=0.0).to(tl.float32)
        # Normalizes the rounded sum, as later layers read it.
        rounded = x.to(stream.dtype.element_ty)
        tl.store(stream + row * width + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, axis=0) / width
        x = tl.where(inside, x - mean, 0.0)
        tl.store(means + row, mean)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon)
    tl.store(scales + row, scale)
    y = x * scale * weight
    if CENTRED:
        y += tl.load(biases + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    rows,
    weights,
    means,
    scales,
    by_norm,
    by_stream,
    by_rows,
    parts,
    count,
    width,
    CENTRED: tl.constexpr,
    PASSING: tl.constexpr,
    SHIFTED: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part, programs = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    by_weight = tl.zeros([BLOCK], tl.float32)
    by_bias = tl.zeros([BLOCK], tl.float32)
    by_shift = tl.zeros([BLOCK], tl.float32)
    streamed = tl.zeros([BLOCK], tl.float32)
    for row in range(part, count, programs):
        place = tl.cast(row, tl.int64) * width + at
        x = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(by_norm + place, mask=inside, other=0.0).to(tl.float32)
        if PASSING:
            passing = tl.load(by_stream + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        if CENTRED:
            x = x - tl.load(means + row)
        unit = tl.where(inside, x * scale, 0.0)
        by_weight += gradient * unit
        if CENTRED:
            by_bias += gradient
        gradient = gradient * weight
        if CENTRED:
            along, total = tl.reduce((gradient * unit, gradient), 0, _add_pairs)
            inner = gradient - unit * (along / width) - total / width
        else:
            inner = gradient - unit * (tl.sum(gradient * unit, axis=0) / width)
        inner *= scale
        if PASSING:
            inner += passing
        if STREAMS:
            streamed += passing
        if SHIFTED:
            by_shift += inner
        tl.store(by_rows + place, inner.to(by_rows.dtype.element_ty), mask=inside)
    parts += part * width + at
    tl.store(parts, by_weight, mask=inside)
    if CENTRED:
        parts += programs * width
        tl.store(parts, by_bias, mask=inside)
    if SHIFTED:
        parts += programs * width
        tl.store(parts, by_shift, mask=inside)
    if STREAMS:
        tl.store(parts + programs * width, streamed, mask=inside)
