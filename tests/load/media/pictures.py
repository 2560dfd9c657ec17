"""Pictures made by ourselves: smooth colours with some edges, as photographs have."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ropewalk.load.media.config import Media, Transform
from ropewalk.store.blobs import Blob, write_blobs

Pixels = npt.NDArray[np.uint8]


def picture(seed: int, *, height: int = 48, width: int = 64) -> Pixels:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    planes = [
        sum(rng.normal() * np.sin(rng.normal() * 9 * x + rng.normal() * 9 * y + phase) for phase in range(4))
        for _ in range(3)
    ]
    smooth = np.stack(planes, axis=2) * 35 + 128
    top, left = rng.integers(0, height // 2), rng.integers(0, width // 2)
    smooth[top : top + height // 3, left : left + width // 3] += rng.normal(size=3) * 40
    return np.clip(smooth, 0, 255).astype(np.uint8)


def encoded(pixels: Pixels, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    if kind == "JPEG":
        options = {"quality": 92, "subsampling": 0, **options}
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def shard(folder: Path, count: int, **shape: int) -> Path:
    """A shard of `count` JPEG pictures with their number as label."""
    folder.mkdir(parents=True, exist_ok=True)
    blobs = [Blob(f"picture-{n}", encoded(picture(n, **shape)), "image/jpeg", {"label": n}) for n in range(count)]
    write_blobs(folder / "pictures.blobs", blobs)
    return folder


def training(path: Path, **changes: Any) -> Media:
    """The usual augmentation, small."""
    steps = (
        Transform(kind="decode"),
        Transform(kind="random-resized-crop", size=16),
        Transform(kind="flip"),
        Transform(kind="normalise"),
    )
    return Media(
        **{"name": "pictures", "path": str(path), "batch_size": 12, "transforms": steps, "threads": 2, **changes}
    )
