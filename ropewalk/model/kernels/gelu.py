"""GELU of a sum with a bias, and its gradients, that by the bias included. Twin: `gelu_plainly` of model/gelu.py.

A program owns some columns of some rows and adds up the gradients of its columns as it writes them: the bias costs no
reading of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, TURNS = 8, 256, 16
"""Of a tile, and tiles of a program."""


@torch.library.custom_op("ropewalk::gelu", mutates_args=(), schema="(Tensor x, Tensor? bias, bool tanh) -> Tensor")
def gelu(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """GELU of the contiguous `x` plus `bias`, by tanh or by the error function."""
    out = _like(x, bias, tanh)
    width = x.shape[-1]
    rows = x.numel() // width
    _forward[_grid(rows, width)](
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
    """Room for the result."""
    return torch.empty_like(x)


@torch.library.custom_op(
    "ropewalk::gelu_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor? bias, Tensor gradient, bool tanh) -> (Tensor, Tensor)",
)
def gelu_backward(x: Tensor, bias: Tensor | None, gradient: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """The gradients by `x` and by `bias` (empty without one), given that by the result."""
    by_x, by_bias = _room(x, bias, gradient, tanh)
    width = x.shape[-1]
    rows = x.numel() // width
    grid = _grid(rows, width)
    parts = x.new_empty(grid[0], width if bias is not None else 0, dtype=torch.float32)
    _backward[grid](
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
    if bias is not None:
        torch.sum(parts, dim=0, out=by_bias)
    return by_x, by_bias


@gelu_backward.register_fake
def _room(x: Tensor, bias: Tensor | None, gradient: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Room for the result."""
    return torch.empty_like(x), x.new_empty(0 if bias is None else x.shape[-1], dtype=torch.float32)


def _grid(rows: int, width: int) -> tuple[int, int]:
    return triton.cdiv(rows, ROWS * TURNS), triton.cdiv(width, COLUMNS)


@triton.jit
def _share(x, TANH: tl.constexpr):
    """Of x that gets through, between 0 and 1, and what its slope needs."""
    if TANH:
        # (1 + tanh z) / 2 is the sigmoid of 2 z.
        share = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        slope = share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        share = 0.5 + 0.5 * tl.erf(0.7071067811865476 * x)
        slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return share, slope


@triton.jit
def _forward(
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
    for turn in range(TURNS):
        row = (tl.program_id(0) * TURNS + turn).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        here = (row < rows) & (column < width)
        x = tl.load(xs + row * width + column, mask=here, other=0.0).to(tl.float32) + bias
        share, _ = _share(x, TANH)
        tl.store(out + row * width + column, (x * share).to(out.dtype.element_ty), mask=here)


@triton.jit
def _backward(
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
    for turn in range(TURNS):
        row = (tl.program_id(0) * TURNS + turn).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        here = (row < rows) & (column < width)
        x = tl.load(xs + row * width + column, mask=here, other=0.0).to(tl.float32) + bias
        gradient = tl.load(gradients + row * width + column, mask=here, other=0.0).to(tl.float32)
        share, slope = _share(x, TANH)
        gradient *= share + x * slope
        total += gradient
        tl.store(by_x + row * width + column, gradient.to(by_x.dtype.element_ty), mask=here)
    if BIASED:
        at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(parts + tl.program_id(0) * width + at, tl.sum(total, axis=0), mask=at < width)
