"""Norms of a stream that also passes by the branch for which it is normalised.

Shapes: ... any, C width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDEST = 8192
"""Features of a row that the kernel holds."""


class RmsNorm(nn.RMSNorm):
    """Root mean square 1 over the width, times a scale."""

    def forward(self, x: Tensor) -> Tensor:
        return _kernel(x, self) if _has_kernel(x) else normed_plainly(x, self)


class LayerNorm(nn.LayerNorm):
    """Mean 0 and variance 1 over the width, times a scale, plus a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return _kernel(x, self) if _has_kernel(x) else normed_plainly(x, self)


def passing(
    x: Tensor, norm: nn.Module, *, added: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`x`, plus what is `added` and the `bias` that it lacks, as it is and normalised. On a GPU one kernel does it, and
    one the way back, where the gradients by both come together and that by the bias is added up."""
    if isinstance(norm, RmsNorm | LayerNorm) and _has_kernel(x):
        scale, shift = norm.weight, getattr(norm, "bias", None)
        both: tuple[Tensor, Tensor] = _Passing.apply(x, added, bias, scale, shift, norm.eps)
        return both
    if added is not None:
        x = x + (added if bias is None else added + bias.to(added.dtype))
    return x, norm(x)


def normed_plainly(x: Tensor, norm: RmsNorm | LayerNorm) -> Tensor:
    """`x` normalised in plain steps."""
    if isinstance(norm, LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return F.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and x.shape[-1] <= WIDEST


def _kernel(x: Tensor, norm: RmsNorm | LayerNorm) -> Tensor:
    out: Tensor = _Normed.apply(x, norm.weight, getattr(norm, "bias", None), norm.eps)
    return out


class _Normed(torch.autograd.Function):
    """One kernel each way; a layer norm has a bias, a root mean square none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        return _forward(ctx, x, None, None, weight, bias, epsilon)[1]

    @staticmethod
    def backward(ctx: Any, by_norm: Tensor) -> tuple[Tensor | None, ...]:
        by_x, by_weight, by_bias, _ = _gradients(ctx, by_norm, None)
        return by_x, by_weight, by_bias, None


class _Passing(torch.autograd.Function):
    """The same for a stream that passes by. What inductor makes of the plain steps' backward pass reads it once more,
    and the gradient that passes by too."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        added_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.dtypes = x.dtype, None if added is None else added.dtype
        return _forward(ctx, x, added, added_bias, weight, bias, epsilon)

    @staticmethod
    def backward(ctx: Any, by_stream: Tensor, by_norm: Tensor) -> tuple[Tensor | None, ...]:
        by_sum, by_weight, by_bias, by_added_bias = _gradients(ctx, by_norm, by_stream)
        by_x, by_added = (None if dtype is None else by_sum.to(dtype) for dtype in ctx.dtypes)
        return by_x, by_added, by_added_bias, by_weight, by_bias, None


def _forward(
    ctx: Any,
    x: Tensor,
    added: Tensor | None,
    added_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """The sum and its norm."""
    from .kernels.norms import norm

    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    x, added = x.contiguous(), None if added is None else added.contiguous()
    stream, out, means, scales = norm(x, added, added_bias, weight, bias, epsilon, dtype)
    ctx.save_for_backward(x if added is None else stream, weight, means, scales)
    ctx.bias_dtype = None if added_bias is None else added_bias.dtype
    return (x.view_as(x) if added is None else stream), out


def _gradients(
    ctx: Any, by_norm: Tensor, by_stream: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """By the sum, by scale, by bias and by the bias of what was added."""
    from .kernels.norms import norm_backward

    x, weight, means, scales = ctx.saved_tensors
    by_stream, shifted = None if by_stream is None else by_stream.contiguous(), ctx.bias_dtype is not None
    by_x, parts = norm_backward(x, weight, means, scales, by_norm.contiguous(), by_stream, shifted)
    # Here rather than beside the kernel: compiled, a sum of parts takes a quarter of the time of torch's.
    sums = parts.sum(dim=1)
    by_bias = sums[1].to(weight.dtype) if means.numel() else None
    return by_x, sums[0].to(weight.dtype), by_bias, sums[-1].to(ctx.bias_dtype) if shifted else None
