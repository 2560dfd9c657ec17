"""Encoded stills -> pixels, on the CPU, by the best decoder that is installed. No torch.

JPEG is decoded by simplejpeg, OpenCV or Pillow, in this order; all three are libjpeg-turbo within and give the same
pixels, at 2,080, 1,920 and 1,500 images a second and core here (500 x 375, 29 KB). Other stills (PNG, WebP, BMP, TIFF)
by OpenCV or Pillow. All let other threads run meanwhile.

A JPEG whose window will be shrunk is decoded at 1/2, 1/4 or 1/8 of its size, which the inverse cosine transform gives
for less work: random-resized-crop 224 of 12-megapixel photographs takes 13 instead of 89 ms, of 3 megapixels 4 instead
of 15. Results then differ from those of the full size by 0.2 to 0.4 levels of 255 in the mean (99.9 % within 4).

Pixels are uint8 H W 3, red first. Transparency is dropped; the orientation of EXIF is not applied, as in torchvision.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from ropewalk.base.errors import MissingPackage

Pixels = npt.NDArray[np.uint8]
Encoded = bytes | memoryview
Decoder = Callable[[Encoded, tuple[int, int], int], Pixels]
"""(bytes, height and width, reduction) -> pixels; raises ValueError for what it cannot read."""

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"


class Damaged(Exception):
    """The bytes of a sample are not a still that can be decoded; the message says why."""


def size_of(data: Encoded) -> tuple[int, int] | None:
    """Height and width as the header of a JPEG or PNG says, None for other kinds; raises Damaged."""
    head = bytes(data[:24])
    if head.startswith(_JPEG):
        height, width, scan = _jpeg_header(np.frombuffer(data, np.uint8))
        if not scan or not height or not width:
            raise Damaged("its JPEG header is damaged or cut off")
        # OpenCV before 5.0 and some readers fill what is missing with grey and say nothing.
        if bytes(data[-2:]) != b"\xff\xd9" and bytes(data[scan:]).rfind(b"\xff\xd9") < 0:
            raise Damaged("its JPEG data end before the picture does")
        return int(height), int(width)
    if head.startswith(_PNG):
        return int.from_bytes(head[20:24], "big"), int.from_bytes(head[16:20], "big")
    return None


class Stills:
    """Decodes with what is installed; `jpeg` and `other` name one of DECODERS, else the first that is there.

    Safe to use from several threads.
    """

    def __init__(self, *, jpeg: str | None = None, other: str | None = None) -> None:
        self.jpeg = jpeg or _first_installed(("simplejpeg", "opencv", "pillow"))
        self.other = other or _first_installed(("opencv", "pillow"))
        self._jpeg, self._other = DECODERS[self.jpeg](), DECODERS[self.other]()

    def decode(self, data: Encoded, size: tuple[int, int] | None, *, reduce: int = 1) -> Pixels:
        """Pixels of an image of `size` (None: unknown), its sides divided by `reduce` and rounded up; raises
        Damaged."""
        jpeg = bytes(data[:3]) == _JPEG
        try:
            if jpeg and size is not None:
                pixels = self._jpeg(data, size, reduce)
            else:
                pixels = self._other(data, size or (0, 0), 1)
                pixels = shrunk(pixels, reduce) if reduce > 1 else pixels
        except (ValueError, OSError, SyntaxError) as error:
            raise Damaged(f"it cannot be decoded: {error}") from None
        if size is not None and pixels.shape[:2] != (-(-size[0] // reduce), -(-size[1] // reduce)):
            shape = " x ".join(map(str, pixels.shape[:2]))
            raise Damaged(f"it decodes to {shape} pixels where its header says {size[0]} x {size[1]} (1/{reduce})")
        return pixels


def _simplejpeg() -> Decoder:
    decode_jpeg: Any = import_module("simplejpeg").decode_jpeg

    def decode(data: Encoded, size: tuple[int, int], reduce: int) -> Pixels:
        if reduce == 1:
            return decode_jpeg(data)
        # It takes the smallest scale whose sides are at least as long.
        return decode_jpeg(data, min_height=-(-size[0] // reduce), min_width=-(-size[1] // reduce))

    return decode


def _opencv() -> Decoder:
    import cv2

    # Constants of 4.11 and later; before that only blue comes first.
    red_first = getattr(cv2, "IMREAD_COLOR_RGB", None)
    base = cv2.IMREAD_IGNORE_ORIENTATION | (cv2.IMREAD_COLOR if red_first is None else red_first)
    reduced = {1: 0, 2: 16, 4: 32, 8: 64}  # the bits of IMREAD_REDUCED_GRAYSCALE_2, _4 and _8

    def decode(data: Encoded, size: tuple[int, int], reduce: int) -> Pixels:
        try:
            pixels: Any = cv2.imdecode(np.frombuffer(data, np.uint8), base | reduced[reduce])
        except cv2.error as error:
            raise ValueError(str(error)) from None
        if pixels is None:
            raise ValueError("OpenCV does not know its format, or it is damaged")
        if red_first is None:
            _swap_red_and_blue(pixels)
        return pixels

    return decode


def _pillow() -> Decoder:
    from PIL import Image

    def decode(data: Encoded, size: tuple[int, int], reduce: int) -> Pixels:
        image = Image.open(io.BytesIO(data))
        if reduce > 1:
            # Rounded down: `draft` never goes below the size asked for.
            image.draft("RGB", (max(1, size[1] // reduce), max(1, size[0] // reduce)))
        return np.asarray(image.convert("RGB"))

    return decode


DECODERS: dict[str, Callable[[], Decoder]] = {"simplejpeg": _simplejpeg, "opencv": _opencv, "pillow": _pillow}
"""Every decoder by name; the package is imported by the call."""

_MODULES = {"simplejpeg": "simplejpeg", "opencv": "cv2", "pillow": "PIL"}


def _first_installed(names: tuple[str, ...]) -> str:
    for name in names:
        if find_spec(_MODULES[name]):
            return name
    raise MissingPackage("opencv-python-headless", "decoding images", "images")


@njit(cache=True)
def _jpeg_header(data: Pixels) -> tuple[int, int, int]:
    """Height, width and where the first scan begins; zeros when the header is damaged (ISO 10918-1, annex B).

    It takes a microsecond and keeps other threads waiting: to let them run and queue up again would take longer.
    """
    place, height, width = 2, 0, 0
    while place + 9 < len(data):
        if data[place] != 0xFF:
            return 0, 0, 0
        marker = data[place + 1]
        if marker == 0xFF:  # fill bytes may stand before a marker
            place += 1
            continue
        length = (int(data[place + 2]) << 8) + int(data[place + 3])
        frame = 0xC0 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC
        if frame:
            height = (int(data[place + 5]) << 8) + int(data[place + 6])
            width = (int(data[place + 7]) << 8) + int(data[place + 8])
        if marker == 0xDA:
            return height, width, place
        if length < 2:
            return 0, 0, 0
        place += 2 + length
    return 0, 0, 0


@njit(cache=True, nogil=True)
def _swap_red_and_blue(pixels: Pixels) -> None:
    """In place. OpenCV's own conversion would share its threads among all of ours."""
    for row in range(pixels.shape[0]):
        for column in range(pixels.shape[1]):
            blue = pixels[row, column, 0]
            pixels[row, column, 0] = pixels[row, column, 2]
            pixels[row, column, 2] = blue


@njit(cache=True, nogil=True)
def shrunk(pixels: Pixels, by: int) -> Pixels:
    """The mean of every `by` x `by` pixels, what a reduced JPEG shows; blocks at the far edges may be smaller."""
    high, wide = pixels.shape[0], pixels.shape[1]
    result = np.empty((-(-high // by), -(-wide // by), 3), np.uint8)
    for row in range(result.shape[0]):
        bottom = min((row + 1) * by, high)
        for column in range(result.shape[1]):
            right = min((column + 1) * by, wide)
            count = (bottom - row * by) * (right - column * by)
            for channel in range(3):
                total = count // 2
                for y in range(row * by, bottom):
                    for x in range(column * by, right):
                        total += pixels[y, x, channel]
                result[row, column, channel] = total // count
    return result
