"""Started in a network namespace of its own: bytes on its loopback device in one step of each plan, beside the counted.

Prints JSON: for each name of `PLANS`, {"wire": bytes, "counted": bytes} summed over the ranks. Nothing else talks in
the namespace, and all that ranks send each other goes over the device.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import re
import socket
import struct
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply
from ropewalk.parallel.mesh import Mesh
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.plans import case
from tests.tiny import random_batch, small_spec

RANKS = 4
# 0.8 million parameters, most of them in blocks: what each message costs besides its bytes is little.
SPEC = small_spec(sequence_length=8, width=128, layers=4, heads=4, mlp_width=384)
PLANS = {
    "replicas": {"replicate": RANKS},
    "zero 1": {"shard": RANKS, "zero": 1},
    "zero 2": {"shard": RANKS, "zero": 2},
    "zero 3": {"shard": RANKS, "zero": 3},
}


def raise_loopback() -> None:
    """A new namespace has a loopback device that is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        up = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(control, 0x8914, up)  # SIOCSIFFLAGS


def wire_bytes() -> int:
    """Bytes that the loopback device has received."""
    found = re.search(r"lo:\s*(\d+)", Path("/proc/self/net/dev").read_text())
    assert found
    return int(found[1])


def measured(rank: int, settings: dict[str, int]) -> dict[str, float]:
    """What all ranks sent in the second step under a plan: seen on the device, and counted."""
    plan = case("", batch_size=RANKS, **settings).plan
    mesh = Mesh(plan, rank)
    executor = apply(
        plan,
        build(SPEC, seed=1),
        mesh,
        lambda parameters, placements: make_optimizer(parameters, Optimizer(), spec=SPEC, placements=placements),
    )
    batch = random_batch(SPEC, rows=RANKS).strided(mesh.data.rank, mesh.data.size)

    def step() -> None:
        executor.step(batch, lr=1e-2)
        if plan.zero in (1, 2):  # new rows are under way until they are used
            with executor._data.whole():  # type: ignore[attr-defined]
                pass

    step()
    mesh.traffic.take()
    mesh.control.gather_numbers(0)
    before = wire_bytes()
    mesh.control.gather_numbers(0)
    step()
    mesh.control.gather_numbers(0)
    after = wire_bytes()
    mesh.control.gather_numbers(0)
    counted = sum(each.bytes for each in mesh.traffic.take().values())
    return {"wire": after - before, "counted": sum(mesh.control.gather_numbers(round(counted)))}


def main() -> None:
    torch.set_num_threads(1)
    raise_loopback()
    with tempfile.TemporaryDirectory() as folder:
        # Processes share what is imported.
        children = []
        rank = 0
        for each in range(1, RANKS):
            child = os.fork()
            if not child:
                rank, children = each, []
                break
            children.append(child)
        wait = datetime.timedelta(seconds=60)
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=wait)
        found = {name: measured(rank, settings) for name, settings in PLANS.items()}
        dist.barrier()
        dist.destroy_process_group()
        if rank:
            os._exit(0)
        for child in children:
            os.waitpid(child, 0)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
