"""Does a GPU prepare ten times as fast as the machine's cores? MinHash keys of text; crops, resizes and normalising.

    make bench NAME=gpu_prepare     on a machine with a GPU, a minute; --quick: half a minute

MinHash: band keys of columns of documents (16 bands of 5 rows, shingles of 5 words), by our CPU kernel on all cores (a
thread a core, the kernel holds no lock) and by the GPU, with the way from ordinary host memory to the device and back,
and of text that lies on the device already. Every key is compared. The text is made here: words by Zipf's law in
documents like those of the web (2.8 kB on average, few of them long), the same in short ones (110 bytes), the standard
library's sources, and random Chinese.

Images: random crops of decoded pictures of many sizes, resized to 224 x 224 and normalised, by our CPU kernel on all
cores (float32) and on the GPU (bfloat16): with cutting the windows out by all cores and the way to the device, with the
way from page-locked memory alone, and of windows that lie on the device already. There torchvision's v2 transforms do
the same where they are installed, one picture at a time, and so do the matrix products of `load/media/device.py`. The
largest difference from the CPU is told in levels of 255, before normalising.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ropewalk.prepare.columns import Bytes, Offsets
from ropewalk.prepare.kernels.minhash import hash_functions, minhash_keys
from ropewalk.prepare.kernels.shingles import shingle_room
from ropewalk.prepare.kernels.words import Hashes, characters

BANDS, ROWS, WIDTH = 16, 5, 5
SIZE = 224
Result = TypeVar("Result")


def main() -> None:
    from harness import finish

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profile", action="store_true", help="also print what each kernel of the GPU takes")
    options = parser.parse_args()
    ours: dict[str, float] = {}
    cpu: dict[str, float] = {}
    ratios: dict[str, float] = {}
    quality: dict[str, object] = {}
    size = (1 << 29) if options.quick else (1 << 30)
    quality["limits"] = limits()
    print("limits in GB/s:", quality["limits"], flush=True)
    for name, make in CORPORA.items():
        data, offsets = grown(*make(np.random.default_rng(0)), size)
        figures = minhash(data, offsets, profile=options.profile)
        print(
            f"{name}: {len(offsets) - 1:,} documents,",
            ", ".join(f"{k} {v:.3g}" for k, v in figures.items()),
            flush=True,
        )
        quality[f"{name}_equal"] = bool(figures.pop("equal"))
        cpu[f"{name}_gb_s"] = figures["cpu_gb_s"]
        ours[f"{name}_gb_s"], ours[f"{name}_on_device_gb_s"] = figures["gpu_gb_s"], figures["on_device_gb_s"]
    ratios["minhash cpu, copies counted"] = min(ours[f"{name}_gb_s"] / cpu[f"{name}_gb_s"] for name in CORPORA)
    on_device = min(ours[f"{name}_on_device_gb_s"] / cpu[f"{name}_gb_s"] for name in CORPORA)
    ratios["minhash cpu, on the device"] = on_device
    pictures, differences = images(count=256 if options.quick else 1024)
    quality |= differences
    cpu["images_s"] = pictures.pop("cpu")
    peers = {"cpu": cpu}
    ours["images_s"], ours["images_bus_s"] = pictures.pop("ours"), pictures.pop("ours, from page-locked memory")
    ours["images_on_device_s"] = pictures.pop("ours, on the device")
    ratios["images cpu, copies counted"] = ours["images_s"] / cpu["images_s"]
    ratios["images cpu, on the device"] = ours["images_on_device_s"] / cpu["images_s"]
    for who, figure in pictures.items():
        peers[who] = {"images_on_device_s": figure}
        ratios[who] = ours["images_on_device_s"] / figure
    finish("gpu_prepare", ours=ours, peers=peers, ratios=ratios, quality=quality)


def minhash(data: Bytes, offsets: Offsets, *, profile: bool) -> dict[str, float]:
    """GB/s of each way, and whether all keys are equal."""
    import torch

    from ropewalk.prepare.gpu.minhash import Signer, batches

    device = torch.device("cuda")
    expected, cpu_s = timed(lambda: by_cores(data, offsets))
    signer = Signer(bands=BANDS, rows=ROWS, shingle_words=WIDTH, device=device)
    found, gpu_s = timed(lambda: signer.keys(data, offsets))
    with ThreadPoolExecutor() as copiers:
        there = [batch.to(device) for _, batch in batches(data, offsets, copiers)]
    torch.cuda.synchronize()

    def on_device() -> None:
        for batch in there:
            signer.keys_of(batch)
        torch.cuda.synchronize()

    _, device_s = timed(on_device)
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            on_device()
        print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=12, max_name_column_width=40))
    size = len(data) / 1e9
    seconds = {"cpu_gb_s": cpu_s, "gpu_gb_s": gpu_s, "on_device_gb_s": device_s}
    return {name: size / value for name, value in seconds.items()} | {"equal": float((expected == found).all())}


def limits() -> dict[str, float]:
    """GB/s that the host and the bus allow: what no way from host memory can beat."""
    import torch

    size = 256 << 20
    source, target = np.ones(size, np.uint8), torch.empty(size, dtype=torch.uint8, pin_memory=True)
    into = target.numpy()
    pieces = [slice(start, start + (4 << 20)) for start in range(0, size, 4 << 20)]
    figures = {}
    for threads in (1, 4, 8, 16):
        with ThreadPoolExecutor(threads) as pool:
            copy = functools.partial(lambda pool: list(pool.map(lambda p: np.copyto(into[p], source[p]), pieces)), pool)
            figures[f"to page-locked memory by {threads}"] = size / 1e9 / timed(copy)[1]
    there = torch.empty(size, dtype=torch.uint8, device="cuda")

    def bus(host: torch.Tensor) -> None:
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    figures["bus"] = size / 1e9 / timed(lambda: bus(target))[1]
    figures["bus from ordinary memory"] = size / 1e9 / timed(lambda: bus(torch.from_numpy(source)))[1]
    return {name: round(value, 1) for name, value in figures.items()}


def by_cores(data: Bytes, offsets: Offsets) -> Hashes:
    """The CPU kernel, a thread a core."""
    cores = len(os.sched_getaffinity(0))
    edges = np.searchsorted(offsets, np.linspace(0, len(data), 8 * cores + 1).astype(np.int64))
    edges[0], edges[-1] = 0, len(offsets) - 1
    functions = hash_functions(BANDS * ROWS)

    def part(first: int, last: int) -> Hashes:
        some = offsets[first : last + 1]
        ring = np.empty(WIDTH, np.uint64)
        return minhash_keys(data, some, *characters(), ring, shingle_room(some), *functions, BANDS)

    with ThreadPoolExecutor(cores) as pool:
        parts = pool.map(part, edges[:-1], edges[1:])
        return np.concatenate(list(parts), axis=1)


def images(*, count: int) -> tuple[dict[str, float], dict[str, float]]:
    """(images a second of each way, the largest differences from the CPU)."""
    import torch

    from ropewalk.load.media.device import Axis, recoloured, resampled
    from ropewalk.load.media.fused import window_images
    from ropewalk.load.media.resample import copy_window, extents, resample_numbers

    rng = np.random.default_rng(0)
    sides = rng.integers(300, 641, (count, 2))
    pictures = [rng.integers(0, 256, (high, wide, 3), dtype=np.uint8) for high, wide in sides]
    share = np.sqrt(rng.uniform(0.08, 1.0, count))[:, None]
    corner = np.floor(rng.random((count, 2)) * sides * (1 - share))
    regions = np.concatenate([corner, np.floor(corner + sides * share)], axis=1)
    flips = rng.random(count) < 0.5
    scale = (1 / (255 * np.array([0.229, 0.224, 0.225]))).astype(np.float32)
    shift = np.array([-2.1179, -2.0357, -1.8044], np.float32)
    spans = extents(regions, regions, SIZE, SIZE)
    high, wide = (spans[:, 2:] - spans[:, :2]).T
    starts = np.concatenate([[0], (high * wide * 3).cumsum()])
    shifted = regions - np.tile(spans[:, :2], 2)
    table = np.ascontiguousarray(np.concatenate([shifted.T, shifted.T, flips[None]]))
    device = torch.device("cuda")
    locked = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=True)
    packed = locked.numpy()
    cores = len(os.sched_getaffinity(0))
    numbers = np.empty((count, 3, SIZE, SIZE), np.float32)
    unchanged = np.empty((0, 4), np.float32)
    places = [torch.from_numpy(value).pin_memory() for value in (starts[:-1], wide * 3, table)]
    levels = [torch.from_numpy(value).to(device) for value in (scale, shift)]

    def on_cores(work: Callable[[int], None]) -> None:
        parts = np.array_split(np.arange(count), 4 * cores)
        list(pool.map(lambda part: [work(int(number)) for number in part], parts))

    def resize(number: int) -> None:
        region, flip = regions[number], bool(flips[number])
        resample_numbers(pictures[number], region, region, flip, unchanged, scale, shift, numbers[number])

    def cut(number: int) -> None:
        target = packed[starts[number] : starts[number + 1]].reshape(high[number], wide[number], 3)
        copy_window(pictures[number], spans[number], target)

    def made(there: torch.Tensor, rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        size, (scales, shifts) = (SIZE, SIZE), levels
        return window_images(there, *rows, size=size, colours=None, scale=scales, shift=shifts, dtype=dtype)

    def from_bus() -> None:
        rows = [value.to(device, non_blocking=True) for value in places]
        made(locked.to(device, non_blocking=True), rows, torch.bfloat16)
        torch.cuda.synchronize()

    def from_pictures() -> None:
        on_cores(cut)
        from_bus()

    def here() -> None:
        made(there, rows, torch.bfloat16)
        torch.cuda.synchronize()

    def blocks() -> None:
        for first in range(0, count, 256):
            part = slice(first, first + 256)
            columns = table_there[:, part]
            top, left, bottom, right, _, _, _, _, flip = columns
            # The block is as large as the largest window: what is beyond each is not read.
            result = resampled(
                block[part],
                Axis(top, bottom, top, bottom),
                Axis(left, right, left, right),
                size=(SIZE, SIZE),
                flips=flip > 0.5,
                precision=torch.float16,
            )
            recoloured(result, colours_B34=None, scale_C=levels[0], shift_C=levels[1], dtype=torch.bfloat16)
        torch.cuda.synchronize()

    with ThreadPoolExecutor(cores) as pool:
        seconds = {"cpu": timed(lambda: on_cores(resize))[1], "ours": timed(from_pictures)[1]}
        seconds["ours, from page-locked memory"] = timed(from_bus)[1]
        there, rows = locked.to(device), [value.to(device) for value in places]
        seconds["ours, on the device"] = timed(here)[1]
        block = torch.zeros((count, -(-int(high.max()) // 8) * 8, -(-int(wide.max()) // 8) * 8, 3), dtype=torch.uint8)
        for number in range(count):
            copy_window(pictures[number], spans[number], block[number].numpy())
        block, table_there = block.to(device), rows[2]
        seconds["matrix products"] = timed(blocks)[1]
        seconds |= by_torchvision(pictures, regions, flips)
        exact = made(there, rows, torch.float32).cpu().numpy()
        difference = float((np.abs(exact - numbers) / scale[:, None, None]).max())
    print(f"images: {count}, {int(starts[-1]) / count / 1e3:.0f} kB a window", flush=True)
    return {who: count / value for who, value in seconds.items()}, {"images_levels_apart": difference}


def by_torchvision(pictures: list[np.ndarray], regions: np.ndarray, flips: np.ndarray) -> dict[str, float]:
    """Seconds of torchvision's v2 functions, of pictures that lie on the device; nothing where it is not installed."""
    import torch

    try:
        from torchvision.transforms.v2 import functional
    except ImportError:
        return {}
    there = [torch.from_numpy(picture).permute(2, 0, 1).contiguous().to("cuda") for picture in pictures]
    corners = [(int(a), int(b), int(c - a), int(d - b)) for a, b, c, d in regions]

    def run() -> None:
        made = []
        for picture, (top, left, high, wide), flip in zip(there, corners, flips, strict=True):
            crop = functional.resized_crop(picture, top, left, high, wide, [SIZE, SIZE], antialias=True)
            made.append(functional.horizontal_flip(crop) if flip else crop)
        numbers = functional.to_dtype(torch.stack(made), torch.float32, scale=True)
        functional.normalize(numbers, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]).to(torch.bfloat16)
        torch.cuda.synchronize()

    return {"torchvision": timed(run)[1]}


def timed(function: Callable[[], Result], *, times: int = 4) -> tuple[Result, float]:
    """What it gives, and the least of some times after a first one that compiles."""
    result, least = function(), float("inf")
    for _ in range(times):
        began = time.perf_counter()
        function()
        least = min(least, time.perf_counter() - began)
    return result, least


def zipf(rng: np.random.Generator, lengths: np.ndarray) -> tuple[Bytes, Offsets]:
    """Documents of these lengths in bytes, of made-up words that are as frequent as Zipf's law says."""
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkqjxz", np.uint8)
    weights = 1 / np.arange(2, 28)
    sizes = 1 + rng.poisson(3.6, 30_000)
    drawn = rng.choice(letters, int(sizes.sum()), p=weights / weights.sum()).tobytes()
    edges = np.concatenate([[0], sizes.cumsum()])
    words = [drawn[a:b] for a, b in itertools.pairwise(edges)]
    ranks = 1 / np.arange(1, len(words) + 1)
    picked = rng.choice(len(words), int(lengths.sum()) // 4, p=ranks / ranks.sum())
    text = b" ".join([words[number] for number in picked])
    data = np.resize(np.frombuffer(text, np.uint8), int(lengths.sum()))
    return data, np.concatenate([[0], lengths.cumsum()]).astype(np.int64)


def web(rng: np.random.Generator) -> tuple[Bytes, Offsets]:
    return zipf(rng, rng.lognormal(7.3, 1.1, 6_000).astype(np.int64) + 1)


def short(rng: np.random.Generator) -> tuple[Bytes, Offsets]:
    return zipf(rng, rng.integers(20, 200, 120_000))


def python(rng: np.random.Generator) -> tuple[Bytes, Offsets]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_bytes() for path in files]
    lengths = np.array([len(text) for text in texts])
    return np.frombuffer(b"".join(texts), np.uint8), np.concatenate([[0], lengths.cumsum()]).astype(np.int64)


def chinese(rng: np.random.Generator) -> tuple[Bytes, Offsets]:
    lengths = 3 * (rng.lognormal(6.5, 1.0, 6_000).astype(np.int64) + 1)
    points = rng.integers(0x4E00, 0x6E00, int(lengths.sum()) // 3)
    points[rng.random(len(points)) < 0.1] = ord("，")
    data = np.frombuffer("".join(map(chr, points.tolist())).encode(), np.uint8)
    return data, np.concatenate([[0], lengths.cumsum()]).astype(np.int64)


CORPORA: dict[str, Callable[[np.random.Generator], tuple[Bytes, Offsets]]] = {
    "web": web,
    "short": short,
    "python": python,
    "chinese": chinese,
}


def grown(data: Bytes, offsets: Offsets, size: int) -> tuple[Bytes, Offsets]:
    """The documents again and again, to about `size` bytes. What is in them changes no time, only how much there is."""
    times = max(1, size // len(data))
    starts = (np.arange(times)[:, None] * len(data) + offsets[:-1]).ravel()
    grown_data = np.tile(data, times)
    grown_data.flags.writeable = False
    return grown_data, np.append(starts, len(grown_data))


if __name__ == "__main__":
    main()
