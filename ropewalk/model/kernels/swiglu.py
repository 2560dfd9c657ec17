"""Fused silu(gate) x up and its gradient. Twin: `gated_plainly` of model/feed_forward.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 8, 128
"""Tile size of the result."""


@torch.library.custom_op("ropewalk::swiglu", mutates_args=(), schema="(Tensor inner, int chunk) -> Tensor")
def swiglu(inner: Tensor, chunk: int) -> Tensor:
    """... F of ... 2 F, whose last dimension alternates `chunk` (a power of two) features of gate and of up."""
    out = _half(inner, chunk)
    features = out.shape[-1]
    rows = out.numel() // features
    _swiglu[_grid(rows, features)](inner, out, rows, features, CHUNK=chunk, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    return out


@swiglu.register_fake
def _half(inner: Tensor, chunk: int) -> Tensor:
    """Allocates the result."""
    return inner.new_empty(*inner.shape[:-1], inner.shape[-1] // 2)


@torch.library.custom_op(
    "ropewalk::swiglu_backward", mutates_args=(), schema="(Tensor inner, Tensor gradient, int chunk) -> Tensor"
)
def swiglu_backward(inner: Tensor, gradient: Tensor, chunk: int) -> Tensor:
    """Gradient of `inner`, given that of the result."""
    by_inner = torch.empty_like(inner)
    features = gradient.shape[-1]
    rows = gradient.numel() // features
    _swiglu_backward[_grid(rows, features)](
        inner, gradient, by_inner, rows, features, CHUNK=chunk, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
    )
    return by_inner


@swiglu_backward.register_fake
def _like(inner: Tensor, gradient: Tensor, chunk: int) -> Tensor:
    """Allocates the result."""
    return torch.empty_like(inner)


def _grid(rows: int, features: int) -> tuple[int, int]:
    return triton.cdiv(rows, ROWS), triton.cdiv(features, COLUMNS)


@triton.jit
def _places(rows, features, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of a program's gates and results, and their mask; ups follow the gates by one chunk."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    gate = row * (2 * features) + column // CHUNK * (2 * CHUNK) + column % CHUNK
    return gate, row * features + column, (row < rows) & (column < features)


@triton.jit
def _sigmoid(x):
    """In powers of two; reciprocal as rsqrt of a square, one instruction."""
    whole = 1 + tl.exp2(-1.4426950408889634 * x)
    return tl.rsqrt(whole * whole)


@triton.jit
def _swiglu(inner, out, rows, features, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    place, at, here = _places(rows, features, CHUNK, ROWS, COLUMNS)
    gate = tl.load(inner + place, mask=here, other=0.0).to(tl.float32)
    up = tl.load(inner + place + CHUNK, mask=here, other=0.0).to(tl.float32)
    result = gate * _sigmoid(gate) * up
    tl.store(out + at, result.to(out.dtype.element_ty), mask=here)


@triton.jit
def _swiglu_backward(
    inner, gradient, by_inner, rows, features, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    place, at, here = _places(rows, features, CHUNK, ROWS, COLUMNS)
    gate = tl.load(inner + place, mask=here, other=0.0).to(tl.float32)
    up = tl.load(inner + place + CHUNK, mask=here, other=0.0).to(tl.float32)
    outer = tl.load(gradient + at, mask=here, other=0.0).to(tl.float32)
    sigmoid = _sigmoid(gate)
    by_gate = outer * up * sigmoid * (1 + gate * (1 - sigmoid))
    by_up = outer * gate * sigmoid
    tl.store(by_inner + place, by_gate.to(by_inner.dtype.element_ty), mask=here)
    tl.store(by_inner + place + CHUNK, by_up.to(by_inner.dtype.element_ty), mask=here)
