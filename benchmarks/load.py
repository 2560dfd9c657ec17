"""Batches of tokens: ours beside the loaders that people use, same tokens, same windows, same types.

    make bench NAME=load            100 M tokens, about three minutes
    python benchmarks/load.py --quick

Rows of 2,048 tokens in shuffled order, 8 a batch, from files in the page cache, in one process without workers (which
make every one of these slower for tokens; `--workers 2` shows it). Speed is tokens a second of CPU time of the
process, threads included, the best of three passes: the machine may be shared. Two types: int64, ready for the model,
and uint16, as a GPU wants it; tokens alone, as the peers give them. Ours also: whole batches with targets, weights,
positions and document ids; best-fit packing with these and a mixture of two sources, as one of 64 ranks with 512 rows a
step; and the time from a state at step 10 million to its batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loaders import OPEN, SECOND, WRITE, Task, load, python_of, rank_environment, save, write_windows

LENGTH, ROWS = 2048, 8
TYPES = ("int64", "uint16")
ELASTIC = ("grain", "grain-elastic", "litdata", "mosaicml")
"""Those that resume exactly at another world size (benchmarks/resume.py)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 M tokens")
    parser.add_argument("--workers", type=int, default=0, help="worker processes (grain: threads) of the peers")
    parser.add_argument("--contender", choices=OPEN, help="internal: run one of them")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    if options.contender:
        found = contend(options.contender, options.folder, options.workers, options.seconds)
        print(json.dumps(found), flush=True)
        return
    with tempfile.TemporaryDirectory() as place:
        compare(Path(place), options)


def compare(folder: Path, options: argparse.Namespace) -> None:
    from harness import finish

    windows = (10 if options.quick else 100) * 1_000_000 // LENGTH
    write_windows(folder / "source0.bin", windows=windows, length=LENGTH, first=0, seed=0)
    write_windows(folder / "source1.bin", windows=windows // 4, length=LENGTH, first=SECOND, seed=1)
    found, failed = {}, {}
    for name in OPEN:
        task = Task(folder=folder, length=LENGTH, rows=ROWS)
        command = [str(python_of(name)), __file__, "--contender", name, "--folder", str(folder)]
        command += ["--workers", str(options.workers), "--seconds", "0.3" if options.quick else "1.5"]
        try:
            done = subprocess.run(
                command, env=rank_environment(task, 29511), capture_output=True, text=True, timeout=150, check=True
            )
            found[name] = json.loads(done.stdout.strip().splitlines()[-1])
            print(name, json.dumps(found[name]), flush=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed[name] = (error.stderr or "timed out")[-300:] if isinstance(error.stderr, str) else "timed out"
            print(name, "failed:", failed[name], flush=True)
    ours = found.pop("ropewalk")
    ratios = {
        name: min(ours[kind] / figures[kind] for kind in TYPES if kind in figures) for name, figures in found.items()
    }
    best = min((ratio for name, ratio in ratios.items() if name in ELASTIC), default=None)
    finish(
        "load",
        ours=ours,
        peers=found,
        ratios=ratios,
        quality={"unit": "Mtok/s of CPU time", "against_fastest_elastic_peer": best, "failed": failed},
    )


def contend(name: str, folder: Path, workers: int, seconds: float) -> dict[str, float]:
    task = Task(folder=folder, length=LENGTH, rows=ROWS, workers=workers)
    if name in WRITE:
        both = Task(folder=folder, length=LENGTH, rows=ROWS, weights=(0.7, 0.3)) if name == "ropewalk" else task
        WRITE[name](both)
    if name == "ropewalk":
        return ours(task, seconds)
    figures = {}
    for kind in TYPES:
        reader = OPEN[name](Task(folder=folder, length=LENGTH, rows=ROWS, workers=workers, dtype=kind), None)
        figures[kind] = speed(reader.next, ROWS * LENGTH, seconds)
        if kind == "int64" and reader.state is not None:
            figures["resume_ms"] = resume_ms(name, task, reader.state())
    return figures


def ours(task: Task, seconds: float) -> dict[str, float]:
    with loader(task, rows=ROWS) as windows:
        figures = {"int64": speed(lambda: widened(windows.take()), ROWS * LENGTH, seconds)}
        figures["uint16"] = speed(windows.take, ROWS * LENGTH, seconds)
        figures["whole_batch_int64"] = speed(windows.next, ROWS * LENGTH, seconds)
    with loader(task, rows=ROWS, packed=True) as packed:
        figures["packed_whole_batch_int64"] = speed(packed.next, ROWS * LENGTH, seconds)
    with loader(task, rows=512, packed=True, world=64) as packed:
        figures["packed_rank_of_64"] = speed(packed.take, 512 // 64 * LENGTH, seconds)
        state = packed.state()
    # Step 10,000,000 of 512 rows.
    far = {**state, "step": 10_000_000, "row": 10_000_000 * 512, "batches": [[0, 0, 512]]}
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        with loader(task, rows=512, packed=True, world=64) as packed:
            packed.seek(far)
            packed.take()
            taken.append(1000 * (time.perf_counter() - start))
    figures["resume_ms"] = min(taken)
    return figures


def widened(batch: Any) -> Any:
    """The tokens alone, as the peers give them."""
    return batch.rows.numpy()[:, : batch.form.token_bytes].view("uint16").astype("int64")


@contextlib.contextmanager
def loader(task: Task, *, rows: int, packed: bool = False, world: int = 1) -> Iterator[Any]:
    from ropewalk.load.loader import Loader

    made = Loader(
        task.folder,
        sequence_length=LENGTH,
        batch_size=rows,
        seed=0,
        mixture={"s0": 0.7, "s1": 0.3} if packed else {"s0": 1.0},
        packing="best-fit" if packed else "windows",
        verify=False,
        world=world,
        rank=min(13, world - 1),
    )
    try:
        yield made
    finally:
        made.close()


def speed(read: Any, tokens: int, seconds: float) -> float:
    """M tokens a second of CPU time: the best of three passes."""
    for _ in range(5):
        read()
    rates = []
    for _ in range(3):
        start, cpu, batches = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - start < seconds / 3:
            read()
            batches += 1
        rates.append(batches * tokens / (time.process_time() - cpu) / 1e6)
    return max(rates)


def resume_ms(name: str, task: Task, state: Any) -> float:
    """Milliseconds from a state to the batch after it, with the corpus opened anew."""
    path = task.folder / f"{name}.state"
    save(state, path)
    start = time.perf_counter()
    OPEN[name](task, load(path)).next()
    return 1000 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
