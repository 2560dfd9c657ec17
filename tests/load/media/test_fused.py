"""The one kernel that makes images on a GPU gives what the CPU gives, of packed images and of blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ropewalk.load.media.resample import resample_levels, resample_numbers

from .pictures import picture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SCALE, SHIFT = np.float32([0.017, 0.018, 0.017]), np.float32([-2.1, -2.0, -1.8])
NO_COLOURS = np.empty((0, 4), np.float32)


@pytest.mark.parametrize("coloured", [False, True])
@pytest.mark.parametrize("size", [(32, 48), (224, 224), (7, 5)])
def test_a_gpu_makes_the_images_of_the_cpu(size: tuple[int, int], coloured: bool) -> None:
    from ropewalk.load.media.fused import window_images

    rng = np.random.default_rng(0)
    images = [
        picture(n, height=int(high), width=int(wide)) for n, (high, wide) in enumerate(rng.integers(9, 300, (12, 2)))
    ]
    sides = np.array([image.shape[:2] for image in images])
    corner = rng.random((12, 2)) * sides * 0.5
    boxes = np.concatenate([corner, corner + sides * rng.uniform(0.1, 0.5, (12, 2))], axis=1)
    # A filter looks beyond the box of every other sample.
    bounds = np.where(np.arange(12)[:, None] % 2, boxes, np.concatenate([np.zeros((12, 2)), sides], axis=1))
    flips = rng.random(12) < 0.5
    colours = rng.normal(0.3, 0.3, (12, 3, 4)).astype(np.float32) if coloured else None
    starts = np.concatenate([[0], np.cumsum([image.size for image in images])[:-1]])
    arrays = (np.concatenate([image.ravel() for image in images]), starts, 3 * sides[:, 1])
    windows = np.ascontiguousarray(np.concatenate([boxes.T, bounds.T, flips[None]]))
    there = [torch.from_numpy(array).cuda() for array in (*arrays, windows)]

    def made(levels: bool) -> np.ndarray:
        on_gpu = None if colours is None or levels else torch.from_numpy(colours).cuda()
        scale, shift = (None, None) if levels else (torch.from_numpy(SCALE).cuda(), torch.from_numpy(SHIFT).cuda())
        return (
            window_images(*there, size=size, colours=on_gpu, scale=scale, shift=shift, dtype=torch.float32)
            .cpu()
            .numpy()
        )

    numbers, levels = made(False), made(True)
    for n, image in enumerate(images):
        expected = np.empty((3, *size), np.float32)
        mapped = NO_COLOURS if colours is None else colours[n]
        resample_numbers(image, bounds[n], boxes[n], bool(flips[n]), mapped, SCALE, SHIFT, expected)
        # In levels of 255: weights are computed in single precision on both sides, in another order.
        assert (np.abs(numbers[n] - expected) / SCALE[:, None, None]).max() < 0.02
        rounded = np.empty((*size, 3), np.uint8)
        resample_levels(image, bounds[n], boxes[n], bool(flips[n]), rounded)
        assert np.abs(levels[n].transpose(1, 2, 0).astype(int) - rounded).max() <= 1
