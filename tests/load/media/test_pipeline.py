"""The loader of images: the same batches for any ranks, threads, interruption and executor; damage; waiting."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import ConfigError, DataError
from ropewalk.load.media import pipeline
from ropewalk.load.media.assembly import Assembly
from ropewalk.load.media.config import Transform
from ropewalk.load.media.flight import Images
from ropewalk.load.media.pipeline import MediaLoader, open_media
from ropewalk.load.media.transforms import compiled
from ropewalk.load.stalls import Stalls
from ropewalk.store.blobs import Blob, write_blobs
from ropewalk.store.items import Item
from ropewalk.store.origin import Origin

from .pictures import encoded, picture, shard, training

COUNT = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shard(tmp_path_factory.mktemp("pictures"), COUNT)


def sequence(batches: list[Images]) -> list[tuple[int, bytes]]:
    """Sample and pixels, in order."""
    return [
        (int(sample), image.numpy().tobytes())
        for batch in batches
        for sample, image in zip(batch.samples, batch.images, strict=True)
    ]


def global_sequence(loaders: list[MediaLoader], rows: list[int]) -> list[tuple[int, bytes]]:
    """What all ranks together read in steps of `rows`; the loaders are closed."""
    found = []
    for count in rows:
        by_rank = [sequence([loader.next(count)]) for loader in loaders]
        found += [sample for turn in zip(*by_rank, strict=True) for sample in turn]
    for loader in loaders:
        loader.close()
    return found


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 3, 6]),
    st.integers(1, 3),
    st.lists(st.sampled_from([12, 24]), min_size=1, max_size=3),
    st.sampled_from(["all", "blocks"]),
)
def test_ranks_threads_and_interruption_do_not_change_the_sequence(
    folder: Path, world: int, after: int, threads: int, rows: list[int], shuffle: str
) -> None:
    media = training(folder, shuffle=shuffle)
    total = sum(rows)
    whole = global_sequence([open_media(media, seed=4)], [total, total])
    first = [open_media(media, seed=4, rank=rank, world=world) for rank in range(world)]
    before = global_sequence(first, rows)
    (state,) = {str(loader.state()): loader.state() for loader in first}.values()
    changed = dataclasses.replace(media, threads=threads, fetch_threads=threads)
    second = [open_media(changed, seed=4, rank=rank, world=after) for rank in range(after)]
    for loader in second:
        loader.seek(state)
    assert before + global_sequence(second, rows) == whole


@pytest.mark.parametrize("shuffle", ["all", "blocks"])
def test_every_epoch_reads_every_sample_once_in_another_order_and_otherwise_cut(folder: Path, shuffle: str) -> None:
    loader = open_media(training(folder, shuffle=shuffle), seed=4)
    first, second = (loader.batch(epoch * COUNT, COUNT) for epoch in range(2))
    loader.close()
    assert sorted(first.samples.tolist()) == sorted(second.samples.tolist()) == list(range(COUNT))
    assert first.samples.tolist() != second.samples.tolist()
    assert torch.equal(first.labels, first.samples)
    assert not set(sequence([first])) & set(sequence([second]))


def test_a_batch_is_what_its_transforms_say(folder: Path) -> None:
    steps = (
        Transform(kind="decode"),
        Transform(kind="resize", size=24),
        Transform(kind="centre-crop", size=20, width=30),
    )
    loader = open_media(training(folder, transforms=steps), seed=4)
    batch = loader.next()
    loader.close()
    assert batch.images.dtype == torch.uint8
    for sample, image in zip(batch.samples.tolist(), batch.images, strict=True):
        source = torch.from_numpy(picture(sample)).permute(2, 0, 1)[None].float()
        small = torch.nn.functional.interpolate(source, (24, 32), mode="bilinear", antialias=True)
        # JPEG at quality 92 costs a few levels, and 2:1 is shrunk by the decoder.
        assert (image.float() - small[0, :, 2:22, 1:31]).abs().mean() < 3


@pytest.mark.parametrize("resampling", ["auto", "cpu"])
@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("numbers", [False, True])
def test_threads_and_device_give_the_same_images(
    folder: Path, numbers: bool, colour: bool, resampling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, *geometric, normalise = training(folder).transforms
    steps = (decode, *(dataclasses.replace(step, executor=resampling) for step in geometric), normalise)
    steps = steps[: 4 if numbers else 3]
    if colour:
        change = Transform(kind="colour", brightness=0.4, contrast=0.3, saturation=0.5)
        steps = (*steps[:3], change, *(steps[3:] or (Transform(kind="normalise"),)))
    media = training(folder, transforms=steps)
    plain = open_media(media, seed=4)

    def chain_of_a_gpu(media: Any, *, gpu: bool) -> Any:
        return compiled(media, gpu=True)

    # The operations of the device run on any; here it is the CPU.
    monkeypatch.setattr(pipeline, "compiled", chain_of_a_gpu)
    device = open_media(media, seed=4)
    levels = 255 * 0.229 if numbers or colour else 1
    for _ in range(3):
        one, other = plain.next(), device.next()
        assert one.images.dtype == other.images.dtype
        # Threads round to whole levels before they go on: one level, twice that where contrast grows.
        assert (one.images.float() - other.images.float()).abs().max() * levels <= (2.0 if colour else 1.01)
    plain.close()
    device.close()


def test_bfloat16_and_the_cpu_for_one_stage_alone(folder: Path) -> None:
    media = training(folder, dtype="bfloat16")
    mixed = dataclasses.replace(
        media, transforms=tuple(dataclasses.replace(step, executor="cpu") for step in media.transforms)
    )
    one, other = (open_media(settings, seed=4) for settings in (media, mixed))
    images = one.next().images
    assert images.dtype == torch.bfloat16
    assert torch.equal(images, other.next().images)
    one.close()
    other.close()


def damaged_folder(path: Path) -> Path:
    """Twelve pictures: number 3 is cut off, number 7 is no picture."""
    for number in range(12):
        data = encoded(picture(number))
        data = data[: len(data) // 2] if number == 3 else b"nothing" * 9 if number == 7 else data
        (path / f"{number:02}.jpg").write_bytes(data)
    return path


def test_damage_stops_with_the_name_of_the_document(tmp_path: Path) -> None:
    loader = open_media(training(damaged_folder(tmp_path), batch_size=12), seed=4)
    with pytest.raises(DataError, match=r'document 0[37]\.jpg: it.*; restore or .* set `on_damage = "skip"`'):
        loader.next()
    loader.close()


def test_damage_that_is_skipped_is_counted_weighs_nothing_and_changes_no_other_sample(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    damaged_folder(broken)
    for number in range(12):
        (whole / f"{number:02}.jpg").write_bytes(encoded(picture(number)))
    good, bad = (open_media(training(path, on_damage="skip"), seed=4) for path in (whole, broken))
    expected, found = good.next(), bad.next()
    for place, sample in enumerate(found.samples.tolist()):
        assert found.weight[place] == (0.0 if sample in (3, 7) else 1.0)
        if sample not in (3, 7):
            assert torch.equal(found.images[place], expected.images[place])
    assert sorted(name.rsplit(" ")[-1] for name in bad.damaged) == ["03.jpg", "07.jpg"]
    assert "end before the picture does" in next(why for name, why in bad.damaged.items() if "03" in name)
    assert not good.damaged
    good.close()
    bad.close()


@pytest.mark.parametrize("on_damage", ["stop", "skip"])
def test_a_shard_with_a_wrong_byte_names_the_document(tmp_path: Path, on_damage: str) -> None:
    # The first of them fills a chunk of the shard: the index lies in another, which stays whole.
    noise = np.random.default_rng(0).integers(0, 256, (900, 900, 3), np.uint8)
    pictures = [encoded(noise), *(encoded(picture(number)) for number in range(1, 12))]
    file = tmp_path / "pictures.blobs"
    write_blobs(file, [Blob(f"picture-{number}", data) for number, data in enumerate(pictures)])
    data = bytearray(file.read_bytes())
    data[300] ^= 1
    file.write_bytes(data)
    loader = open_media(training(tmp_path, on_damage=on_damage), seed=4)
    if on_damage == "stop":
        with pytest.raises(DataError, match=r"\(document picture-0\): not what was written"):
            loader.next()
    else:
        batch = loader.next()
        assert batch.samples[batch.weight == 0].tolist() == [0]
    loader.close()


def test_images_of_different_sizes_need_a_crop(tmp_path: Path) -> None:
    for number, width in enumerate((40, 50)):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(number, width=width), "PNG"))
    loader = open_media(training(tmp_path, batch_size=2, transforms=(Transform(kind="decode"),)), seed=4)
    with pytest.raises(DataError, match=r"document \d\.png: it is 48 x (40|50) pixels where others .* add a crop"):
        loader.next()
    loader.close()


def test_other_kinds_of_stills_and_large_reductions_go_the_same_way(tmp_path: Path) -> None:
    pixels = picture(1, height=300, width=400)
    for kind in ("PNG", "BMP", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        (tmp_path / f"1.{kind.lower()}").write_bytes(encoded(pixels, kind, **options))
    steps = (Transform(kind="decode"), Transform(kind="resize", size=30, width=40))
    loader = open_media(training(tmp_path, batch_size=3, transforms=steps), seed=4)
    images = loader.next().images.float()
    loader.close()
    # Only a PNG is shrunk before it is resampled: its header says in time how large it is.
    assert (images - images[0]).abs().max() <= 6
    assert (images - images[0]).abs().mean() < 1


def test_a_state_of_other_samples_is_refused(folder: Path, tmp_path: Path) -> None:
    one, other = open_media(training(folder), seed=4), open_media(training(shard(tmp_path, 5)), seed=5)
    one.next()
    assert one.state()["sample"] == 12
    with pytest.raises(DataError, match=r"another order .*seed was 4 and is 5; samples was 30 and is 5"):
        other.seek(one.state())
    other.seek({"sample": 3})
    assert other.state()["sample"] == 3
    one.close()
    other.close()


def test_skipping_goes_on_as_if_read(folder: Path) -> None:
    loader = open_media(training(folder), seed=4)
    loader.next()
    loader.skip(24)
    batch = loader.next()
    assert sequence([batch]) == sequence([loader.batch(36, 12)])
    assert loader.epochs == 48 / COUNT
    loader.close()


def test_ranks_that_do_not_divide_the_batch_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="12 samples cannot be shared by 5 ranks evenly; give a multiple of 5"):
        open_media(training(folder), seed=4, world=5)


def test_waiting_and_work_are_accounted_for(folder: Path) -> None:
    ticks = itertools.count()
    stalls = Stalls(clock=lambda: float(next(ticks)))
    loader = open_media(training(folder), seed=4, stalls=stalls)
    for _ in range(3):
        loader.next()
    figures = stalls.take()
    loader.close()
    parts = sum(figures[f"{cause}_s"] for cause in ("queue", "fetch", "prepare", "copy"))
    assert figures["batches"] == 3
    assert figures["wait_s"] == parts > 0
    assert figures["bytes"] > 3 * 12 * 1000
    assert loader.busy.samples >= 36
    assert loader.busy.bytes >= figures["bytes"]


def test_bytes_come_through_the_fetch_that_is_given(folder: Path) -> None:
    fetched: list[str] = []

    class Counted(Origin):
        def fetch(self, items: Sequence[Item]) -> list[bytes | memoryview]:
            fetched.extend(item.name for item in items if item.name)
            return super().fetch(items)

    loader = open_media(training(folder, batch_size=COUNT, prefetch_bytes=1), seed=4, fetch=Counted())
    loader.batch(0, COUNT)
    loader.close()
    assert sorted(fetched) == sorted(f"picture-{number}" for number in range(COUNT))


def test_memory_bounds_what_is_prepared_ahead(folder: Path) -> None:
    small, large = (open_media(training(folder, prefetch_bytes=size), seed=4) for size in (1, 1 << 30))
    for loader in (small, large):
        loader.next()
    assert len(small._flights) == 2
    assert len(large._flights) > 8
    small.close()
    large.close()


def test_an_error_of_a_thread_reaches_the_caller(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Assembly, work: Any, layout: Any) -> Any:
        raise ZeroDivisionError("in a thread")

    monkeypatch.setattr(Assembly, "finished", broken)
    loader = open_media(training(folder), seed=4)
    with pytest.raises(ZeroDivisionError, match="in a thread"):
        loader.next()
    loader.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize("on_cpu", [0, 3, 4])
def test_the_gpu_gives_the_images_of_the_cpu(folder: Path, on_cpu: int, workers: str) -> None:
    media = training(folder)
    steps = tuple(
        dataclasses.replace(step, executor="cpu" if number < on_cpu else "auto")
        for number, step in enumerate(media.transforms)
    )
    host = open_media(media, seed=4)
    device = open_media(training(folder, transforms=steps, workers=workers), seed=4, device="cuda")
    for _ in range(40):
        one, other = host.next(), device.next()
        assert other.images.is_cuda
        assert (one.images - other.images.cpu()).abs().max() * 255 * 0.229 <= 1.3
        assert np.array_equal(one.labels, other.labels.cpu())
    host.close()
    device.close()
