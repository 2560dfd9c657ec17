"""Decoders: the same pixels from each of them, reduced sizes, other kinds of stills, damage."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from ropewalk.base.errors import MissingPackage
from ropewalk.load.media import decode
from ropewalk.load.media.decode import DECODERS, Damaged, Stills, shrunk, size_of

from .pictures import encoded, picture


def stills(name: str) -> Stills:
    return Stills(jpeg=name, other="pillow" if name == "pillow" else "opencv")


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("by", [1, 2, 4, 8])
def test_every_decoder_gives_the_pixels_of_libjpeg(name: str, by: int) -> None:
    pixels = picture(1, height=75, width=101)
    data = encoded(pixels, subsampling=2)
    reference = Image.open(io.BytesIO(data))
    reference.draft("RGB", (101 // by, 75 // by))
    assert size_of(data) == (75, 101)
    found = stills(name).decode(data, (75, 101), reduce=by)
    assert found.shape == (-(-75 // by), -(-101 // by), 3)
    # Two builds of libjpeg-turbo may round one level apart.
    assert np.abs(found.astype(int) - np.asarray(reference)).max() <= 1


@pytest.mark.parametrize("by", [2, 4])
def test_a_reduced_jpeg_shows_the_mean_of_the_full_one(by: int) -> None:
    data = encoded(picture(2, height=160, width=240))
    full = Stills().decode(data, (160, 240))
    small = Stills().decode(data, (160, 240), reduce=by)
    # Dropping high frequencies and averaging differ at edges only.
    assert np.abs(small.astype(int) - shrunk(full, by)).mean() < 1


def test_shrinking_averages_blocks_and_parts_of_blocks() -> None:
    pixels = picture(3, height=10, width=7)
    found = shrunk(pixels, 4)
    expected = [
        [np.floor(pixels[y : y + 4, x : x + 4].mean(axis=(0, 1)) + 0.5) for x in range(0, 7, 4)]
        for y in range(0, 10, 4)
    ]
    assert (found == np.array(expected)).all()


@pytest.mark.parametrize("name", ["opencv", "pillow"])
@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP"])
def test_other_stills_are_decoded_without_loss(name: str, kind: str) -> None:
    pixels = picture(4)
    data = encoded(pixels, kind, **({"lossless": True} if kind == "WEBP" else {}))
    assert size_of(data) == ((48, 64) if kind == "PNG" else None)
    assert (stills(name).decode(data, size_of(data)) == pixels).all()
    if kind == "PNG":
        assert (stills(name).decode(data, (48, 64), reduce=2) == shrunk(pixels, 2)).all()


@pytest.mark.parametrize("name", DECODERS)
def test_grey_and_turned_pictures_are_read_as_they_are_stored(name: str) -> None:
    grey = encoded(picture(5)[:, :, 0].copy())
    found = stills(name).decode(grey, size_of(grey))
    assert (found[:, :, 0] == found[:, :, 2]).all()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    turned = encoded(picture(5), exif=exif)
    assert stills(name).decode(turned, size_of(turned)).shape == (48, 64, 3)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_jpeg_that_is_cut_off_is_damaged(share: float) -> None:
    data = encoded(picture(6))
    with pytest.raises(Damaged, match=r"header is damaged or cut off|end before the picture does"):
        size_of(data[: int(len(data) * share)])


@pytest.mark.parametrize("name", DECODERS)
def test_bytes_that_are_no_picture_are_damaged(name: str) -> None:
    with pytest.raises(Damaged, match="cannot be decoded"):
        stills(name).decode(b"no picture at all, but long enough for a header", None)


def test_a_header_that_lies_about_the_size_is_damaged() -> None:
    with pytest.raises(Damaged, match="decodes to 48 x 64 pixels where its header says 48 x 65"):
        Stills().decode(encoded(picture(7), "PNG"), (48, 65))


def test_an_older_opencv_gives_red_first_too(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(picture(8))
    expected = stills("opencv").decode(data, size_of(data))
    monkeypatch.delattr("cv2.IMREAD_COLOR_RGB")
    assert (stills("opencv").decode(data, size_of(data), reduce=1) == expected).all()
    assert stills("opencv").decode(data, size_of(data), reduce=2).shape == (24, 32, 3)


def test_without_any_decoder_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"opencv-python-headless.*\.\[images\]"):
        Stills()
