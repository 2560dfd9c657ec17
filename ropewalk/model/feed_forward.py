"""Feed-forward activation functions, and f(gate) * up, with one GPU kernel each for forward and backward.

Shapes: ... any, F hidden features; the last dimension of a gated `inner` alternates `chunk` features of gate and of up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .components import GATE_CHUNK


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU."""
    positive = F.relu(x)
    # A product, because autocast would compute a power in float32.
    return positive * positive


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU, tanh approximation."""
    return F.gelu(x, approximate="tanh")


def gelu(inner: Tensor, bias: Tensor | None, *, tanh: bool) -> Tensor:
    """GELU of `inner` plus `bias`, ... F; exact or tanh approximation."""
    if inner.is_cuda and inner.dtype != torch.float64:
        out: Tensor = _Gelu.apply(inner, bias, tanh)
        return out
    return gelu_plainly(inner, bias, tanh=tanh)


def gelu_plainly(inner: Tensor, bias: Tensor | None, *, tanh: bool) -> Tensor:
    """`gelu` in plain PyTorch."""
    inner = inner if bias is None else inner + bias.to(inner.dtype)
    return F.gelu(inner, approximate="tanh" if tanh else "none")


def gated(inner: Tensor, activation: Callable[[Tensor], Tensor], *, chunk: int) -> Tensor:
    """`activation` of gate, times up; ... F."""
    if activation is F.silu and inner.is_cuda and chunk >= GATE_CHUNK and inner.dtype != torch.float64:
        out: Tensor = _Swiglu.apply(inner, chunk)
        return out
    return gated_plainly(inner, activation, chunk=chunk)


def gated_plainly(inner: Tensor, activation: Callable[[Tensor], Tensor], *, chunk: int) -> Tensor:
    """`gated` in plain PyTorch."""
    gate, up = inner.unflatten(-1, (-1, 2, chunk)).unbind(-2)
    return (activation(gate) * up).flatten(-2)


class _Gelu(torch.autograd.Function):
    """One kernel each for forward and backward; the latter also sums the bias gradient."""

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


class _Swiglu(torch.autograd.Function):
    """One kernel each for forward and backward; saves only `inner`. Inductor's backward of the plain ops takes 2.1
    times as long (H200, 32,768 tokens of 2 x 5,632 features)."""

    @staticmethod
    def forward(ctx: Any, inner: Tensor, chunk: int) -> Tensor:
        from .kernels.swiglu import swiglu

        inner = inner.contiguous()
        ctx.save_for_backward(inner)
        ctx.chunk = chunk
        return swiglu(inner, chunk)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        from .kernels.swiglu import swiglu_backward

        (inner,) = ctx.saved_tensors
        return swiglu_backward(inner, gradient.contiguous(), ctx.chunk), None
