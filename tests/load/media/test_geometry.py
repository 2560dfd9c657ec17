"""Windows: where crops, resizes and flips look, by laws and against plain formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.load.media.geometry import (
    WindowError,
    Windows,
    centre_crop,
    flip,
    random_crop,
    random_resized_crop,
    reduced,
    reductions,
    resize,
    whole,
)
from ropewalk.load.media.streams import Drawn

SIDES = st.integers(1, 900)


def drawn(count: int, epoch: int = 0) -> Drawn:
    return Drawn(3, np.arange(count, dtype=np.uint64), np.full(count, epoch, np.int64))


def images(height: int, width: int, count: int = 40) -> Windows:
    return whole(np.tile([height, width], (count, 1)))


@settings(max_examples=40, deadline=None)
@given(SIDES, SIDES, st.integers(0, 5))
def test_random_crops_lie_within_the_image_on_whole_pixels(height: int, width: int, epoch: int) -> None:
    step = random_resized_crop(size=(32, 24), scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), stage="0")
    found = step(images(height, width), drawn(40, epoch))
    top, left, bottom, right = found.boxes.T
    assert (found.boxes == np.rint(found.boxes)).all()
    assert ((top >= 0) & (left >= 0) & (bottom <= height) & (right <= width) & (bottom > top) & (right > left)).all()
    assert (found.boxes == found.bounds).all()
    assert (found.height == 32).all()
    assert (found.width == 24).all()


def test_random_crops_have_the_areas_and_aspects_asked_for() -> None:
    step = random_resized_crop(size=(8, 8), scale=(0.2, 0.6), ratio=(0.5, 2.0), stage="0")
    top, left, bottom, right = step(images(1000, 1000, 4000), drawn(4000)).boxes.T
    share = (bottom - top) * (right - left) / 1e6
    aspect = (right - left) / (bottom - top)
    assert 0.199 < share.min() < 0.21
    assert 0.59 < share.max() < 0.602
    assert abs(share.mean() - 0.4) < 0.01
    assert 0.495 < aspect.min() < 0.52
    # The logarithm is uniform: as many are wide as are high.
    assert abs(np.log(aspect).mean()) < 0.03
    # As much room above as below: uniform over the places there are.
    assert abs(top.mean() - (1000 - bottom).mean()) < 15


def test_an_image_too_narrow_for_any_crop_gives_the_largest_central_one() -> None:
    step = random_resized_crop(size=(8, 8), scale=(0.9, 1.0), ratio=(3 / 4, 4 / 3), stage="0")
    found = step(images(30, 600, 5), drawn(5))
    assert found.boxes.tolist() == [[0, 280, 30, 320]] * 5


def test_resizing_and_cropping_the_middle_is_one_window_of_the_source() -> None:
    found = centre_crop(size=(224, 224))(resize(size=(256,))(images(500, 1000, 1), drawn(1)), drawn(1))
    scale = 500 / 256
    assert found.boxes[0] == pytest.approx([16 * scale, 144 * scale, 240 * scale, 368 * scale])
    assert found.bounds.tolist() == [[0, 0, 500, 1000]]


def test_a_crop_after_a_flip_looks_at_the_other_side() -> None:
    flipped = flip(p=1.0, stage="0")(images(10, 100, 3), drawn(3))
    cropped = random_crop(size=(10, 20), stage="1")(flipped, drawn(3))
    plain = random_crop(size=(10, 20), stage="1")(images(10, 100, 3), drawn(3))
    assert cropped.flips.all()
    assert (cropped.boxes[:, 1] == 100 - plain.boxes[:, 3]).all()


def test_half_of_the_samples_flip() -> None:
    assert abs(flip(p=0.5, stage="0")(images(4, 4, 4000), drawn(4000)).flips.mean() - 0.5) < 0.03


def test_a_crop_larger_than_its_image_names_the_sample() -> None:
    sizes = np.array([[40, 40], [40, 30]])
    with pytest.raises(WindowError, match=r"40 x 30 pixels .* where 32 x 32 are to be cut out; put a `res") as error:
        centre_crop(size=(32, 32))(whole(sizes), drawn(2))
    assert error.value.sample == 1


@settings(max_examples=60, deadline=None)
@given(SIDES, SIDES, st.integers(1, 64))
def test_images_are_never_decoded_smaller_than_their_result(height: int, width: int, size: int) -> None:
    step = random_resized_crop(size=(size, size), scale=(0.5, 1.0), ratio=(3 / 4, 4 / 3), stage="0")
    windows = step(images(height, width), drawn(40))
    by = reductions(windows)
    small = reduced(windows, by)
    spans = small.boxes[:, 2:] - small.boxes[:, :2]
    assert (small.sizes == np.ceil(windows.sizes / by[:, None])).all()
    assert (small.boxes[:, 2:] <= small.sizes).all()
    shrunk = by > 1
    assert (spans[shrunk] >= size - 1e-9).all()
    # One step further would be too small.
    further = (spans / 2).min(axis=1) < size
    assert (further | (by == 8)).all()
