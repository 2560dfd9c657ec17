"""FP8 matmuls: three per linear layer, forward and backward.

Each operand is scaled by its largest magnitude and rounded: inputs and weights to e4m3 (three bits of mantissa),
gradients to e5m2, whose range is wider (Micikevicius et al. 2022). The forward matmul optionally scales per row.
Hopper's tensor cores require both operands row-major along K, so an operand is needed in both layouts: one kernel reads
it once and writes both. Tensors saved for the backward pass are FP8 too.

Shapes: N tokens, K inputs, M outputs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def product(
    x: Tensor, weight_MK: Tensor, bias: Tensor | None, *, by_rows: bool = False, scale: Tensor | None = None
) -> Tensor:
    """x W^T + b as `torch.nn.functional.linear`, with FP8 operands; results and gradients have the dtype of `x`.

    Operands are scaled per tensor, or per row in the forward matmul. `scale` replaces the scale from the largest
    magnitude, for measurements that exclude its cost.
    """
    y: Tensor = _Product.apply(x.flatten(0, -2), weight_MK, by_rows, scale)
    y = y.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


def product_by_rows(x: Tensor, weight_MK: Tensor, bias: Tensor | None, *, scale: Tensor | None = None) -> Tensor:
    """`product` with a scale per row in the forward matmul: a token with outliers costs other tokens no precision."""
    return product(x, weight_MK, bias, by_rows=True, scale=scale)


class Rounded(NamedTuple):
    narrow_RC: Tensor
    """x / `row_scale`."""
    transposed_CR: Tensor
    """Transpose of x / `scale`."""
    row_scale: Tensor
    """R 1 if scaled per row; otherwise `scale`."""
    scale: Tensor
    """One float32 value."""


def rounded(x_RC: Tensor, dtype: torch.dtype, *, by_rows: bool = False, scale: Tensor | None = None) -> Rounded:
    """Rounds `x_RC` to FP8 in both layouts."""
    if scale is None:
        largest = torch.linalg.vector_norm(x_RC, math.inf, dim=1 if by_rows else None, keepdim=by_rows)
        # Above zero, for all-zero operands.
        row_scale = largest.float().clamp(min=1e-30) / torch.finfo(dtype).max
        scale = row_scale.amax() if by_rows else row_scale
    else:
        row_scale = scale.expand(len(x_RC), 1).contiguous() if by_rows else scale
    if x_RC.is_cuda:
        from .kernels.rounding import both_orders

        narrow_RC, transposed_CR = both_orders(x_RC.contiguous(), row_scale, scale, dtype)
    else:
        narrow_RC, transposed_CR = both_orders_plainly(x_RC, row_scale, scale, dtype)
    return Rounded(narrow_RC, transposed_CR, row_scale, scale)


def both_orders_plainly(x_RC: Tensor, row_scale: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / row_scale rounded to `dtype`, and x / scale rounded and transposed."""
    most = torch.finfo(dtype).max
    narrow, other = ((x_RC.float() / over).clamp(-most, most).to(dtype) for over in (row_scale, scale))
    return narrow, other.t().contiguous()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor, by_rows: bool, scale: Tensor | None) -> Tensor:
        x = rounded(x_NK, E4M3, by_rows=by_rows, scale=scale)
        weight = rounded(weight_MK, E4M3, by_rows=by_rows, scale=scale)
        ctx.save_for_backward(x.transposed_CR, x.scale, weight.transposed_CR, weight.scale)
        ctx.scale = scale
        return _times(x.narrow_RC, weight.narrow_RC, x.row_scale, weight.row_scale, dtype=x_NK.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient_NM: Tensor) -> tuple[Tensor | None, ...]:
        x_t, x_scale, weight_t, weight_scale = ctx.saved_tensors
        # Per tensor: the kernel for row scales is slower with full-precision accumulation (H200, torch 2.11).
        gradient = rounded(gradient_NM.contiguous(), E5M2, scale=ctx.scale)
        to_x, to_weight, *_ = ctx.needs_input_grad
        dtype = gradient_NM.dtype
        return (
            _times(gradient.narrow_RC, weight_t, gradient.scale, weight_scale, dtype=dtype, fast=False)
            if to_x
            else None,
            _times(gradient.transposed_CR, x_t, gradient.scale, x_scale, dtype=dtype, fast=False)
            if to_weight
            else None,
            None,
            None,
        )


def _times(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, dtype: torch.dtype, fast: bool) -> Tensor:
    """a b^T of row-major operands, times both scales. `fast` accumulates with fewer bits inside the tensor cores."""
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=dtype, use_fast_accum=fast)
