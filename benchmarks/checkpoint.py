"""What saving 1 GB of state on a CPU costs: ropewalk in the background beside torch.save, safetensors, DCP and others.

Each way runs in a process of its own and saves six times; figures are medians of saves 2 to 6, the first one paying for
buffers and imports. *Durable* is the time until the files, and for ours the folder, are on the disk: ways that do not
sync are synced afterwards. *At once* is ours with nothing to hide the copy behind. *Packed* is ours with
`checkpoint.compression = "on"`, of normally distributed float32, which packs worse than most weights; on one
thread, and on the two of the default.

Ours and DCP's `async_save` also save beside a training, the same for both: matrix products for half a second a step,
then an update of the whole state in place. Stretches of steps with a save at their beginning take turns with stretches
without. There *blocked* is what the loop itself waits (the call, and for ours the fence before the next update), and
*delay* is how much longer a stretch with a save takes than the stretches around it: the copy, and all that the
background takes from the training. The training computes on one core, and in a second run on all of them.
"""

from __future__ import annotations

import argparse
import ctypes
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness
import torch

SAVES = 6
STEP_S_A_GB = 0.5
STRETCH = 4
"""Steps in a stretch: long enough for a save to become durable within it."""
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


class Ours:
    """As a run saves: snapshot, hash, write, sync, commit, publish."""

    def __init__(self, place: Path, given: dict[str, torch.Tensor], *, packed: bool = False, threads: int = 2) -> None:
        from ropewalk.checkpoint.config import Checkpoints
        from ropewalk.model.config import Model
        from ropewalk.model.spec import resolve
        from ropewalk.train.checkpointer import Checkpointer

        self._spec = resolve(Model(width=8, heads=1), vocabulary=3, sequence_length=4)
        self._model = {name: tensor for name, tensor in given.items() if name.startswith("weight/")}
        self._moments = {name: tensor for name, tensor in given.items() if name not in self._model}
        settings = Checkpoints(keep_last=SAVES, compression="on" if packed else "off", threads=threads)
        self._checkpointer = Checkpointer(place, settings, warn=print)
        self.fence, self.close = self._checkpointer.fence, self._checkpointer.close

    def save(self, step: int) -> None:
        from ropewalk.checkpoint.run_state import State

        self._checkpointer.save(
            State(
                step=step,
                tokens=0,
                seed=0,
                spec=self._spec,
                data={},
                model=self._model,
                optimizer=self._moments,
                tokenizer=b"{}",
            )
        )

    def finish(self) -> Path:
        """Waits until it is durable; where it lies."""
        self._checkpointer.settle()
        (saved,) = self._checkpointer.finished()
        assert saved.error is None, saved.error
        return saved.path


class DcpAsync:
    """DCP's async_save as it comes: its default stager, a thread that writes, files that are synced."""

    def __init__(self, place: Path, given: dict[str, torch.Tensor]) -> None:
        self._save, self._place, self._given = savers(given)["dcp async"](), place, given

    def save(self, step: int) -> None:
        self._path = self._place / str(step)
        self._wait = self._save(self._path)

    def fence(self) -> None:
        """Nothing: the call returned after the copy."""

    def finish(self) -> Path:
        assert self._wait
        self._wait()
        return self._path

    def close(self) -> None:
        """Nothing is left open."""


def at_once(given: dict[str, torch.Tensor], *, packed: bool, threads: int) -> Iterator[dict[str, float]]:
    """Ours, waiting for the copy with nothing to do meanwhile."""
    with tempfile.TemporaryDirectory(dir=scratch()) as place:
        saver = Ours(Path(place), given, packed=packed, threads=threads)
        for step in range(1, SAVES + 1):
            start, began = time.perf_counter(), time.process_time()
            saver.save(step)
            saver.fence()
            blocked, spent = time.perf_counter() - start, time.process_time() - began
            path = saver.finish()
            durable, all_spent = time.perf_counter() - start, time.process_time() - began
            yield {
                "blocked_s": blocked,
                "blocked_cpu_s": spent,
                "durable_s": durable,
                "durable_cpu_s": all_spent,
                "bytes": size_of(path),
            }
            shutil.rmtree(path)
        saver.close()


def beside_training(name: str, given: dict[str, torch.Tensor]) -> Iterator[dict[str, float]]:
    """What a save costs the steps of a training."""
    state = list(given.values())
    compute = work_of(STEP_S_A_GB * sum(tensor.nbytes for tensor in state) / 1e9)

    def steps(fence: Callable[[], None]) -> None:
        for _ in range(STRETCH):
            compute()
            fence()
            torch._foreach_mul_(state, 0.999)

    def without() -> float:
        start = time.perf_counter()
        steps(lambda: None)
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory(dir=scratch()) as place:
        saver = (Ours if name == "ropewalk" else DcpAsync)(Path(place), given)
        without()
        before = without()
        for step in range(1, SAVES + 1):
            waited = 0.0

            def fence() -> None:
                nonlocal waited
                start = time.perf_counter()
                saver.fence()
                waited += time.perf_counter() - start

            start = time.perf_counter()
            saver.save(step)
            waited += time.perf_counter() - start
            steps(fence)
            spent = time.perf_counter() - start
            path = saver.finish()
            durable = time.perf_counter() - start
            shutil.rmtree(path)
            after = without()
            yield {"blocked_s": waited, "delay_s": spent - (before + after) / 2, "durable_s": durable}
            before = after
        saver.close()


def work_of(seconds: float) -> Callable[[], None]:
    """Stands for a forward and backward pass: always as many matrix products, which leave the interpreter free."""
    matrix = torch.randn(512, 512) / 512

    def products(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            matrix @ matrix
        return time.perf_counter() - start

    products(50)
    count = round(seconds / min(products(50) / 50 for _ in range(5)))
    return lambda: products(count) and None


def memory_rates(size: int) -> dict[str, float]:
    """GB/s at which memory is copied here: the limit of any snapshot."""
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes, copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def rate(threads: int) -> float:
        part = size // threads
        begins = [number * part for number in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            start = time.perf_counter()
            list(pool.map(lambda b: copy(target.data_ptr() + b, source.data_ptr() + b, part), begins))
            return size / 1e9 / (time.perf_counter() - start)

    cores = os.cpu_count() or 1
    return {f"memcpy_{n}_threads_GB_a_s": max(rate(n) for _ in range(5)) for n in sorted({1, 2, cores})}


def peer(name: str, given: dict[str, torch.Tensor]) -> Iterator[dict[str, float]]:
    save = savers(given)[name]()
    with tempfile.TemporaryDirectory(dir=scratch()) as place:
        for number in range(SAVES):
            path = Path(place) / str(number)
            start, spent = time.perf_counter(), time.process_time()
            wait = save(path)
            blocked, spent = time.perf_counter() - start, time.process_time() - spent
            if wait:
                wait()
            sync(path)
            durable = time.perf_counter() - start
            yield {"blocked_s": blocked, "blocked_cpu_s": spent, "durable_s": durable, "bytes": size_of(path)}
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


def scratch() -> Path:
    """A folder on the disk of this checkout that git ignores, should a run be cut short."""
    folder = harness.ROOT / ".bench"
    folder.mkdir(exist_ok=True)
    return folder


def sync(path: Path) -> None:
    """Makes what a peer has written durable; costs next to nothing where the peer has done so."""
    for file in [path] if path.is_file() else [child for child in path.rglob("*") if child.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


def measure(way: str, gigabytes: float, threads: int) -> dict[str, float]:
    """One way in this process."""
    torch.set_num_threads(threads)
    if way == "memcpy":
        return memory_rates(round(gigabytes * 1e9))
    given = tensors(gigabytes)
    total = sum(tensor.numel() * tensor.element_size() for tensor in given.values())
    start = time.process_time()
    if way.startswith("training "):
        rows = list(beside_training(way.removeprefix("training "), given))
    elif way.startswith("ropewalk"):
        rows = list(at_once(given, packed="packed" in way, threads=1 if way.endswith("one thread") else 2))
    else:
        rows = list(peer(way, given))
    spent = time.process_time() - start
    middle = {key: statistics.median(row[key] for row in rows[1:]) for key in rows[0]}
    a_gigabyte = {f"{key}_a_GB": value / total * 1e9 for key, value in middle.items() if key.endswith("_s")}
    return {
        **a_gigabyte,
        "first_blocked_s": rows[0]["blocked_s"],
        **({"bytes": middle["bytes"]} if "bytes" in middle else {}),
        "cpu_s": spent,
        "peak_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def in_process(
    way: str, gigabytes: float, *, threads: int = 1, python: Path | str = sys.executable
) -> dict[str, float]:
    given = ["--way", way, "--gigabytes", str(gigabytes), "--threads", str(threads)]
    figures: dict[str, float] = harness.call(python, __file__, *given)
    print(f"{way:<24}", "  ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)
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
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measure(given.way, given.gigabytes, given.threads)), flush=True)
        os._exit(0)  # some peers leave processes that would be waited for
    size = 0.1 if given.quick else given.gigabytes
    memory = in_process("memcpy", size)
    cores = os.cpu_count() or 1
    ours, peers = in_process("training ropewalk", size), {"dcp async": in_process("training dcp async", size)}
    ours_busy = in_process("training ropewalk", size, threads=cores)
    peer_busy = in_process("training dcp async", size, threads=cores)
    ours["delay_all_cores_s_a_GB"] = ours_busy["delay_s_a_GB"]
    peers["dcp async"]["delay_all_cores_s_a_GB"] = peer_busy["delay_s_a_GB"]
    alone = in_process("ropewalk", size)
    ours |= {"at_once_s_a_GB": alone["blocked_s_a_GB"], "at_once_durable_s_a_GB": alone["durable_s_a_GB"]}
    packed, slower = in_process("ropewalk packed", size), in_process("ropewalk packed, one thread", size)
    ours |= {"packed_durable_s_a_GB": packed["durable_s_a_GB"], "packed_bytes": packed["bytes"]}
    ours |= {"packed_one_thread_durable_s_a_GB": slower["durable_s_a_GB"]}
    for way in PEERS[:-1] if given.quick else PEERS:
        try:
            found = in_process(way, size, python=python_of(way))
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{way}: does not run here: {error}", file=sys.stderr)
            continue
        renamed = {"blocked_s_a_GB": "at_once_s_a_GB", "durable_s_a_GB": "at_once_durable_s_a_GB"}
        peers.setdefault(way, {}).update({renamed.get(key, key): value for key, value in found.items()})
    peer = peers["dcp async"]
    bars = {
        "blocked <= 0.12 s/GB": ours["blocked_s_a_GB"] <= 0.12,
        "blocked <= 0.25 x DCP async_save": ours["blocked_s_a_GB"] <= 0.25 * peer["blocked_s_a_GB"],
        "delay <= 0.12 s/GB": ours["delay_s_a_GB"] <= 0.12,
        "delay <= 0.25 x DCP async_save": ours["delay_s_a_GB"] <= 0.25 * peer["delay_s_a_GB"],
        "at once <= 0.12 s/GB": ours["at_once_s_a_GB"] <= 0.12,
        "at once <= 0.25 x DCP async_save": ours["at_once_s_a_GB"] <= 0.25 * peer["at_once_s_a_GB"],
        "durable no later than DCP": ours["at_once_durable_s_a_GB"] <= peers["dcp"]["at_once_durable_s_a_GB"],
        "durable no later than DCP async_save": ours["at_once_durable_s_a_GB"] <= peer["at_once_durable_s_a_GB"],
    }
    quality = {"saves": SAVES, **memory, "share_of_memcpy": 1 / ours["at_once_s_a_GB"] / max(memory.values()), **bars}
    ratios = {way: figures["at_once_s_a_GB"] / ours["at_once_s_a_GB"] for way, figures in peers.items()}
    # On a busy machine a stretch may be shorter than its neighbours by chance; what was waited for is certain.
    lost = max(ours["delay_s_a_GB"], ours["blocked_s_a_GB"])
    ratios["dcp async, beside a training"] = peer["delay_s_a_GB"] / lost
    harness.finish("checkpoint", ours=ours, peers=peers, ratios=ratios, quality=quality)


if __name__ == "__main__":
    main()
