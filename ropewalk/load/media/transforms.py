"""A list of transforms -> what the pipeline does: windows to resample, colours to map, numbers to make. No torch.

Geometric transforms are joined into one resampling, `colour` and `normalise` into one map of levels; the random choices
of both are computed here for a whole batch, before any executor sees a pixel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import ConfigError, Problem

from . import geometry
from .config import GEOMETRIC, Media, Transform
from .geometry import Step, Windows
from .streams import Drawn

Floats = npt.NDArray[np.float32]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Of the training set's channels, as every published recipe has them."""

# Weights of red, green and blue in the grey of ITU-R BT.601, which Pillow and torchvision use.
_GREY = (0.299, 0.587, 0.114)
_MIDDLE = 127.5


@dataclass(frozen=True, slots=True)
class Levels:
    """How the levels 0..255 of a result become numbers."""

    scale: Floats
    """Of each channel."""
    shift: Floats


@dataclass(frozen=True, slots=True)
class Chain:
    """What is done to the samples of a source."""

    steps: tuple[Step, ...]
    colours: tuple[Callable[[Drawn], npt.NDArray[np.float64]], ...]
    normalise: Levels | None
    """None: batches stay uint8."""
    resample_on: Literal["cpu", "gpu"]
    recolour_on: Literal["cpu", "gpu"]

    def windows(self, sizes: npt.NDArray[np.int64], drawn: Drawn) -> Windows:
        """What each image of `sizes` (B 2) shows."""
        windows = geometry.whole(sizes)
        for step in self.steps:
            windows = step(windows, drawn)
        return windows

    def colour_maps(self, drawn: Drawn) -> Floats | None:
        """B 3 4: how each sample's levels are mixed and shifted; None when they are left as they are."""
        if not self.colours:
            return None
        total = np.tile(np.eye(4), (len(drawn.documents), 1, 1))
        for colour in self.colours:
            total = colour(drawn) @ total
        return total[:, :3].astype(np.float32)


def compiled(media: Media, *, gpu: bool) -> Chain:
    """The chain of `media.transforms`; `gpu` says whether the batches go to one. ConfigError when they do not fit."""
    problems = [Problem(f"load.media {media.name}", f"`{key}`: {what}") for key, what in media.check()]
    for number, transform in enumerate(media.transforms):
        where = f"load.media {media.name}: transforms.{number}"
        problems += [Problem(where, f"`{key}`: {what}") for key, what in transform.check()]
        if transform.executor == "gpu" and not gpu:
            problems.append(Problem(where, 'executor = "gpu" where batches stay on the CPU', 'leave it at "auto"'))
    if problems:
        raise ConfigError(problems)
    stages = [(transform, f"{media.name}/{number}") for number, transform in enumerate(media.transforms)]
    normalising = [transform for transform in media.transforms if transform.kind == "normalise"]
    return Chain(
        steps=tuple(STEPS[t.kind](t, stage) for t, stage in stages if t.kind in GEOMETRIC),
        colours=tuple(_colour(t, stage) for t, stage in stages if t.kind == "colour"),
        normalise=_levels(normalising[0]) if normalising else None,
        resample_on=_executor([t for t in media.transforms if t.kind in GEOMETRIC], gpu),
        recolour_on=_executor([t for t in media.transforms if t.kind in ("colour", "normalise")], gpu),
    )


def _random_resized_crop(transform: Transform, stage: str) -> Step:
    low, high = transform.scale or (0.08, 1.0)
    narrow, broad = transform.ratio or (3 / 4, 4 / 3)
    return geometry.random_resized_crop(size=_size(transform), scale=(low, high), ratio=(narrow, broad), stage=stage)


def _resize(transform: Transform, stage: str) -> Step:
    height, width = _size(transform)
    return geometry.resize(size=(height,) if transform.width is None else (height, width))


def _centre_crop(transform: Transform, stage: str) -> Step:
    return geometry.centre_crop(size=_size(transform))


def _random_crop(transform: Transform, stage: str) -> Step:
    return geometry.random_crop(size=_size(transform), stage=stage)


def _flip(transform: Transform, stage: str) -> Step:
    return geometry.flip(p=0.5 if transform.p is None else transform.p, stage=stage)


STEPS: dict[str, Callable[[Transform, str], Step]] = {
    "random-resized-crop": _random_resized_crop,
    "resize": _resize,
    "centre-crop": _centre_crop,
    "random-crop": _random_crop,
    "flip": _flip,
}
"""The geometric kinds by name."""


def _colour(transform: Transform, stage: str) -> Callable[[Drawn], npt.NDArray[np.float64]]:
    """Brightness, then contrast, then saturation, as matrices B 4 4 on (red, green, blue, 1). Levels are held within
    0..255 once, after all of them."""
    amounts = [value or 0.0 for value in (transform.brightness, transform.contrast, transform.saturation)]
    grey = np.zeros((4, 4))
    grey[:3, :3], grey[3, 3] = _GREY, 1.0
    middle = np.zeros((4, 4))
    middle[:3, 3], middle[3, 3] = _MIDDLE, 1.0
    black = np.diag([0.0, 0.0, 0.0, 1.0])

    def maps(drawn: Drawn) -> npt.NDArray[np.float64]:
        draws = drawn.uniforms(stage)[:, 0]
        total = np.eye(4)
        for number, towards in enumerate((black, middle, grey)):
            factor = (1 + amounts[number] * (2 * draws[:, number] - 1))[:, None, None]
            total = (factor * np.eye(4) + (1 - factor) * towards) @ total
        return total

    return maps


def _levels(transform: Transform) -> Levels:
    mean = np.array(transform.mean or IMAGENET_MEAN)
    std = np.array(transform.std or IMAGENET_STD)
    return Levels((1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32))


def _size(transform: Transform) -> tuple[int, int]:
    assert transform.size is not None, "checked"
    return transform.size, transform.width or transform.size


def _executor(transforms: list[Transform], gpu: bool) -> Literal["cpu", "gpu"]:
    asked = {transform.executor for transform in transforms} - {"auto"}
    return "cpu" if asked == {"cpu"} or not gpu else "gpu"
