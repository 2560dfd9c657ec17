"""Windows of decoded images -> pixels of the result, on the CPU: compiled kernels that let other threads run. No torch.

A result pixel is the mean of the source under a triangle as wide as the pixel is in the source (never narrower than
one source pixel): bilinear with antialiasing, as torchvision and Pillow define it, for windows of whole pixels within
one level of both.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import njit

Pixels = npt.NDArray[np.uint8]
Box = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]
Taps = tuple[Ints, Ints, Weights]
"""Of each result along one side: its first source pixel, how many it reads, their weights."""
Sides = tuple[Taps, Taps]
"""Rows and columns."""

_ONE, _TWO, _THREE = np.uintp(1), np.uintp(2), np.uintp(3)


@njit(cache=True, nogil=True)
def extents(bounds: Box, boxes: Box, height: int, width: int) -> Ints:
    """The source pixels that resampling each of `boxes` (B 4) to `height` x `width` reads: top, left, bottom, right."""
    spans = np.empty((len(boxes), 4), np.int64)
    for sample in range(len(boxes)):
        bound, box = bounds[sample], boxes[sample]
        spans[sample, 0], spans[sample, 2] = _reach(box[0], box[2], bound[0], bound[2], height)
        spans[sample, 1], spans[sample, 3] = _reach(box[1], box[3], bound[1], bound[3], width)
    return spans


@njit(cache=True, nogil=True)
def copy_window(pixels: Pixels, span: Ints, out: Pixels) -> None:
    """The pixels of `span` into the upper left corner of `out`, which may be larger; the rest of it is not written."""
    top, left, bottom, right = span
    # Rows as one line of bytes: assigned pixel by pixel a window of 320 x 280 took 600 us, this way 8.
    source = pixels.reshape(pixels.shape[0], 3 * pixels.shape[1])
    target = out.reshape(out.shape[0], 3 * out.shape[1])
    for row in range(bottom - top):
        line = source[top + row, 3 * left : 3 * right]
        into = target[row, : len(line)]
        for place in range(len(line)):
            into[place] = line[place]


@njit(cache=True, nogil=True)
def resample_levels(pixels: Pixels, bounds: Box, box: Box, flip: bool, out: Pixels) -> None:
    """The window `box` of `pixels`, read within `bounds`, as rounded levels: `out` is uint8 H W 3."""
    taps = _sides(bounds, box, out.shape[0], out.shape[1])
    line, values = _rows(taps[1], out.shape[1])
    target = out.reshape(out.shape[0], 3 * out.shape[1])
    for row in range(out.shape[0]):
        # A half rounds to the nearest level: weights sum to one.
        _resample_row(pixels, taps, row, flip, np.float32(0.5), line, values)
        into = target[row]
        for place in range(len(into)):
            into[place] = np.uint8(values[place])


@njit(cache=True, nogil=True)
def resample_numbers(
    pixels: Pixels, bounds: Box, box: Box, flip: bool, colour: Weights, scale: Weights, shift: Weights, out: Weights
) -> None:
    """The same as numbers: `out` is float32 3 H W, levels times `scale` plus `shift` by channel.

    Before that, colours are mapped by the matrix `colour` (3 x 4, the last column added) and held within 0..255; an
    empty one leaves them as they are.
    """
    height, width = out.shape[1], out.shape[2]
    taps = _sides(bounds, box, height, width)
    line, values = _rows(taps[1], width)
    for row in range(height):
        _resample_row(pixels, taps, row, flip, np.float32(0.0), line, values)
        if len(colour):
            _map_colours(values, colour)
        for channel in range(3):
            factor, offset = scale[channel], shift[channel]
            source, into = values[channel:], out[channel, row]
            for column in range(len(into)):
                into[column] = source[3 * column] * factor + offset


@njit(cache=True, nogil=True)
def _resample_row(
    pixels: Pixels, taps: Sides, row: int, flip: bool, base: np.float32, line: Weights, values: Weights
) -> None:
    """One row of the result as `values`, red green blue by pixel, plus `base`; `line` is room for sums of columns."""
    (y_first, y_count, y_weight), (x_first, x_count, x_weight) = taps
    left = 3 * x_first[0]
    source = pixels.reshape(pixels.shape[0], 3 * pixels.shape[1])
    # Columns first: a row of sums is contiguous, so this inner loop, the longest, is vectorised.
    line[:] = base
    for tap in range(y_count[row]):
        weight = y_weight[row, tap]
        above = source[y_first[row] + tap, left : left + len(line)]
        for place in range(len(above)):
            line[place] += weight * np.float32(above[place])
    width = len(x_first)
    for column in range(width):
        red = green = blue = np.float32(0.0)
        # Unsigned: numba asks of every signed index whether it counts from the end, a third of the time here.
        at = np.uintp(3 * x_first[column] - left)
        for tap in range(x_count[column]):
            weight = x_weight[column, tap]
            red += weight * line[at]
            green += weight * line[at + _ONE]
            blue += weight * line[at + _TWO]
            at += _THREE
        target = np.uintp(3 * (width - 1 - column if flip else column))
        values[target] = red
        values[target + _ONE] = green
        values[target + _TWO] = blue


@njit(cache=True, nogil=True)
def _map_colours(values: Weights, colour: Weights) -> None:
    low, high = np.float32(0.0), np.float32(255.0)
    for place in range(0, len(values), 3):
        red, green, blue = values[place], values[place + 1], values[place + 2]
        for channel in range(3):
            mixed = colour[channel, 0] * red + colour[channel, 1] * green + colour[channel, 2] * blue
            values[place + channel] = min(max(mixed + colour[channel, 3], low), high)


@njit(cache=True, nogil=True)
def _rows(columns: Taps, width: int) -> tuple[Weights, Weights]:
    """Room for one row of sums and one of the result."""
    first, count, _ = columns
    line = np.empty(3 * (first[width - 1] + count[width - 1] - first[0]), np.float32)
    return line, np.empty(3 * width, np.float32)


@njit(cache=True, nogil=True)
def _sides(bounds: Box, box: Box, height: int, width: int) -> Sides:
    """What each row and each column of the result reads."""
    return _taps(box[0], box[2], bounds[0], bounds[2], height), _taps(box[1], box[3], bounds[1], bounds[3], width)


@njit(cache=True, nogil=True)
def _reach(start: float, stop: float, low: float, high: float, size: int) -> tuple[int, int]:
    """First and last (exclusive) source pixel that any of `size` results reads along one side."""
    scale = (stop - start) / size
    support = max(scale, 1.0)
    first = math.floor(start + 0.5 * scale - support + 0.5)
    last = math.floor(stop - 0.5 * scale + support + 0.5)
    lowest, highest = math.floor(low), math.ceil(high)
    return max(first, lowest), min(last, highest)


@njit(cache=True, nogil=True)
def _taps(start: float, stop: float, low: float, high: float, size: int) -> Taps:
    """For each of `size` results along one side: its first source pixel, how many it reads, and their weights."""
    scale = (stop - start) / size
    support = max(scale, 1.0)
    lowest, highest = math.floor(low), math.ceil(high)
    first, count = np.empty(size, np.int64), np.empty(size, np.int64)
    weight = np.zeros((size, math.ceil(2.0 * support) + 2), np.float32)
    for place in range(size):
        centre = start + (place + 0.5) * scale
        begin = max(math.floor(centre - support + 0.5), lowest)
        end = min(math.floor(centre + support + 0.5), highest)
        total = 0.0
        for source in range(begin, end):
            total += max(0.0, 1.0 - abs(source + 0.5 - centre) / support)
        for source in range(begin, end):
            share = max(0.0, 1.0 - abs(source + 0.5 - centre) / support)
            weight[place, source - begin] = share / total
        first[place], count[place] = begin, end - begin
    return first, count, weight
