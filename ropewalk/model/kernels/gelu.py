"""Fused GELU of input plus bias, and backward pass with the bias gradient. Twin: `gelu_plainly`, model/feed_forward.py.

Each program handles some columns of some rows and sums the gradients of its columns as it writes them: the bias
gradient needs no extra pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, TURNS = 8, 128, 32
"""Tile sizes, and tiles per program."""


@torch.library.custom_op("ropewalk::gelu", mutates_args=(), schema="(Tensor x, Tensor? bias, bool tanh) -> Tensor")
def gelu(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """GELU of the contiguous `x` plus `bias`, with tanh or the error function."""
    out = _like(x, bias, tanh)
    width = x.shape[-1]
    rows = x.numel() // width
    _gelu[_grid(rows, width)](
        x,
        x if bias is None else bias,
        out,
        rows,
        width,
        TANH=tanh,
        BIASED=bias is not None,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        TURNS=TURNS,
        num_warps=4,
    )
    return out


@gelu.register_fake
def _like(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """Allocates the result."""
    return torch.empty_like(x)


@torch.library.custom_op(
    "ropewalk::gelu_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor? bias, Tensor gradient, bool tanh) -> (Tensor, Tensor)",
)
def gelu_backward(x: Tensor, bias: Tensor | None, gradient: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradient of `x`, given that of the result; and that of `bias`, if present, as partial sums to be reduced."""
    by_x, parts = _room(x, bias, gradient, tanh)
    width = x.shape[-1]
    rows = x.numel() // width
    _gelu_backward[_grid(rows, width)](
        x,
        x if bias is None else bias,
        gradient,
        by_x,
        parts,
        rows,
        width,
        TANH=tanh,
        BIASED=bias is not None,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        TURNS=TURNS,
        num_warps=4,
    )
    return by_x, parts


@gelu_backward.register_fake
def _room(x: Tensor, bias: Tensor | None, gradient: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Allocates the result."""
    width = x.shape[-1]
    parts = _grid(x.numel() // width, width)[0]
    return torch.empty_like(x), x.new_empty(parts, 0 if bias is None else width, dtype=torch.float32)


def _grid(rows: int, width: int) -> tuple[int, int]:
    return triton.cdiv(rows, ROWS * TURNS), triton.cdiv(width, COLUMNS)


@triton.jit
def _share(x, TANH: tl.constexpr):
    """GELU(x) / x, between 0 and 1."""
    if TANH:
        # (1 + tanh z) / 2 = 1 / (1 + exp(-2 z)), in powers of two; reciprocal as rsqrt of a square, one instruction.
        whole = 1 + tl.exp2(x * (-2.302208198 - 0.1029432396 * x * x))
        share = tl.rsqrt(whole * whole)
    else:
        share = 0.5 + 0.5 * tl.erf(0.7071067811865476 * x)
    return share


@triton.jit
def _slope(x, TANH: tl.constexpr):
    """Derivative of GELU at x."""
    share = _share(x, TANH)
    if TANH:
        slope = share * (1 + (1 - share) * (x * (1.5957691216 + 0.2140644488 * x * x)))
    else:
        slope = share + x * (0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x))
    return slope


@triton.jit
def _gelu(
    xs,
    biases,
    out,
    rows,
    width,
    TANH: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    bias = tl.load(biases + column, mask=column < width, other=0.0).to(tl.float32) if BIASED else 0.0
    first = tl.program_id(0) * (TURNS * ROWS)
    xs += first.to(tl.int64) * width
    out += first.to(tl.int64) * width
    for turn in range(TURNS):
        row = turn * ROWS + tl.arange(0, ROWS)[:, None]
        here = (first + row < rows) & (column < width)
        at = row * width + column
        x = tl.load(xs + at, mask=here, other=0.0).to(tl.float32) + bias
        tl.store(out + at, (x * _share(x, TANH)).to(out.dtype.element_ty), mask=here)


@triton.jit
def _gelu_backward(
    xs,
    biases,
    gradients,
    by_x,
    parts,
    rows,
    width,
    TANH: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    bias = tl.load(biases + column, mask=column < width, other=0.0).to(tl.float32) if BIASED else 0.0
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    first = tl.program_id(0) * (TURNS * ROWS)
    xs += first.to(tl.int64) * width
    gradients += first.to(tl.int64) * width
    by_x += first.to(tl.int64) * width
    for turn in range(TURNS):
        row = turn * ROWS + tl.arange(0, ROWS)[:, None]
        here = (first + row < rows) & (column < width)
        at = row * width + column
        x = tl.load(xs + at, mask=here, other=0.0).to(tl.float32) + bias
        gradient = tl.load(gradients + at, mask=here, other=0.0).to(tl.float32)
        gradient *= _slope(x, TANH)
        total += gradient
        tl.store(by_x + at, gradient.to(by_x.dtype.element_ty), mask=here)
    if BIASED:
        at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(parts + tl.program_id(0) * width + at, tl.sum(total, axis=0), mask=at < width)
