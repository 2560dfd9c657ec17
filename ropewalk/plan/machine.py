"""This machine's cores, memory and GPUs, found without torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as reported by its driver."""

    name: str
    memory_bytes: int
    capability: float
    """CUDA compute capability; 8.0 and later have bfloat16 in hardware."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Cores, memory and GPUs."""

    processor: str
    cores: int
    memory_bytes: int
    bf16: bool
    """Whether the CPU multiplies bfloat16 in hardware; otherwise float32 is faster."""
    gpus: tuple[Gpu, ...]

    def __str__(self) -> str:
        gpus = f", {len(self.gpus)} x {self.gpus[0].name}" if self.gpus else ""
        return f"{self.processor}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB{gpus}"


def this_machine() -> Machine:
    """The machine of this process."""
    details = _cpuinfo()
    flags = details.get("flags", details.get("Features", "")).split()
    return Machine(
        processor=details.get("model name", platform.processor() or platform.machine()),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits()]),
        bf16=any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16")),
        gpus=_gpus(),
    )


def available_memory(meminfo: Path = Path("/proc/meminfo"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of the host's memory that are free or reclaimable; its total where the system does not report that."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits(root)]
    if meminfo.exists():
        lines = (line.split() for line in meminfo.read_text().splitlines())
        found += [int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:"]
    return min(found)


def memory_limits(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Memory limits of the container, from cgroup version 2 or 1; empty without a limit."""
    files = (root / "memory.max", root / "memory" / "memory.limit_in_bytes")
    texts = (file.read_text().strip() for file in files if file.exists())
    return [int(text) for text in texts if text.isdigit()]


def _cpuinfo() -> dict[str, str]:
    """Fields of the first processor; empty without /proc."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _gpus() -> tuple[Gpu, ...]:
    """GPUs listed by `nvidia-smi`; none if it is missing, fails or answers `N/A`."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        rows = (line.split(", ") for line in answer.strip().splitlines())
        return tuple(Gpu(name=n, memory_bytes=int(m) << 20, capability=float(c)) for n, m, c in rows)
    except (subprocess.SubprocessError, OSError, ValueError):
        return ()
