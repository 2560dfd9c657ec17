"""The only place that knows differences between torch versions and devices."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TESTED = {"CPUs": (2, 13), "GPUs": (2, 11)}
"""Released versions we test with, by device."""
KEPT_BYTES = 1 << 30
"""Free memory that a process may keep for its next tensors."""
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Options of the GNU C library: free bytes at the end of the heap that go back, and the size from which memory is
mapped by itself, at most 32 MiB."""


def torch_version() -> tuple[int, int]:
    """Major and minor version."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def version_warning() -> str | None:
    """What to tell the user when torch is older or newer than the tested versions."""
    if min(TESTED.values()) <= torch_version() <= max(TESTED.values()):
        return None
    tested = " and ".join(f"{major}.{minor} on {device}" for device, (major, minor) in TESTED.items())
    return f"torch {torch.__version__} is not tested; ropewalk is tested with torch {tested}"


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Inside the block the same step gives the same bits. A CPU does so by itself; a GPU's attention does not.

    `warn_only` would not do: attention then stays as it is.
    """
    if device.type != "cuda":
        yield
        return
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Meant to expose reads of memory that nobody wrote; it would write every new tensor once more.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


def keep_freed_memory(*, up_to_bytes: int = 1 << 25) -> None:
    """Lets this process keep up to 1 GiB of host memory that tensors of at most `up_to_bytes` give back, for the next
    ones. Memory of larger tensors is mapped for each of them, and goes back to the system with it.

    Otherwise the GNU C library returns a step's memory to the system, which clears and maps it again page by page in
    the next step: 13,000 page faults and a tenth of a step of the quickstart (benchmarks/cpu_step.py). Other libraries
    of C do as they like.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(MMAP_THRESHOLD, up_to_bytes)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def all_gather_flat(out: Tensor, x: Tensor, *, group: Any) -> Any:
    """Begins to gather flat `x` of every rank into flat `out`. torch 2.13 gave the function another name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, x, group=group, async_op=True)


def reduce_scatter_flat(out: Tensor, x: Tensor, *, group: Any) -> Any:
    """Begins to sum flat `x` over ranks; each gets its part in flat `out`. As above."""
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce(out, x, group=group, async_op=True)
