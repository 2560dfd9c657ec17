"""DALI as an executor: the same pixels as our own, where it is installed; a clear error where not."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ropewalk.base.errors import ConfigError, MissingPackage
from ropewalk.load.media.config import Media, Transform
from ropewalk.load.media.pipeline import open_media

from .pictures import shard, training

INSTALLED = find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None
needs_dali = pytest.mark.skipif(not INSTALLED, reason="nvidia-dali is not installed")


def by_dali(media: Media) -> Media:
    return dataclasses.replace(
        media, transforms=tuple(dataclasses.replace(step, executor="dali") for step in media.transforms)
    )


@pytest.mark.skipif(INSTALLED, reason="nvidia-dali is installed")
def test_without_dali_the_error_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(MissingPackage, match=r"nvidia-dali-cuda120.*\.\[dali\]"):
        open_media(by_dali(training(shard(tmp_path, 2))), seed=1)


@needs_dali
def test_dali_gives_the_pixels_of_our_own_executor(tmp_path: Path) -> None:
    media = training(shard(tmp_path, 24, height=96, width=120), dtype="float32")
    resized = dataclasses.replace(
        media,
        transforms=(
            Transform(kind="decode"),
            Transform(kind="resize", size=40),
            Transform(kind="centre-crop", size=32),
            Transform(kind="normalise", mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255)),
        ),
    )
    for settings, levels in ((media, 255 * 0.229), (resized, 1.0)):
        ours, theirs = (open_media(some, seed=3) for some in (settings, by_dali(settings)))
        for _ in range(3):
            mine, other = ours.next(), theirs.next()
            difference = (mine.images - other.images).abs() * levels
            # Another JPEG decoder (one or two levels) and, where we shrink while decoding, another filter.
            assert difference.mean() < 1.0
            assert torch.equal(mine.labels, other.labels)
        ours.close()
        theirs.close()


@needs_dali
def test_what_dali_cannot_do_is_refused(tmp_path: Path) -> None:
    coloured = training(shard(tmp_path, 2))
    steps = (*coloured.transforms[:3], Transform(kind="colour", brightness=0.1), coloured.transforms[3])
    with pytest.raises(ConfigError, match="DALI does not do `colour`"):
        open_media(by_dali(dataclasses.replace(coloured, transforms=steps)), seed=1)
