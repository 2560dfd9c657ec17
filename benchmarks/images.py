"""Images to the device: decode + random-resized-crop 224 + flip + normalise, ours beside torch DataLoader + Pillow.

    make bench NAME=images                                          on the CPU, a minute or two
    PYTHONPATH=. python benchmarks/images.py --device cuda          on a GPU machine, nothing is installed
    python benchmarks/images.py --quick

Every contender reads the same folder of JPEG files (500 x 375, quality 90, about 26 KB, made here, in the page cache)
with the same cores, and brings normalised float32 batches of 256 to the device. The DataLoader has a worker a core and
does its work in Pillow, which crops and resizes in one pass; where torchvision is installed its transforms are a second
peer. Each reports images a second after a warm-up, the processor time of an image over all its processes, and that of
the process that trains (`parent_us`). Ours decodes in threads or processes, as `workers = "auto"` chooses for the
cores; the other of the two is measured beside it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
BATCH, SIZE = 256, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PICTURES = 64
"""Different ones; more files are links to them, so that making them takes seconds."""


def photograph(seed: int, *, height: int = 375, width: int = 500) -> np.ndarray:
    """Octaves of smooth noise with edges: as many bytes as a photograph of this size and quality."""
    rng = torch.Generator().manual_seed(seed)
    image = torch.zeros(1, 3, height, width)
    for octave in range(1, 8):
        shape = (height * 2**octave // 256 + 2, width * 2**octave // 256 + 2)
        noise = torch.randn(1, 3, *shape, generator=rng)
        grey = 0.35 * noise + noise.mean(1, keepdim=True)
        image += F.interpolate(grey, (height, width), mode="bilinear") * 1.7**-octave
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    for _ in range(6):
        a, b, c, *colour = torch.randn(6, generator=rng).tolist()
        inside = ((a * x + b * y > c) & (b * x - a * y < c)).float()
        image += 0.4 * inside * torch.tensor(colour)[None, :, None, None]
    return (128 + 70 * image[0]).clamp(0, 255).byte().permute(1, 2, 0).numpy()


def write_corpus(folder: Path, count: int) -> None:
    from PIL import Image

    for number in range(PICTURES):
        file = folder / f"{number % 10}" / f"{number}.jpg"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(photograph(number)).save(file, "JPEG", quality=90)
    for number in range(PICTURES, count):
        source = number % PICTURES
        os.link(folder / f"{source % 10}" / f"{source}.jpg", folder / f"{source % 10}" / f"{number}.jpg")


class PillowDataset(torch.utils.data.Dataset):
    """A file a sample, everything in Pillow but the last step."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.rglob("*.jpg"))
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        image = Image.open(self.files[index]).convert("RGB")
        box = random_box(*image.size)
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float().div_(255)
        return pixels.sub_(self.mean).div_(self.std), int(self.files[index].parent.name)


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        aspect = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        wide, high = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if wide <= width and high <= height:
            left, top = random.randint(0, width - wide), random.randint(0, height - high)
            return left, top, left + wide, top + high
    return 0, 0, width, height


class TorchvisionDataset(PillowDataset):
    """The same with torchvision's transforms on Pillow images, as its reference training has them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from torchvision import transforms

        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(SIZE),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        image = Image.open(self.files[index]).convert("RGB")
        return self.transform(image), int(self.files[index].parent.name)


def dataloader(kind: type[PillowDataset], folder: Path, device: str, cores: int) -> Iterator[torch.Tensor]:
    loader = torch.utils.data.DataLoader(
        kind(folder),
        batch_size=shared_batch(cores),
        shuffle=True,
        drop_last=True,
        num_workers=cores,
        pin_memory=device == "cuda",
        persistent_workers=True,
        prefetch_factor=2,
    )
    while True:
        for images, _ in loader:
            yield images.to(device, non_blocking=True)


def shared_batch(workers: int) -> int:
    """Samples a batch of the DataLoader: fewer than ours where shared memory, through which its workers send, holds not
    two batches of each."""
    room = os.statvfs("/dev/shm")
    batch = BATCH
    while batch > 8 and 2 * workers * batch * 3 * SIZE**2 * 4 > 0.8 * room.f_bavail * room.f_frsize:
        batch //= 2
    return batch


def measure(batches: Iterator[torch.Tensor], device: str, seconds: float, warm: int = 8) -> dict[str, float]:
    """Images a second over about `seconds`, each batch used once on the device; none is thrown away unread."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    total = torch.zeros((), device=device)
    for _ in range(warm):
        total += next(batches).sum()
    wait()
    count, began, used, parent = 0, time.perf_counter(), cpu_seconds(), time.process_time()
    while time.perf_counter() - began < seconds:
        images = next(batches)
        total += images.sum()
        count += len(images)
    wait()
    took = time.perf_counter() - began
    assert torch.isfinite(total), "an image is not a number"
    return {
        "images_per_s": count / took,
        "cpu_us": 1e6 * (cpu_seconds() - used) / count,
        "parent_us": 1e6 * (time.process_time() - parent) / count,
    }


def cpu_seconds() -> float:
    """Of this process and its workers: what a shared machine does not change much."""
    total = time.process_time()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[1]) == os.getpid():
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def ours(
    folder: Path, device: str, cores: int, seconds: float, *, executor: str = "auto", workers: str = "auto"
) -> dict[str, float]:
    sys.path.insert(0, str(ROOT))
    from ropewalk.load.media.pipeline import open_media
    from ropewalk.load.stalls import Stalls

    stalls = Stalls()
    media = settings(folder, cores, executor=executor, workers=workers)
    loader = open_media(media, seed=1, device=device, stalls=stalls)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield loader.next().images

    # Kernels are compiled by the first batches; the figures count from there on.
    measure(batches(), device, seconds=0.1, warm=4)
    busy = loader.busy
    before = (busy.fetch_s, busy.decode_s, busy.place_s, busy.copy_s, busy.device_s)
    samples, copied = busy.samples, busy.copied_samples
    result = measure(batches(), device, seconds)
    after = (busy.fetch_s, busy.decode_s, busy.place_s, busy.copy_s, busy.device_s)
    for name, start, end in zip(("fetch", "decode", "place", "copy", "device"), before, after, strict=True):
        images = busy.copied_samples - copied if name in ("copy", "device") else busy.samples - samples
        result[f"{name}_us"] = 1e6 * (end - start) / max(1, images)
    figures = stalls.take()
    result["bytes_per_image"] = figures["bytes"] / max(1.0, figures["batches"]) / BATCH
    loader.close()
    return result


def settings(folder: Path, cores: int, *, executor: str = "auto", workers: str = "auto") -> Any:
    from ropewalk.load.media.config import Media, Transform

    steps = (
        Transform(kind="decode"),
        Transform(kind="random-resized-crop", size=SIZE, executor=executor),
        Transform(kind="flip", executor=executor),
        Transform(kind="normalise", mean=MEAN, std=STD),
    )
    return Media(
        name="photographs", path=str(folder), batch_size=BATCH, workers=workers, threads=cores, transforms=steps
    )


def difference(folder: Path, device: str) -> float:
    """Mean distance in levels (of 255) between our images and Pillow's, cut out by the same windows."""
    sys.path.insert(0, str(ROOT))
    from PIL import Image

    from ropewalk.load.media.pipeline import open_media
    from ropewalk.load.media.streams import Drawn
    from ropewalk.load.media.transforms import compiled

    media = settings(folder, 1)
    loader = open_media(media, seed=1, device=device)
    batch = loader.batch(0, BATCH)
    numbers = batch.samples.numpy()
    drawn = Drawn(1, loader.samples.keys[numbers], np.zeros(BATCH, np.int64))
    windows = compiled(media, gpu=device == "cuda").windows(np.tile([375, 500], (BATCH, 1)), drawn)
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    distances = []
    for place in range(0, BATCH, 4):
        item = loader.samples.item(int(numbers[place]))
        top, left, bottom, right = windows.boxes[place].astype(int).tolist()
        image = Image.open(io.BytesIO(Path(item.file).read_bytes())).convert("RGB").crop((left, top, right, bottom))
        levels = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)).astype(np.float32)
        levels = levels[:, ::-1] if windows.flips[place] else levels
        mine = ((batch.images[place].cpu() * std + mean) * 255).permute(1, 2, 0).numpy()
        distances.append(np.abs(mine - levels).mean())
    loader.close()
    return float(np.mean(distances))


CONTENDERS: dict[str, Callable[..., dict[str, float]]] = {
    "ropewalk": ours,
    "ropewalk-threads": lambda *options: ours(*options, workers="threads"),
    "ropewalk-processes": lambda *options: ours(*options, workers="processes"),
    "ropewalk-cpu-resample": lambda *options: ours(*options, executor="cpu"),
    "dataloader-pillow": lambda folder, device, cores, seconds: measure(
        dataloader(PillowDataset, folder, device, cores), device, seconds
    ),
    "dataloader-torchvision": lambda folder, device, cores, seconds: measure(
        dataloader(TorchvisionDataset, folder, device, cores), device, seconds
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="for every contender")
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    seconds = 5.0 if options.quick else 10.0
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    if options.contender:
        found = CONTENDERS[options.contender](options.folder, options.device, options.cores, seconds)
        print(json.dumps(found))
        # Workers of a DataLoader that is in the middle of an epoch take long to end in order.
        sys.stdout.flush()
        os._exit(0)

    sys.path.insert(0, str(ROOT))
    from harness import call, finish

    from ropewalk.load.media.pipeline import MOST_THREADS

    chosen, other = ("processes", "threads") if options.cores > MOST_THREADS else ("threads", "processes")
    names = ["ropewalk", f"ropewalk-{other}", "dataloader-pillow"]
    names += ["dataloader-torchvision"] if find_spec("torchvision") else []
    names += ["ropewalk-cpu-resample"] if options.device == "cuda" else []
    flags = ["--device", options.device, "--cores", str(options.cores), *["--quick"] * options.quick]
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder), 2048 if options.quick else 8192)
        found = {
            name: call(sys.executable, __file__, "--contender", name, "--folder", folder, *flags) for name in names
        }
        levels = difference(Path(folder), options.device)
    mine = found.pop("ropewalk")
    ratios = {
        name: mine["images_per_s"] / figures["images_per_s"]
        for name, figures in found.items()
        if not name.startswith("ropewalk")
    }
    quality = {
        "mean_levels_from_pillow": round(levels, 3),
        "workers": {"auto": chosen, chosen: mine, other: found[f"ropewalk-{other}"]},
        "cpu_per_image": {name: round(figures["cpu_us"] / mine["cpu_us"], 2) for name, figures in found.items()},
        "device": options.device,
        "cores": options.cores,
    }
    finish("images", ours=mine, peers=found, ratios=ratios, quality=quality)


if __name__ == "__main__":
    main()
