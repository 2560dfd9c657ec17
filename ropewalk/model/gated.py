"""f(gate) x up of a fused projection.

Shapes: ... any, F hidden features; the last dimension of `inner` alternates `chunk` features of gate and of up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import GATE_CHUNK


def gated(inner: Tensor, activation: Callable[[Tensor], Tensor], *, chunk: int) -> Tensor:
    """`activation` of gate, times up, ... F."""
    if activation is F.silu and inner.is_cuda and chunk >= GATE_CHUNK and inner.dtype != torch.float64:
        out: Tensor = _Swiglu.apply(inner, chunk)
        return out
    return gated_plainly(inner, activation, chunk=chunk)


def gated_plainly(inner: Tensor, activation: Callable[[Tensor], Tensor], *, chunk: int) -> Tensor:
    """The same in plain steps."""
    gate, up = inner.unflatten(-1, (-1, 2, chunk)).unbind(-2)
    return (activation(gate) * up).flatten(-2)


class _Swiglu(torch.autograd.Function):
    """One kernel each way, which keeps `inner` alone. What inductor makes of the plain steps' backward pass takes 2.1
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
