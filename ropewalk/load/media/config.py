"""Settings of media: where samples lie and what is done to them. No torch.

[[load.media]]
name = "photos"
path = "corpora/photos"
batch_size = 256
transforms = [
    { kind = "decode" },
    { kind = "random-resized-crop", size = 224, scale = [0.08, 1.0] },
    { kind = "flip", p = 0.5 },
    { kind = "normalise", mean = [0.485, 0.456, 0.406], std = [0.229, 0.224, 0.225] },
]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range

Executor = Literal["auto", "cpu", "gpu", "dali"]
TransformKind = Literal[
    "decode", "random-resized-crop", "resize", "centre-crop", "random-crop", "flip", "colour", "normalise"
]

SETTINGS: dict[TransformKind, tuple[str, ...]] = {
    "decode": (),
    "random-resized-crop": ("size", "width", "scale", "ratio"),
    "resize": ("size", "width"),
    "centre-crop": ("size", "width"),
    "random-crop": ("size", "width"),
    "flip": ("p",),
    "colour": ("brightness", "contrast", "saturation"),
    "normalise": ("mean", "std"),
}
"""What each kind of transform takes."""

GEOMETRIC = ("random-resized-crop", "resize", "centre-crop", "random-crop", "flip")
"""Kinds that choose pixels; a list of them is one resampling."""
SIZED = ("random-resized-crop", "resize", "centre-crop", "random-crop")
"""Kinds that give their result a size."""

Amount = Annotated[float, Range(least=0, below=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transform:
    """One thing done to every sample of a source; what a kind does not take must be left out."""

    kind: TransformKind
    """`decode` comes first. `random-resized-crop`: a random part of random aspect, resized. `resize`: the shorter side
    to `size`, or both with `width`. `centre-crop`, `random-crop`: a part of that size. `flip`: left and right change
    places. `colour`: brightness, contrast and saturation at random. `normalise`: levels to numbers."""
    executor: Executor = "auto"
    """Who does it. `cpu`: what `workers` says. `gpu`: the device, for the whole batch at once. `auto`: decoding on the
    CPU, all else on the GPU when there is one. `dali`: NVIDIA DALI, for all transforms of a source or none. Random
    choices are the same on all of them."""
    size: Annotated[int, Range(least=1)] | None = None
    """Height of the result in pixels, and its width unless that is given."""
    width: Annotated[int, Range(least=1)] | None = None
    """Width of a result that is not square."""
    scale: tuple[Annotated[float, Range(above=0, most=1)], ...] | None = None
    """Least and largest share of the area that a random crop takes; 0.08 to 1 when left out."""
    ratio: tuple[Annotated[float, Range(above=0)], ...] | None = None
    """Least and largest width / height of a random crop; 3/4 to 4/3 when left out."""
    p: Annotated[float, Range(least=0, most=1)] | None = None
    """How probable a flip is; 0.5 when left out."""
    brightness: Amount | None = None
    """Levels are multiplied by a factor within 1 - this and 1 + this."""
    contrast: Amount | None = None
    """Distances from middle grey are multiplied by such a factor."""
    saturation: Amount | None = None
    """Distances from the pixel's own grey are multiplied by such a factor."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel, levels counted from 0 to 1; what ImageNet has when left out."""
    std: tuple[Annotated[float, Range(above=0)], ...] | None = None
    """Standard deviation of each channel; what ImageNet has when left out."""

    def check(self) -> Iterator[tuple[str, str]]:
        takes = SETTINGS[self.kind]
        for name in sorted({name for names in SETTINGS.values() for name in names}):
            if getattr(self, name) is not None and name not in takes:
                known = f"it takes {', '.join(takes)}" if takes else "it takes no settings"
                yield name, f'is not a setting of "{self.kind}"; {known}'
        if self.kind in SIZED and self.size is None:
            yield "size", f'"{self.kind}" needs a size in pixels; add `size = 224`'
        for name, count in (("scale", 2), ("ratio", 2), ("mean", 3), ("std", 3)):
            values = getattr(self, name)
            if values is not None and len(values) != count:
                yield name, f"has {len(values)} numbers; give {count}"
            elif values is not None and count == 2 and values[0] > values[1]:
                yield name, f"{values[0]} is above {values[1]}; give the least first"
        if self.kind == "decode" and self.executor == "gpu":
            yield "executor", 'decoding is done by "cpu" or by "dali" (which uses the decoders of the GPU)'


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """One source of images and how its samples become batches."""

    name: str
    """What events and errors call it."""
    path: str
    """A folder of image files (a sub-folder a class), of WebDataset tars or of our shards of bytes; one such file; or
    the URL of either."""
    kind: Literal["image"] = "image"
    """What its samples are."""
    batch_size: Annotated[int, Range(least=1)] = 256
    """Samples a batch, over all ranks."""
    transforms: tuple[Transform, ...] = (Transform(kind="decode"),)
    """What is done to each sample, in order."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of normalised batches; without `normalise` they stay uint8."""
    shuffle: Literal["all", "blocks"] = "all"
    """`all`: every sample may follow every other. `blocks`: neighbours are read together, for stores that dislike
    jumps."""
    on_damage: Annotated[Literal["stop", "skip"], CONTINUES] = "stop"
    """When a sample cannot be read or decoded: `stop` with its name, or `skip`: it is counted, its weight is 0."""
    workers: Annotated[Literal["auto", "threads", "processes"], CONTINUES] = "auto"
    """Who decodes: `threads` of this process, or `processes`, which take a second to start and keep any number of cores
    busy. `auto`: processes for more than 4. The batches are the same."""
    threads: Annotated[int, Range(least=0), CONTINUES] = 0
    """How many threads or processes decode; 0: one a core. Their number does not change the batches."""
    fetch_threads: Annotated[int, Range(least=1), CONTINUES] = 2
    """Threads that read; more for stores that answer slowly."""
    prefetch_bytes: Annotated[int, Range(least=1), CONTINUES] = 1 << 30
    """Memory that batches in preparation may take; at least one batch is always prepared ahead."""

    def check(self) -> Iterator[tuple[str, str]]:
        kinds = [transform.kind for transform in self.transforms]
        if kinds[:1] != ["decode"] or "decode" in kinds[1:]:
            yield "transforms", 'must begin with { kind = "decode" }, once'
        if kinds.count("normalise") > 1:
            yield "transforms", '"normalise" may stand there once'
        if "colour" in kinds and "normalise" not in kinds:
            yield "transforms", '"colour" needs a "normalise" after it, which makes numbers of levels'
        if "normalise" in kinds and "colour" in kinds[kinds.index("normalise") :]:
            yield "transforms", '"colour" works on levels; put it before "normalise"'
        geometric = {t.executor for t in self.transforms if t.kind in GEOMETRIC and t.executor != "auto"}
        pointwise = {t.executor for t in self.transforms if t.kind in ("colour", "normalise") and t.executor != "auto"}
        if len(geometric) > 1 or len(pointwise) > 1:
            yield "transforms", "crops, resizes and flips are one pass, colour and normalise another: give one executor"
        if geometric == {"gpu"} and pointwise == {"cpu"}:
            yield "transforms", 'what is on the GPU stays there: "colour" and "normalise" cannot be "cpu" after "gpu"'
        executors = {transform.executor for transform in self.transforms}
        if "dali" in executors and executors != {"dali"}:
            yield "transforms", 'DALI does all of a source: give every transform `executor = "dali"`'
