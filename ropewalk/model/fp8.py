"""Matrix products in 8-bit floating point: three of them a linear map, forward and backward.

Each operand is divided by its largest magnitude, so that it fills the range of its type, and rounded: inputs and
weights to e4m3 (three bits of mantissa), gradients to e5m2, whose range is wider (Micikevicius et al. 2022). The tensor
cores of Hopper add up products of rows with rows only, so that an operand is needed in both orders: one kernel reads it
once and writes both. What is kept for the backward pass is 8-bit too.

Shapes: N tokens, K inputs, M outputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def product(x: Tensor, weight_MK: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b as `torch.nn.functional.linear`, with 8-bit operands; results and gradients have the type of `x`."""
    y: Tensor = _Product.apply(x.flatten(0, -2), weight_MK)
    y = y.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


def rounded(x_RC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`x_RC` over its scale in 8 bits, as it is and transposed, and the scale: one float32 number."""
    # At least so much that a tensor of zeros is not divided by zero.
    scale = torch.linalg.vector_norm(x_RC, math.inf).float().clamp(min=1e-30) / torch.finfo(dtype).max
    if x_RC.is_cuda:
        from .kernels.rounding import both_orders

        return *both_orders(x_RC.contiguous(), scale, dtype), scale
    return *both_orders_plainly(x_RC, scale, dtype), scale


def both_orders_plainly(x_RC: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale rounded to `dtype`, as it is and transposed."""
    most = torch.finfo(dtype).max
    narrow = (x_RC.float() / scale).clamp(-most, most).to(dtype)
    return narrow, narrow.t().contiguous()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor) -> Tensor:
        x, x_t, x_scale = rounded(x_NK, E4M3)
        weight, weight_t, weight_scale = rounded(weight_MK, E4M3)
        ctx.save_for_backward(x_t, x_scale, weight_t, weight_scale)
        return _times(x, weight, x_scale, weight_scale, dtype=x_NK.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient_NM: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_t, x_scale, weight_t, weight_scale = ctx.saved_tensors
        gradient, gradient_t, scale = rounded(gradient_NM.contiguous(), E5M2)
        to_x, to_weight = ctx.needs_input_grad
        dtype = gradient_NM.dtype
        return (
            _times(gradient, weight_t, scale, weight_scale, dtype=dtype, fast=False) if to_x else None,
            _times(gradient_t, x_t, scale, x_scale, dtype=dtype, fast=False) if to_weight else None,
        )


def _times(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, dtype: torch.dtype, fast: bool) -> Tensor:
    """a b^T of row-major operands, times both scales. `fast` adds up in fewer bits inside the tensor cores."""
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)
