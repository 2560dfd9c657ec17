"""Resampling on threads and on the device, against torch's antialiased interpolation and Pillow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from ropewalk.load.media.device import Axis, recoloured, resampled
from ropewalk.load.media.resample import copy_window, extents, resample_levels, resample_numbers

from .pictures import Pixels, picture

SIDE = st.integers(1, 50)
# Torch 2.13 enlarges wrongly what becomes one pixel wide: it repeats the first row.
RESULT = st.integers(2, 50)


def by_threads(pixels: Pixels, bounds: list[float], box: list[float], size: tuple[int, int], flip: bool) -> Pixels:
    out = np.zeros((*size, 3), np.uint8)
    resample_levels(pixels, np.array(bounds, float), np.array(box, float), flip, out)
    return out


def by_device(pixels: Pixels, bounds: list[float], box: list[float], size: tuple[int, int], flip: bool) -> Tensor:
    """The way of a batch: the span alone is copied, into a block of garbage."""
    spans = extents(np.array([bounds], float), np.array([box], float), *size)
    top, left, bottom, right = (int(value) for value in spans[0])
    block = np.full((1, bottom - top + 3, right - left + 5, 3), 77, np.uint8)
    copy_window(pixels, spans[0], block[0])

    def axis(low: int, high: int, corner: int) -> Axis:
        values = (box[low] - corner, box[high] - corner, np.floor(bounds[low]) - corner, np.ceil(bounds[high]) - corner)
        return Axis(*(torch.tensor([value], dtype=torch.float64) for value in values))

    return resampled(
        torch.from_numpy(block),
        axis(0, 2, top),
        axis(1, 3, left),
        size=size,
        flips=torch.tensor([flip]),
        precision=torch.float32,
    )[0]


def by_torch(pixels: Pixels, size: tuple[int, int]) -> npt.NDArray[np.float32]:
    source = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    return F.interpolate(source, size, mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(0, 50), SIDE, SIDE, RESULT, RESULT, st.booleans())
def test_a_crop_is_resized_as_torch_does(
    top: int, left: int, high: int, wide: int, height: int, width: int, flip: bool
) -> None:
    pixels = picture(0, height=90, width=100)
    box: list[float] = [top, left, top + high, left + wide]
    expected = by_torch(pixels[top : top + high, left : left + wide], (height, width))
    expected = expected[:, ::-1] if flip else expected
    # Threads round to whole levels, the device does not.
    assert np.abs(by_threads(pixels, box, box, (height, width), flip) - expected).max() <= 0.51
    found = by_device(pixels, box, box, (height, width), flip).permute(1, 2, 0).numpy()
    assert np.abs(found - expected).max() < 0.02


@pytest.mark.parametrize("size", [(20, 31), (7, 80)])
def test_a_crop_is_resized_as_pillow_does(size: tuple[int, int]) -> None:
    pixels = picture(1, height=60, width=70)
    expected = np.asarray(Image.fromarray(pixels[5:50, 8:69]).resize(size[::-1], Image.Resampling.BILINEAR))
    found = by_threads(pixels, [5, 8, 50, 69], [5, 8, 50, 69], size, False)
    assert np.abs(found.astype(int) - expected).max() <= 1


def test_a_crop_of_a_resized_image_sees_beyond_its_box() -> None:
    pixels = picture(2, height=96, width=128)
    expected = by_torch(pixels, (30, 40))[5:25, 10:30]
    unit = 96 / 30
    bounds, box = [0.0, 0, 96, 128], [5 * unit, 10 * unit, 25 * unit, 30 * unit]
    assert np.abs(by_threads(pixels, bounds, box, (20, 20), False) - expected).max() <= 0.51
    assert np.abs(by_device(pixels, bounds, box, (20, 20), False).permute(1, 2, 0).numpy() - expected).max() < 0.02


def test_half_precision_errs_by_a_fraction_of_a_level() -> None:
    pixels = torch.from_numpy(picture(3, height=90, width=120))[None]
    ends = [torch.tensor([float(value)], dtype=torch.float64) for value in (0, 90, 120)]
    rows, columns = Axis(ends[0], ends[1], ends[0], ends[1]), Axis(ends[0], ends[2], ends[0], ends[2])
    full, half = (
        resampled(pixels, rows, columns, size=(40, 40), flips=torch.tensor([False]), precision=precision).float()
        for precision in (torch.float32, torch.float16)
    )
    assert (full - half).abs().max() < 0.3


@pytest.mark.parametrize("flip", [False, True])
def test_colours_are_mapped_alike_by_threads_and_device(flip: bool) -> None:
    pixels = picture(4, height=30, width=40)
    box = np.array([2.0, 3, 28, 39])
    rng = np.random.default_rng(0)
    colours, scale, shift = (rng.normal(size=size).astype(np.float32) for size in ((3, 4), 3, 3))
    source = torch.from_numpy(pixels)[2:28, 3:39].permute(2, 0, 1)[None].float()
    small = F.interpolate(source, (9, 11), mode="bilinear", antialias=True)
    small = small.flip(3) if flip else small
    scale_C, shift_C = torch.from_numpy(scale), torch.from_numpy(shift)
    for colour in (colours, np.empty((0, 4), np.float32)):
        levels = small[0].permute(1, 2, 0).numpy()
        levels = np.clip(levels @ colour[:, :3].T + colour[:, 3], 0, 255) if len(colour) else levels
        expected = (levels * scale + shift).transpose(2, 0, 1)
        found = np.empty((3, 9, 11), np.float32)
        resample_numbers(pixels, box, box, flip, colour, scale, shift, found)
        assert found == pytest.approx(expected, abs=1e-2)
        colours_B34 = torch.from_numpy(colour)[None] if len(colour) else None
        mapped = recoloured(small, colours_B34=colours_B34, scale_C=scale_C, shift_C=shift_C, dtype=torch.float32)
        assert mapped[0].numpy() == pytest.approx(expected, abs=1e-2)
