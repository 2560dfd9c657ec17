"""Norms of the residual stream, fused on GPUs with the adjacent additions.

Shapes: ... any, C width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .components import NORM_WIDTH


class RmsNorm(nn.RMSNorm):
    """RMS norm over the width, with a scale."""

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return _kernel(x, self) if has_norm_kernel(x, self) else normed_plainly(x, self)


class LayerNorm(nn.LayerNorm):
    """Layer norm over the width, with a scale and a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return _kernel(x, self) if has_norm_kernel(x, self) else normed_plainly(x, self)


def passing(
    x: Tensor,
    norm: nn.Module,
    *,
    added: Tensor | None = None,
    bias: Tensor | None = None,
    later: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(x + `added` + `bias`, its norm); one kernel each for forward and backward on a GPU.

    The backward kernel reads the full gradient of the stream, so it also sums the gradients of two biases: of `bias`
    (already included in `x`, detached, if nothing is `added`), and of `later`, which is added to the stream after this
    norm. Both require `has_norm_kernel`.
    """
    if has_norm_kernel(x, norm):
        assert isinstance(norm, RmsNorm | LayerNorm)
        scale, shift = norm.weight, getattr(norm, "bias", None)
        both: tuple[Tensor, Tensor] = _Passing.apply(x, added, bias, later, scale, shift, norm.eps)
        return both
    assert bias is None
    assert later is None
    x = x if added is None else x + added
    return x, norm(x)


def has_norm_kernel(x: Tensor, norm: nn.Module) -> bool:
    """Whether a GPU kernel normalizes `x`."""
    known = isinstance(norm, RmsNorm | LayerNorm) and x.shape[-1] <= NORM_WIDTH
    return known and x.is_cuda and x.dtype != torch.float64


def normed_plainly(x: Tensor, norm: RmsNorm | LayerNorm) -> Tensor:
    """The norm of `x` in plain PyTorch."""
    if isinstance(norm, LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return F.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps)


def _kernel(x: Tensor, norm: RmsNorm | LayerNorm) -> Tensor:
    out: Tensor = _Normed.apply(x, norm.weight, getattr(norm, "bias", None), norm.eps)
    return out


class _Normed(torch.autograd.Function):
    """One kernel each for forward and backward; layer norm has a bias, RMS norm none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        return _forward(ctx, x, None, None, weight, bias, epsilon, dtype=x.dtype)[1]

    @staticmethod
    def backward(ctx: Any, by_norm: Tensor) -> tuple[Tensor | None, ...]:
        by_x, sums = _gradients(ctx, by_norm, None)
        return by_x, *sums, *([None] if len(sums) == 1 else []), None


class _Passing(torch.autograd.Function):
    """`passing` with kernels. Inductor's backward of the plain ops reads the stream and its gradient once more."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        added_bias: Tensor | None,
        later_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.dtypes = x.dtype, None if added is None else added.dtype
        # The norm feeds a matmul.
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return _forward(ctx, x, added, added_bias, weight, bias, epsilon, later_bias, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, by_stream: Tensor, by_norm: Tensor) -> tuple[Tensor | None, ...]:
        by_sum, sums = _gradients(ctx, by_norm, by_stream)
        by_x, by_added = (None if dtype is None else by_sum.to(dtype) for dtype in ctx.dtypes)
        by_weight, by_bias, by_added_bias, by_later_bias = (sums.pop(0) if there else None for there in ctx.there)
        return by_x, by_added, by_added_bias, by_later_bias, by_weight, by_bias, None


def _forward(
    ctx: Any,
    x: Tensor,
    added: Tensor | None,
    added_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    later_bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The sum, and its norm in `dtype`."""
    from .kernels.fused_norms import norm

    x, added = x.contiguous(), None if added is None else added.contiguous()
    stream, out, means, scales = norm(x, added, added_bias, weight, bias, epsilon, dtype)
    ctx.save_for_backward(x if added is None else stream, weight, means, scales)
    ctx.there = tuple(each is not None for each in (weight, bias, added_bias, later_bias))
    return (x.view_as(x) if added is None else stream), out


def _gradients(ctx: Any, by_norm: Tensor, by_stream: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Gradient of the sum, and those of the vectors in `ctx.there`, in order."""
    from .kernels.fused_norms import norm_backward

    x, weight, means, scales = ctx.saved_tensors
    by_stream = None if by_stream is None else by_stream.contiguous()
    by_x, parts = norm_backward(x, weight, means, scales, by_norm.contiguous(), by_stream, *ctx.there[2:])
    # Here rather than beside the kernel: compiled, this sum takes a quarter of torch's eager time.
    return by_x, list(parts.sum(dim=1).to(weight.dtype).unbind(0))
