"""What saving 1 GB of state on a CPU costs: ropewalk in the background beside torch.save, safetensors, DCP and others.

Each way runs in a process of its own and saves six times; figures are medians of saves 2 to 6, the first one paying for
buffers and imports. *Blocked* is the time until the state may change again, with nothing to hide it behind;
*overlapped*, ours only, is what is left of it when a forward and backward pass of half a second comes first. *Durable*
is the time until the files, and for ours the folder, are on the disk: ways that do not sync are synced afterwards.
*Packed* is ours with `checkpoint.packing = "on"`, of normally distributed float32, which packs worse than most weights.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import harness
import torch

SAVES = 6
STEP_S = 0.5
PEERS = ("torch.save", "safetensors", "dcp", "dcp async", "torch_checkpointing")

Wait = Callable[[], object]
Save = Callable[[Path], Wait | None]
"""Begins a save and returns when the state may change; what it returns waits until the files are written."""


def tensors(gigabytes: float) -> dict[str, torch.Tensor]:
    """Weights and two moments of 24 layers, of a GPT-2's shapes."""
    layers = max(1, round(gigabytes * 1e9 / (3 * 4 * (1024 * 3072 + 512 * 1024))))
    draw = torch.Generator().manual_seed(0)
    shapes = {"attention": (1024, 3072), "feed": (512, 1024)}
    return {
        f"{kind}/{layer}.{name}": torch.randn(shape, generator=draw)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for layer in range(layers)
        for name, shape in shapes.items()
    }


def ropewalk(given: dict[str, torch.Tensor], *, overlapped: bool, packed: bool) -> Iterator[dict[str, float]]:
    """As a run saves: snapshot, hash, write, sync, commit, publish."""
    from ropewalk.checkpoint.config import Checkpoints
    from ropewalk.checkpoint.tensors import State
    from ropewalk.model.config import Model
    from ropewalk.model.spec import resolve
    from ropewalk.train.keeping import Keeper

    spec = resolve(Model(width=8, heads=1), vocabulary=3, sequence_length=4)
    model = {name: tensor for name, tensor in given.items() if name.startswith("weight/")}
    moments = {name: tensor for name, tensor in given.items() if name not in model}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        keeper = Keeper(Path(place), Checkpoints(keep_last=SAVES, packing="on" if packed else "off"), warn=print)
        for step in range(1, SAVES + 1):
            state = State(
                step=step, tokens=0, seed=0, spec=spec, data={}, model=model, optimizer=moments, tokenizer=b"{}"
            )
            start = time.perf_counter()
            keeper.save(state)
            spent = time.perf_counter() - start
            if overlapped:
                compute(STEP_S)
            fence = time.perf_counter()
            keeper.fence()
            blocked = spent + time.perf_counter() - fence
            keeper.settle()
            durable = time.perf_counter() - start
            (saved,) = keeper.finished()
            assert saved.error is None, saved.error
            yield {"blocked_s": blocked, "durable_s": durable, "bytes": size_of(saved.path)}
            shutil.rmtree(saved.path)
        keeper.close()


def compute(seconds: float) -> None:
    """Stands for a forward and backward pass: matrix products, which leave the interpreter free."""
    matrix = torch.randn(512, 512)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix @ matrix


def peer(name: str, given: dict[str, torch.Tensor]) -> Iterator[dict[str, float]]:
    save = savers(given)[name]()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        for number in range(SAVES):
            path = Path(place) / str(number)
            start = time.perf_counter()
            wait = save(path)
            blocked = time.perf_counter() - start
            if wait:
                wait()
            sync(path)
            durable = time.perf_counter() - start
            yield {"blocked_s": blocked, "durable_s": durable, "bytes": size_of(path)}
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def savers(given: dict[str, torch.Tensor]) -> dict[str, Callable[[], Save]]:
    """A function for each peer that makes its `save`; imports belong to nobody's figures."""

    def torch_save() -> Save:
        return lambda path: torch.save(given, path)

    def safetensors_save() -> Save:
        from safetensors.torch import save_file

        return lambda path: save_file(given, path)

    def dcp_save() -> Save:
        import torch.distributed.checkpoint as dcp

        def save(path: Path) -> None:
            dcp.save(given, checkpoint_id=str(path), no_dist=True)

        return save

    def dcp_async() -> Save:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)

        def save(path: Path) -> Wait:
            return dcp.async_save(given, checkpoint_id=str(path)).result

        return save

    def torch_checkpointing() -> Save:
        from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager, CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        # Its default writer opens files for direct input and output, which ext4 refuses at their uneven ends.
        staging = CheckpointStagerConfig(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        manager = CheckpointManager.Config(
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            save=AsyncCheckpointSaverConfig(staging_config=staging),
        ).build()

        def save(path: Path) -> Wait | None:
            made = manager.save(str(path), {"model": given})
            return made.result if made is not None else None

        return save

    made = (torch_save, safetensors_save, dcp_save, dcp_async, torch_checkpointing)
    return dict(zip(PEERS, made, strict=True))


def sync(path: Path) -> None:
    """Makes what a peer has written durable; costs next to nothing where the peer has done so."""
    for file in [path] if path.is_file() else [child for child in path.rglob("*") if child.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


def measure(way: str, gigabytes: float) -> dict[str, float]:
    """One way in this process."""
    torch.set_num_threads(1)
    given = tensors(gigabytes)
    total = sum(tensor.numel() * tensor.element_size() for tensor in given.values())
    start = time.process_time()
    if way.startswith("ropewalk"):
        rows = list(ropewalk(given, overlapped=way.endswith("overlapped"), packed=way.endswith("packed")))
    else:
        rows = list(peer(way, given))
    spent = time.process_time() - start
    middle = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
    return {
        "blocked_s_a_GB": middle["blocked_s"] / total * 1e9,
        "durable_s_a_GB": middle["durable_s"] / total * 1e9,
        "first_blocked_s": rows[0]["blocked_s"],
        "bytes": middle["bytes"],
        "cpu_s_a_save": spent / SAVES,
        "peak_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def in_process(way: str, gigabytes: float, *, python: Path | str = sys.executable) -> dict[str, float]:
    figures: dict[str, float] = harness.call(python, __file__, "--way", way, "--gigabytes", str(gigabytes))
    return figures


def python_of(way: str) -> Path | str:
    if way != "torch_checkpointing":
        return sys.executable
    pinned = next(line for line in (harness.ROOT / "constraints.txt").read_text().splitlines() if line[:7] == "torch==")
    return harness.environment(way, [pinned, "numpy", "torch_checkpointing==0.1.1"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="0.1 GB, peers that are installed anyway")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measure(given.way, given.gigabytes)), flush=True)
        os._exit(0)  # some peers leave processes that would be waited for
    size = 0.1 if given.quick else given.gigabytes
    ours = in_process("ropewalk", size)
    ours["overlapped_s_a_GB"] = in_process("ropewalk overlapped", size)["blocked_s_a_GB"]
    packed = in_process("ropewalk packed", size)
    ours |= {"packed_durable_s_a_GB": packed["durable_s_a_GB"], "packed_bytes": packed["bytes"]}
    peers = {}
    for way in PEERS[:-1] if given.quick else PEERS:
        try:
            peers[way] = in_process(way, size, python=python_of(way))
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{way}: does not run here: {error}", file=sys.stderr)
    blocked, quarter = ours["blocked_s_a_GB"], 0.25 * peers["dcp async"]["blocked_s_a_GB"]
    bars = {
        "blocked <= 0.12 s/GB": blocked <= 0.12,
        "blocked <= 0.25 x DCP async_save": blocked <= quarter,
        "blocked <= 0.25 x DCP async_save, behind a step as in training": ours["overlapped_s_a_GB"] <= quarter,
        "durable no later than DCP": ours["durable_s_a_GB"] <= peers["dcp"]["durable_s_a_GB"],
        "durable no later than DCP async_save": ours["durable_s_a_GB"] <= peers["dcp async"]["durable_s_a_GB"],
    }
    ratios = {way: figures["blocked_s_a_GB"] / blocked for way, figures in peers.items()}
    harness.finish("checkpoint", ours=ours, peers=peers, ratios=ratios, quality={"saves": SAVES, **bars})


if __name__ == "__main__":
    main()
