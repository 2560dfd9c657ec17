"""Does a GPU wait for its data? Batches of packed documents at the speed of a 124 M model on an H200 and above.

    make bench NAME=feed            on a machine with a GPU, one minute

A step is as many matrix products as take the time in which the model would train on 64 rows of 1,024 tokens. It runs
with the same batch again and again, then with batches from the loader (best-fit packing, two sources, document ids,
positions, compact over the bus, expanded on the device), then with those of a plain torch DataLoader (windows in
shuffled order, four workers, page-locked memory). Told is how much longer a step takes than without loading, the
share of the step in which the host waited for a batch, and the cause. The ratio of the peer is its waiting over ours.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loaders import SECOND, Task, Windows, ropewalk_write, write_windows

LENGTH, ROWS = 1024, 64
SPEEDS = (600_000, 2_400_000)
"""Tokens a second: a 124 M model on an H200 today, and four times that."""


def main() -> None:
    from harness import finish

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    steps = 20 if options.quick else 60
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_windows(folder / "source0.bin", windows=60_000, length=LENGTH, first=0, seed=0)
        write_windows(folder / "source1.bin", windows=20_000, length=LENGTH, first=SECOND, seed=1)
        ropewalk_write(Task(folder=folder, length=LENGTH, rows=ROWS, weights=(0.7, 0.3)))
        ours, peer = {}, {}
        for speed in SPEEDS:
            work = compute(ROWS * LENGTH / speed, options.device)
            alone = step_ms(work, lambda: None, steps)
            figures, causes = from_ropewalk(folder, work, options.device, steps)
            name = f"{speed // 1000}k"
            ours[f"{name}_extra_percent"] = 100 * (figures["step_ms"] / alone - 1)
            ours[f"{name}_wait_percent"] = 100 * figures["wait_ms"] / figures["step_ms"]
            other = from_dataloader(folder, work, options.device, steps)
            peer[f"{name}_extra_percent"] = 100 * (other["step_ms"] / alone - 1)
            peer[f"{name}_wait_percent"] = 100 * other["wait_ms"] / other["step_ms"]
            print(f"{name}: step {alone:.2f} ms alone, {figures['step_ms']:.2f} ours, {other['step_ms']:.2f}", causes)
    worst = max(ours[f"{speed // 1000}k_wait_percent"] for speed in SPEEDS)
    theirs = max(peer[f"{speed // 1000}k_wait_percent"] for speed in SPEEDS)
    finish(
        "feed",
        ours=ours,
        peers={"dataloader": peer},
        ratios={"dataloader": theirs / max(worst, 1e-3)},
        quality={"device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu"},
    )


def compute(seconds: float, device: str) -> Callable[[], None]:
    """Matrix products that keep the device busy for so long."""
    size = 4096 if device == "cuda" else 256
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    for _ in range(20):
        a @ a
    settle(device)
    start = time.perf_counter()
    for _ in range(50):
        a @ a
    settle(device)
    repeats = max(1, round(seconds / ((time.perf_counter() - start) / 50)))

    def work() -> None:
        for _ in range(repeats):
            a @ a

    return work


def step_ms(work: Callable[[], None], load: Callable[[], Any], steps: int) -> float:
    return timed(work, load, steps)["step_ms"]


def timed(work: Callable[[], None], load: Callable[[], Any], steps: int) -> dict[str, float]:
    """Median milliseconds of a step and mean of waiting in `load`; the device is waited for at every step's end."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seconds, waited = [], 0.0
    for number in range(steps + 5):
        start = time.perf_counter()
        load()
        got = time.perf_counter()
        work()
        settle(device)
        if number >= 5:
            seconds.append(time.perf_counter() - start)
            waited += got - start
    return {"step_ms": 1000 * statistics.median(seconds), "wait_ms": 1000 * waited / steps}


def from_ropewalk(
    folder: Path, work: Callable[[], None], device: str, steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    from ropewalk.load.loader import Loader
    from ropewalk.load.stalls import Stalls

    stalls = Stalls()
    loader = Loader(
        folder,
        sequence_length=LENGTH,
        batch_size=ROWS,
        seed=0,
        mixture={"s0": 0.7, "s1": 0.3},
        packing="best-fit",
        verify=False,
        device=device,
        stalls=stalls,
    )

    def load() -> None:
        batch = loader.next()
        # What a model reads first.
        batch.tokens.sum(), batch.documents.sum(), batch.positions.sum()

    figures = timed(work, load, steps)
    causes = {cause: round(value, 4) for cause, value in stalls.take().items()}
    loader.close()
    return figures, causes


def from_dataloader(folder: Path, work: Callable[[], None], device: str, steps: int) -> dict[str, float]:
    from torch.utils.data import DataLoader, RandomSampler

    data = Windows(Task(folder=folder, length=LENGTH, rows=ROWS))
    order = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    cuda = device == "cuda"
    batches = iter(DataLoader(data, batch_size=ROWS, sampler=order, num_workers=4 if cuda else 2, pin_memory=cuda))
    return timed(work, lambda: next(batches).to(device, non_blocking=True).sum(), steps)


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
