"""Saving a model of 1.36 B parameters with AdamW's moments from a GPU while steps go on.

    make bench NAME=saving          on a machine with a GPU, 40 GB of host memory and 40 GB of disk; two minutes

The state is 16.3 GB of float32 on the device. A step is matrix products for half a second and an update in place of
part of the state, which waits for the copy as training does. Told is how long training waits for a save (median of
those after the first), the rate of the copy, how long until the checkpoint is durable, and how much longer steps take
while it is written. The peer is DCP's async_save of the same tensors with its default stager.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

PARAMETERS = 1_360_000_000
TENSORS = 24 * 7


def main() -> None:
    from harness import finish

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the state")
    options = parser.parse_args()
    state = make_state(PARAMETERS // (10 if options.quick else 1))
    size = sum(tensor.nbytes for group in state.values() for tensor in group.values())
    work = busy(0.5)
    alone = statistics.median(timed(work) for _ in range(6))
    print(f"{size / 1e9:.1f} GB, a step of {alone:.3f} s", flush=True)
    with tempfile.TemporaryDirectory(dir=".") as place:
        ours = save_ours(Path(place), state, work, alone)
    with tempfile.TemporaryDirectory(dir=".") as place:
        peer = save_dcp(Path(place), state, work, alone)
    for figures in (ours, peer):
        figures["blocked_percent_of_5_minutes"] = figures["blocked_s"] / 3
    finish(
        "saving",
        ours=ours,
        peers={"dcp_async": peer},
        ratios={"dcp_async": peer["blocked_s"] / ours["blocked_s"]},
        quality={"state_gb": size / 1e9, "device": torch.cuda.get_device_name(), "step_s": alone},
    )


def make_state(parameters: int) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and two moments in tensors of equal size."""
    side = parameters // TENSORS
    return {
        group: {
            f"{kind}.{number}": torch.full((side,), 0.5, device="cuda") for number in range(TENSORS) for kind in kinds
        }
        for group, kinds in {"model": ("w",), "optimizer": ("m", "v")}.items()
    }


def busy(seconds: float) -> Callable[[], None]:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(10):
        a @ a
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
    repeats = round(seconds / ((time.perf_counter() - start) / 20))

    def work() -> None:
        for _ in range(repeats):
            a @ a

    return work


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def save_ours(
    folder: Path, state: dict[str, dict[str, torch.Tensor]], work: Callable[[], None], alone: float
) -> dict[str, float]:
    from ropewalk.checkpoint.disk import LocalDisk
    from ropewalk.checkpoint.format import CheckpointManifest
    from ropewalk.checkpoint.layouts import held
    from ropewalk.checkpoint.persist import Persister
    from ropewalk.checkpoint.snapshot import Stager
    from ropewalk.checkpoint.tensors import retain

    stager, persister = Stager(), Persister(LocalDisk())
    parts = {group: list(held(tensors)) for group, tensors in state.items()}
    start = time.perf_counter()
    stager.prepare(parts)
    prepared_s = time.perf_counter() - start
    saves, during, size = [], [], sum(part.local.nbytes for group in parts.values() for part in group)
    for step in range(1, 4):
        manifest = CheckpointManifest(step=step, tokens=0, seed=0, spec={}, data={}, files={}, tensors={}, versions={})
        torch.cuda.synchronize()
        snapshot = stager.take(parts)
        assert snapshot is not None, "nobody gives up"
        persister.submit(
            folder, manifest, snapshot, tokenizer=b"{}", after=lambda: retain(folder, keep_last=1) and None
        )
        work()
        snapshot.wait()
        for tensor in state["model"].values():
            tensor.mul_(1.0001)
        torch.cuda.synchronize()
        while not persister.idle:
            during.append(timed(work))
        saves += persister.finished()
        print(f"save {step}: {saves[-1]}", flush=True)
    failed = [saved.error for saved in saves if saved.error]
    assert not failed, failed
    persister.close()
    stager.close()
    return {
        "blocked_s": statistics.median(saved.blocked_s for saved in saves[1:]),
        "copy_gb_per_s": size / 1e9 / statistics.median(saved.copy_s for saved in saves[1:]),
        "durable_s": statistics.median(saved.copy_s + saved.persist_s for saved in saves[1:]),
        "step_dip_percent": 100 * (statistics.median(during) / alone - 1),
        "buffers_made_s": prepared_s,
    }


def save_dcp(
    folder: Path, state: dict[str, dict[str, torch.Tensor]], work: Callable[[], None], alone: float
) -> dict[str, float]:
    import os
    import shutil

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine without a network looks for one in vain
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder.resolve()}/group")
    blocked, durable, during = [], [], []
    for step in range(1, 4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=str(folder / str(step)))
        blocked.append(time.perf_counter() - start)
        while not future.done():
            during.append(timed(work))
        future.result()
        durable.append(time.perf_counter() - start)
        print(f"DCP {step}: blocked {blocked[-1]:.2f} s, durable {durable[-1]:.2f} s", flush=True)
        shutil.rmtree(folder / str(step))
    dist.destroy_process_group()
    return {
        "blocked_s": statistics.median(blocked[1:]),
        "durable_s": statistics.median(durable[1:]),
        "step_dip_percent": 100 * (statistics.median(during) / alone - 1),
    }


if __name__ == "__main__":
    main()
