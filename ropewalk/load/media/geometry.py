"""Where the pixels of a sample come from: crops, resizes and flips as arithmetic on boxes, before anything is decoded.
No torch.

A list of geometric transforms becomes one window of the source image per sample and one size of the result, so that
pixels are resampled once, whatever the list. It also tells the decoder beforehand how small it may decode. Since the
windows are computed here from the sample's random numbers, every executor resamples the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .streams import Drawn

Floats = npt.NDArray[np.float64]

TRIES = 10
"""How often a random window is drawn before the largest central one is taken, as torchvision does."""


@dataclass(frozen=True, slots=True)
class Windows:
    """What each sample of a batch shows of its image. Boxes are B 4: top, left, bottom, right in pixels of the source,
    which may be fractions."""

    sizes: npt.NDArray[np.int64]
    """B 2, height and width of the source images."""
    bounds: Floats
    """The part that may be read: a filter does not look beyond it."""
    boxes: Floats
    """The part that fills the result."""
    flips: npt.NDArray[np.bool_]
    """Whether left and right change places."""
    height: Floats
    """B, of the result; all equal once the list is done."""
    width: Floats
    """B, of the result."""

    def part(self, rows: slice) -> Windows:
        """Of some samples alone."""
        sources = self.sizes[rows], self.bounds[rows], self.boxes[rows]
        return Windows(*sources, self.flips[rows], self.height[rows], self.width[rows])


Step = Callable[[Windows, Drawn], Windows]


def whole(sizes: npt.NDArray[np.int64]) -> Windows:
    """All of each image, in its own size."""
    boxes = np.zeros((len(sizes), 4))
    boxes[:, 2:] = sizes
    flips = np.zeros(len(sizes), np.bool_)
    return Windows(sizes, boxes, boxes, flips, sizes[:, 0].astype(np.float64), sizes[:, 1].astype(np.float64))


def random_resized_crop(
    *, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], stage: str
) -> Step:
    """A window of a random share `scale` of the area and aspect `ratio`, resized to `size` (Szegedy et al. 2015).

    Distributed as torchvision's: whole pixels, at most ten draws, then the largest central window.
    """

    def step(windows: Windows, drawn: Drawn) -> Windows:
        high, wide = _rounded(windows)
        draws = drawn.uniforms(stage, blocks=TRIES)
        area = (high * wide)[:, None] * (scale[0] + (scale[1] - scale[0]) * draws[:, :, 0])
        low, top = math.log(ratio[0]), math.log(ratio[1])
        aspect = np.exp(low + (top - low) * draws[:, :, 1])
        widths, heights = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        fits = (widths > 0) & (heights > 0) & (widths <= wide[:, None]) & (heights <= high[:, None])
        chosen = fits.argmax(axis=1)
        rows = np.arange(len(high))
        width, height = widths[rows, chosen], heights[rows, chosen]
        left = np.floor(draws[rows, chosen, 3] * (wide - width + 1))
        above = np.floor(draws[rows, chosen, 2] * (high - height + 1))
        central = _central(high, wide, ratio)
        found = fits[rows, chosen, None]
        boxes = np.where(found, np.stack([above, left, above + height, left + width], axis=1), central)
        return _cut(windows, boxes, size=size, bound=True)

    return step


def resize(*, size: tuple[int, ...]) -> Step:
    """To `size` (height, width); one number is the shorter side, and the shape stays."""

    def step(windows: Windows, drawn: Drawn) -> Windows:
        if len(size) == 2:
            full = np.full(len(windows.flips), 1.0)
            return replace(windows, height=size[0] * full, width=size[1] * full)
        shorter = np.minimum(windows.height, windows.width)
        # The longer side is cut to whole pixels, as torchvision does; the window stays whole.
        height, width = (np.floor(size[0] * side / shorter) for side in (windows.height, windows.width))
        return replace(windows, height=height, width=width)

    return step


def centre_crop(*, size: tuple[int, int]) -> Step:
    """The middle `size` of the result so far, which must be as large."""

    def step(windows: Windows, drawn: Drawn) -> Windows:
        return _crop(windows, size, lambda room: np.rint(room / 2))

    return step


def random_crop(*, size: tuple[int, int], stage: str) -> Step:
    """A random `size` of the result so far, which must be as large."""

    def step(windows: Windows, drawn: Drawn) -> Windows:
        draws = drawn.uniforms(stage)[:, 0]
        columns = iter((draws[:, 0], draws[:, 1]))
        return _crop(windows, size, lambda room: np.floor(next(columns) * (room + 1)))

    return step


def flip(*, p: float, stage: str) -> Step:
    """Left and right change places with probability `p`."""

    def step(windows: Windows, drawn: Drawn) -> Windows:
        return replace(windows, flips=windows.flips ^ (drawn.uniforms(stage)[:, 0, 0] < p))

    return step


def reductions(windows: Windows) -> npt.NDArray[np.int64]:
    """By how much each image may be shrunk while decoding: the largest of 1, 2, 4, 8 that leaves the window at least
    as large as the result, so that no detail of the result is lost."""
    spans = windows.boxes[:, 2:] - windows.boxes[:, :2]
    room = np.minimum(spans[:, 0] / windows.height, spans[:, 1] / windows.width)
    return np.where(room >= 8, 8, np.where(room >= 4, 4, np.where(room >= 2, 2, 1))).astype(np.int64)


def reduced(windows: Windows, by: npt.NDArray[np.int64]) -> Windows:
    """The same windows on images shrunk `by`, as decoders shrink: sides divided and rounded up."""
    sizes = -(-windows.sizes // by[:, None])
    # The last block of a side may be a part: a pixel of the small image is `by` pixels of the source all the same.
    small = np.concatenate([sizes, sizes], axis=1)
    bounds, boxes = (np.minimum(boxes / by[:, None], small) for boxes in (windows.bounds, windows.boxes))
    return replace(windows, sizes=sizes, bounds=bounds, boxes=boxes)


def _rounded(windows: Windows) -> tuple[Floats, Floats]:
    return np.maximum(1, np.rint(windows.height)), np.maximum(1, np.rint(windows.width))


def _central(high: Floats, wide: Floats, ratio: tuple[float, float]) -> Floats:
    """The largest box in the middle whose aspect lies in `ratio`."""
    aspect = wide / high
    width = np.where(aspect > ratio[1], np.rint(high * ratio[1]), wide)
    height = np.where(aspect < ratio[0], np.rint(wide / ratio[0]), high)
    top, left = (high - height) // 2, (wide - width) // 2
    return np.stack([top, left, top + height, left + width], axis=1)


def _crop(windows: Windows, size: tuple[int, int], place: Callable[[Floats], Floats]) -> Windows:
    height, width = _rounded(windows)
    small = np.flatnonzero((height < size[0]) | (width < size[1]))
    if len(small):
        one = small[0]
        raise WindowError(
            int(one),
            f"it is {height[one]:.0f} x {width[one]:.0f} pixels (height x width) where {size[0]} x {size[1]} are to be "
            "cut out; put a `resize` before the crop",
        )
    top, left = place(height - size[0]), place(width - size[1])
    boxes = np.stack([top, left, top + size[0], left + size[1]], axis=1)
    return _cut(windows, boxes, size=size, bound=False)


def _cut(windows: Windows, inner: Floats, *, size: tuple[int, int], bound: bool) -> Windows:
    """The boxes `inner` of the result so far, in pixels of the source; `bound` keeps filters within them."""
    span = windows.boxes[:, 2:] - windows.boxes[:, :2]
    unit = span / np.stack([windows.height, windows.width], axis=1)
    # A flip that came before mirrors what is cut out after it.
    mirrored = np.stack([inner[:, 0], windows.width - inner[:, 3], inner[:, 2], windows.width - inner[:, 1]], axis=1)
    inner = np.where(windows.flips[:, None], mirrored, inner)
    start = np.tile(windows.boxes[:, :2], 2)
    boxes = start + inner * np.tile(unit, 2)
    full = np.full(len(inner), 1.0)
    bounds = boxes if bound else windows.bounds
    return replace(windows, boxes=boxes, bounds=bounds, height=size[0] * full, width=size[1] * full)


class WindowError(Exception):
    """Sample `sample` of the batch cannot be cut as asked; the pipeline names its document."""

    def __init__(self, sample: int, why: str) -> None:
        super().__init__(why)
        self.sample = sample
