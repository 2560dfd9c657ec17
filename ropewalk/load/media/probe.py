"""What each stage of a source of images costs, on the CPU and on the device: for the choice between them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Literal

import torch

from ropewalk.load.forecast import Rates, Setup
from ropewalk.load.placement import Device, Placement, Work, place

from .config import Media
from .pipeline import open_media

WARMUP_BATCHES = 2
"""Batches that do not count: the first two are begun together, and kernels are compiled while they wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaRates:
    """The stages of a source, in samples a second or seconds a sample."""

    fetch: float
    """Samples a second, one request after the other."""
    copy: float
    """Samples a second to the device; infinite where there is no copy."""
    works: tuple[Work, ...]
    """Decoding and transforming."""
    device: Device
    threads: int


def probe_media(media: Media, *, seed: int, device: torch.device, cores: int, seconds: float) -> MediaRates:
    """Measures some batches with all transforms on the CPU and, where there is a GPU, with them there."""
    here = _measured(media, "cpu", seed=seed, device=device, seconds=seconds)
    there, device_bytes, left = None, 0.0, Device()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        there = _measured(media, "gpu", seed=seed, device=device, seconds=seconds)
        device_bytes = float(torch.cuda.max_memory_allocated(device) - before)
        left = Device(free_bytes=float(torch.cuda.mem_get_info(device)[0]))
    decode = Work(name="decode", core_s=here.decode_s)
    rest = Work(
        name="transforms",
        core_s=here.place_s,
        device_s=there.device_s if there else math.inf,
        device_bytes=device_bytes,
    )
    copies = there or here
    return MediaRates(
        fetch=1.0 / here.fetch_s if here.fetch_s else math.inf,
        copy=1.0 / copies.copy_s if copies.copy_s else math.inf,
        works=(decode, rest),
        device=left,
        threads=media.threads or cores,
    )


def place_transforms(media: Media, found: MediaRates, *, samples_per_s: float, cores: int) -> Placement:
    """Where transforms are best done for a step that takes `samples_per_s`, and the speed that gives."""
    rates = Rates(
        compute=samples_per_s,
        prepare=math.inf,
        fetch=found.fetch,
        copy=found.copy,
        batch_tokens=float(media.batch_size),
    )
    setup = Setup(threads=found.threads, cores=cores, requests=media.fetch_threads, ahead=max(2, found.threads + 1))
    return place(found.works, rates, setup, device=found.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seconds:
    """Seconds a sample by stage."""

    fetch_s: float
    decode_s: float
    place_s: float
    copy_s: float
    device_s: float


def _measured(
    media: Media, executor: Literal["cpu", "gpu"], *, seed: int, device: torch.device, seconds: float
) -> _Seconds:
    transforms = tuple(
        dataclasses.replace(transform, executor="cpu" if transform.kind == "decode" else executor)
        for transform in media.transforms
    )
    with contextlib.closing(
        open_media(dataclasses.replace(media, transforms=transforms), seed=seed, device=device)
    ) as loader:
        for _ in range(WARMUP_BATCHES):
            loader.next()
        busy, before = loader.busy, dataclasses.replace(loader.busy)
        start, batches = time.perf_counter(), 0
        # The first of them may have been made before: at least one has to be made now.
        while batches < 2 or busy.samples == before.samples or time.perf_counter() - start < seconds:
            loader.next()
            batches += 1
        samples = max(1, busy.samples - before.samples)
        copied = max(1, busy.copied_samples - before.copied_samples)
        return _Seconds(
            fetch_s=(busy.fetch_s - before.fetch_s) / samples,
            decode_s=(busy.decode_s - before.decode_s) / samples,
            place_s=(busy.place_s - before.place_s) / samples,
            copy_s=(busy.copy_s - before.copy_s) / copied,
            device_s=(busy.device_s - before.device_s) / copied,
        )
