"""Rounds to FP8, in original and transposed layout, with one read.

Twin: `both_orders_plainly` of model/fp8.py. torch transposes FP8 at 0.3 TB/s (H200).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 128
"""Tile size."""


@torch.library.custom_op(
    "ropewalk::both_orders",
    mutates_args=(),
    schema="(Tensor x_RC, Tensor row_scale, Tensor scale, ScalarType dtype) -> (Tensor, Tensor)",
)
def both_orders(x_RC: Tensor, row_scale: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / row_scale rounded to `dtype`, and x / scale rounded and transposed. `x_RC` is contiguous; `row_scale` has one
    value per row, or is `scale`."""
    narrow, rotated = _both(x_RC, row_scale, scale, dtype)
    rows, columns = narrow.shape
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    _tile[grid](
        x_RC,
        row_scale,
        scale,
        narrow,
        rotated,
        rows,
        columns,
        BY_ROWS=row_scale.numel() > 1,
        MOST=torch.finfo(dtype).max,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=8,
    )
    return narrow, rotated


@both_orders.register_fake
def _both(x_RC: Tensor, row_scale: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocates the result."""
    rows, columns = x_RC.shape
    return x_RC.new_empty(rows, columns, dtype=dtype), x_RC.new_empty(columns, rows, dtype=dtype)


@triton.jit
def _tile(
    x,
    row_scale,
    scale,
    narrow,
    rotated,
    rows,
    columns,
    BY_ROWS: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    places = row[:, None] * columns + column[None, :]
    value = tl.load(x + places, mask=here, other=0.0).to(tl.float32)
    by_whole = _rounded(value, tl.load(scale), narrow.dtype.element_ty, MOST)
    by_row = by_whole
    if BY_ROWS:
        scales = tl.load(row_scale + row, mask=row < rows, other=1.0)
        by_row = _rounded(value, scales[:, None], narrow.dtype.element_ty, MOST)
    tl.store(narrow + places, by_row, mask=here)
    tl.store(rotated + column[:, None] * rows + row[None, :], tl.trans(by_whole), mask=tl.trans(here))


@triton.jit
def _rounded(value, scale, dtype: tl.constexpr, MOST: tl.constexpr):
    return tl.minimum(tl.maximum(value / scale, -MOST), MOST).to(dtype)
