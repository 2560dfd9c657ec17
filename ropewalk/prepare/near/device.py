"""Whether a GPU makes the signatures: asked of the driver, so that nothing imports torch where there is none."""

from __future__ import annotations

import ctypes
import dataclasses
from importlib.util import find_spec

from ropewalk.base.errors import ConfigError, MissingPackage, Problem

from ..config import Near

WORTH_BYTES = 4_000_000_000
"""Text of one process from which on a GPU is worth its start: torch, the driver and the kernels take a process 5 to 10
seconds, in which one core signs about as much."""


def placed(near: Near, *, text_bytes: int, processes: int) -> Near:
    """`near` with "auto" decided: a GPU where there is one, torch is installed and each process has enough to do."""
    if near.device == "cpu" or near.kind != "minhash":
        return dataclasses.replace(near, device="cpu")
    if near.device == "cuda":
        _check()
        return near
    usable = text_bytes >= WORTH_BYTES * processes and _installed() and gpus() > 0
    return dataclasses.replace(near, device="cuda" if usable else "cpu")


def gpus() -> int:
    """How many GPUs the driver shows; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    counted = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if counted else 0


def _check() -> None:
    if not gpus():
        what = '`device = "cuda"`, and the driver shows no GPU'
        raise ConfigError([Problem("prepare.deduplicate.near", what, 'leave it at "auto", or see `nvidia-smi`')])
    if not _installed():
        raise MissingPackage("torch with CUDA", 'prepare.deduplicate.near: `device = "cuda"`', "train")


def _installed() -> bool:
    """Triton comes with a torch that can use a GPU, and only with one."""
    return find_spec("torch") is not None and find_spec("triton") is not None
