"""Decoded pixels -> where the batch wants them: as a window, as levels or as numbers. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .decode import Pixels
from .geometry import Windows
from .resample import copy_window, resample_levels, resample_numbers

# Black wherever it is looked at, for what is damaged.
_BLACK, _PIXEL = np.zeros((1, 1, 3), np.uint8), np.array([0.0, 0.0, 1.0, 1.0])
_UNCHANGED = np.empty((0, 4), np.float32)
"""Stands for colours that are left as they are."""


@dataclass(frozen=True, slots=True)
class Placing:
    """What of each sample goes into a batch, and as what."""

    windows: Windows
    spans: npt.NDArray[np.int64] | None
    """B 4, what of each decoded image is copied; None when it is resampled here."""
    colours: npt.NDArray[np.float32] | None
    """B 3 4, how levels are mixed; None: not at all."""
    scale: npt.NDArray[np.float32] | None
    """Of each channel, with `shift`; None where levels do not become numbers here."""
    shift: npt.NDArray[np.float32] | None

    def part(self, rows: slice) -> Placing:
        """Of some samples alone."""
        return replace(
            self,
            windows=self.windows.part(rows),
            spans=None if self.spans is None else self.spans[rows],
            colours=None if self.colours is None else self.colours[rows],
        )

    def place(self, sample: int, pixels: Pixels | None, target: npt.NDArray[Any]) -> None:
        """Writes one sample to its `target`: uint8 H W C, or float32 C h w. What is damaged (None) is black."""
        if self.spans is not None:
            if pixels is None:
                target[:] = 0
            else:
                copy_window(pixels, self.spans[sample], target)
            return
        bounds, box, flip = self.windows.bounds[sample], self.windows.boxes[sample], self.windows.flips[sample]
        if pixels is None:
            pixels, bounds, box = _BLACK, _PIXEL, _PIXEL
        if target.dtype == np.uint8:
            resample_levels(pixels, bounds, box, flip, target)
        else:
            assert self.scale is not None, "numbers are made of levels that are normalised"
            assert self.shift is not None, "it comes with the scale"
            colours = _UNCHANGED if self.colours is None else self.colours[sample]
            resample_numbers(pixels, bounds, box, flip, colours, self.scale, self.shift, target)
