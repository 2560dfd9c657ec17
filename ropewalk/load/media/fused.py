"""Windows of a whole batch -> tensors of the model by one kernel of the GPU: resampled, recoloured and normalised while
they are in registers.

The batched matrix products of `device.py` make large intermediates (a copy of all pixels as half precision, a dense
matrix of weights for every sample and side); here pixels are read once from memory and results are written once. A
lane makes one pixel of the result: it adds up what lies under the triangle, whose weights it computes as it goes. That
is a few dozen products of a pixel where images become smaller by two; decoders shrink what is much larger beforehand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS = 256
"""Pixels of the result that a program makes."""


def window_images(
    pixels: Tensor,
    starts: Tensor,
    strides: Tensor,
    windows: Tensor,
    *,
    size: tuple[int, int],
    colours: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """B C h w of `dtype`; without `scale` and `shift` rounded levels as uint8.

    Sample i begins at byte `starts[i]` of `pixels`, and its rows are `strides[i]` bytes apart (both int64): packed
    images, or a block. `windows` is 9 B, float64: box and bounds in pixels of the sample (top, left, bottom, right
    each), and 1 where left and right change places. Equal to the CPU's within 0.02 of a level.
    """
    assert (scale is None) == (shift is None), "levels are scaled and shifted, or neither"
    batch, (height, width) = len(starts), size
    out = torch.empty((batch, 3, height, width), dtype=torch.uint8 if scale is None else dtype, device=pixels.device)
    nothing = windows  # stands for what is not read
    _images[(batch, triton.cdiv(height * width, PIXELS))](
        *(pixels, starts, strides, windows),
        *(nothing if colours is None else colours, nothing if scale is None else scale),
        *(nothing if shift is None else shift, out, batch, height, width),
        COLOURS=colours is not None,
        NUMBERS=scale is not None,
        PIXELS=PIXELS,
        num_warps=4,
    )
    return out


@triton.jit
def _images(
    pixels,
    starts,
    strides,
    windows,
    colours,
    scales,
    shifts,
    out,
    batch,
    height,
    width,
    COLOURS: tl.constexpr,
    NUMBERS: tl.constexpr,
    PIXELS: tl.constexpr,
):
    sample = tl.program_id(0)
    place = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    here = place < height * width
    row, column = place // width, place % width
    flipped = tl.load(windows + 8 * batch + sample) > 0.5
    column = tl.where(flipped, width - 1 - column, column)
    y, y_first, y_last, y_support, y_taps = _reach(windows, 0, sample, batch, row, height)
    x, x_first, x_last, x_support, x_taps = _reach(windows, 1, sample, batch, column, width)
    stride = tl.load(strides + sample)
    source = pixels + tl.load(starts + sample) + y_first.to(tl.int64) * stride + x_first * 3
    red = tl.zeros([PIXELS], tl.float32)
    green = tl.zeros([PIXELS], tl.float32)
    blue = tl.zeros([PIXELS], tl.float32)
    total = tl.zeros([PIXELS], tl.float32)
    for below in range(y_taps):
        y_weight = tl.maximum(1 - tl.abs(below - y) / y_support, 0)
        y_weight = tl.where(y_first + below < y_last, y_weight, 0)
        for beside in range(x_taps):
            x_weight = tl.maximum(1 - tl.abs(beside - x) / x_support, 0)
            weight = tl.where(x_first + beside < x_last, x_weight, 0) * y_weight
            reads = here & (weight > 0)
            at = source + below * stride + beside * 3
            red += weight * tl.load(at, mask=reads, other=0).to(tl.float32)
            green += weight * tl.load(at + 1, mask=reads, other=0).to(tl.float32)
            blue += weight * tl.load(at + 2, mask=reads, other=0).to(tl.float32)
            total += weight
    red, green, blue = red / total, green / total, blue / total
    if COLOURS:
        matrix = colours + sample * 12
        mixed_red = _mixed(red, green, blue, matrix)
        mixed_green = _mixed(red, green, blue, matrix + 4)
        blue = _mixed(red, green, blue, matrix + 8)
        red, green = mixed_red, mixed_green
    plane = height * width
    into = out + sample.to(tl.int64) * 3 * plane + place
    if NUMBERS:
        red = red * tl.load(scales) + tl.load(shifts)
        green = green * tl.load(scales + 1) + tl.load(shifts + 1)
        blue = blue * tl.load(scales + 2) + tl.load(shifts + 2)
    else:
        red, green, blue = red + 0.5, green + 0.5, blue + 0.5
    tl.store(into, red.to(out.dtype.element_ty), mask=here)
    tl.store(into + plane, green.to(out.dtype.element_ty), mask=here)
    tl.store(into + 2 * plane, blue.to(out.dtype.element_ty), mask=here)


@triton.jit
def _reach(windows, side, sample, batch, place, size):
    """Along one side: (the centre of a result, counted from the middle of the first source pixel it reads; that pixel;
    the one after the last; half the triangle's base; how many it reads at most)."""
    start = tl.load(windows + side * batch + sample)
    stop = tl.load(windows + (side + 2) * batch + sample)
    low = tl.floor(tl.load(windows + (side + 4) * batch + sample))
    high = tl.ceil(tl.load(windows + (side + 6) * batch + sample))
    scale = (stop - start) / size
    support = tl.maximum(scale, 1.0)
    # In double precision, as far as differences of large coordinates go.
    centre = start + (place + 0.5) * scale
    first = tl.maximum(tl.floor(centre - support + 0.5), low)
    last = tl.minimum(tl.floor(centre + support + 0.5), high)
    taps = tl.ceil(2 * support).to(tl.int32) + 1
    return (centre - first - 0.5).to(tl.float32), first.to(tl.int32), last.to(tl.int32), support.to(tl.float32), taps


@triton.jit
def _mixed(red, green, blue, row):
    """One channel after a map of colours, held within the levels."""
    value = tl.load(row) * red + tl.load(row + 1) * green + tl.load(row + 2) * blue + tl.load(row + 3)
    return tl.minimum(tl.maximum(value, 0.0), 255.0)
