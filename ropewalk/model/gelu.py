"""GELU of a projection without its bias, which is added here.

Shapes: ... any, F hidden features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu(inner: Tensor, bias: Tensor | None, *, tanh: bool) -> Tensor:
    """GELU of `inner` plus `bias`, ... F; by tanh as an approximation, or exactly."""
    if inner.is_cuda and inner.dtype != torch.float64:
        out: Tensor = _Gelu.apply(inner, bias, tanh)
        return out
    return gelu_plainly(inner, bias, tanh=tanh)


def gelu_plainly(inner: Tensor, bias: Tensor | None, *, tanh: bool) -> Tensor:
    """The same in plain steps."""
    inner = inner if bias is None else inner + bias.to(inner.dtype)
    return F.gelu(inner, approximate="tanh" if tanh else "none")


class _Gelu(torch.autograd.Function):
    """One kernel each way; the backward one adds up the gradient by the bias on its way."""

    @staticmethod
    def forward(ctx: Any, inner: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        from .kernels.gelu import gelu

        inner = inner.contiguous()
        ctx.save_for_backward(inner, bias)
        ctx.tanh = tanh
        return gelu(inner, bias, tanh)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        from .kernels.gelu import gelu_backward

        inner, bias = ctx.saved_tensors
        by_inner, parts = gelu_backward(inner, bias, gradient.contiguous(), ctx.tanh)
        return by_inner, None if bias is None else parts.sum(dim=0).to(bias.dtype), None
