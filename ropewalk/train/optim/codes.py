"""Numbers in eight bits: an index into a table of 256 values, times the largest number of the row.

The tables are the dynamic code of Dettmers et al. 2022 («8-bit Optimizers via Block-wise Quantization», section 1.3): a
decade for every leading zero bit, and what bits are left divide it evenly. So numbers near the largest of a row are
kept to 0.4 %, and those 10^-6 as large still have a code.

A row is a block of the paper. Rows are what ranks hold whole or share by columns, never in between: the codes of a
matrix are the same however it is cut, and a checkpoint of them fits any number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

DECADES = 7


@functools.lru_cache(maxsize=16)
def table(*, signed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The 256 values in rising order, from 0 or -1 to 1."""
    return torch.tensor(list(_values(signed=signed)), dtype=torch.float64).to(device, dtype)


@functools.lru_cache(maxsize=16)
def middles(*, signed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where the next code becomes the nearer one: 255 numbers."""
    wide = table(signed=signed, dtype=torch.float64, device=torch.device("cpu"))
    return ((wide[:-1] + wide[1:]) / 2).to(device, dtype)


def zero_code(*, signed: bool) -> int:
    """The code of 0."""
    return sorted(_values(signed=signed)).index(0.0)


def encode(x: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The nearest codes of `x`, whose largest absolute numbers are `scale` along the last dimension.

    Unsigned numbers above 0 never become 0: they divide.
    """
    unit = x / torch.where(scale > 0, scale, 1)
    limits = middles(signed=signed, dtype=x.dtype, device=x.device)
    codes = torch.bucketize(unit, limits, out_int32=True).to(torch.uint8)
    return codes if signed else torch.maximum(codes, (x > 0).to(torch.uint8))


def decode(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The numbers that `codes` stand for."""
    return table(signed=signed, dtype=scale.dtype, device=scale.device)[codes.int()] * scale


def _values(*, signed: bool) -> Iterator[float]:
    positive = [0.0, 1.0]
    for decade in range(DECADES):
        # The sign takes a bit of the fraction.
        steps = 2 ** (DECADES - decade - 1) * (1 if signed else 2)
        width = 0.9 / steps
        positive += [10.0**-decade * (0.1 + width * (step + 0.5)) for step in range(steps)]
    negative = [-value for value in positive if 0 < value < 1] if signed else []
    yield from sorted(negative + positive)
