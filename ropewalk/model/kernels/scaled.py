"""A tensor times a number that the device holds, as another type. Twin: `(x * by).to(dtype)`.

What torch does instead reads the number for every element: 0.5 TB/s, and a pass of its own for the type (H200).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def scaled(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """The contiguous `x` times `by`."""
    out = torch.empty_like(x, dtype=dtype)
    _scaled[(triton.cdiv(x.numel(), BLOCK),)](x, by, out, x.numel(), BLOCK=BLOCK, num_warps=8)
    return out


@triton.jit
def _scaled(xs, by, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(xs + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(by).to(tl.float32)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=at < count)
