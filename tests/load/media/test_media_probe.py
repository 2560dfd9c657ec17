"""What the stages of a source of images cost, and where they are best done."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.load.media.probe import MediaRates, place_transforms, probe_media
from ropewalk.load.media.threads import Threads
from ropewalk.load.placement import Device, Work

from .pictures import shard, training

CPU = torch.device("cpu")


def test_every_stage_on_the_cpu_is_measured(tmp_path: Path) -> None:
    media = training(shard(tmp_path, 24), batch_size=8)
    found = probe_media(media, seed=0, device=CPU, cores=2, seconds=0.05)
    decode, transforms = found.works
    assert (decode.name, transforms.name) == ("decode", "transforms")
    assert decode.core_s > 0
    assert transforms.core_s > 0
    assert math.isinf(transforms.device_s)
    placed = place_transforms(media, found, samples_per_s=1e9, cores=2)
    assert placed.on_device == ()
    assert placed.forecast.tokens_per_s <= 2 / (decode.core_s + transforms.core_s) * 1.001


def test_what_is_compiled_for_the_first_batch_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, compiled = Threads._part, threading.Event()

    def compiling(self: Threads, batch: Any, samples: range) -> None:
        if not compiled.is_set():
            compiled.set()
            self._busy.add(decode_s=1e4, place_s=1e4)
        part(self, batch, samples)

    monkeypatch.setattr(Threads, "_part", compiling)
    media = training(shard(tmp_path, 24), batch_size=8, threads=1)
    found = probe_media(media, seed=0, device=CPU, cores=2, seconds=0.0)
    assert compiled.is_set()
    assert all(0 < work.core_s < 10 for work in found.works)


@pytest.mark.parametrize(("samples_per_s", "moved"), [(10_000.0, ("transforms",)), (100.0, ())])
def test_transforms_move_to_a_device_only_for_a_step_that_outruns_the_cores(
    tmp_path: Path, samples_per_s: float, moved: tuple[str, ...]
) -> None:
    works = (Work(name="decode", core_s=1e-3), Work(name="transforms", core_s=3e-3, device_s=1e-5))
    found = MediaRates(fetch=math.inf, copy=math.inf, works=works, device=Device(), threads=4)
    media = training(shard(tmp_path, 4), batch_size=4)
    assert place_transforms(media, found, samples_per_s=samples_per_s, cores=4).on_device == moved
