"""Facts about this rank: host, device, versions, limits. Needs no other rank."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch
import xxhash

import ropewalk
from ropewalk.config.ranks import Ranks
from ropewalk.plan.machine import available_memory, this_machine

SHARED_MEMORY = Path("/dev/shm")
GPU_FIELDS = {
    "uuid": "uuid",
    "driver": "driver_version",
    "used_mib": "memory.used",
    "clock_mhz": "clocks.sm",
    "max_clock_mhz": "clocks.max.sm",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
}
"""Fields queried from nvidia-smi."""


def presence(place: Ranks) -> dict[str, Any]:
    """Identity of this process, before anything is measured."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "local_rank": place.local_rank,
        "local_world": place.local_world,
        "launcher": place.launcher,
    }


def facts(place: Ranks, *, device: str) -> dict[str, Any]:
    """Versions, host and device of this rank under a plan for `device`."""
    smi = _gpus() if device == "cuda" else {}  # before CUDA starts here, so used memory belongs to other processes
    gpu = _gpu(place, smi) if device == "cuda" else None
    return {"versions": _versions(gpu), "host": _host(), "gpu": gpu}


def _versions(gpu: dict[str, Any] | None) -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ropewalk": ropewalk.__version__,
        "commit": _commit(),
        "sources": source_hash(),
    }
    if gpu is not None:
        found |= {"CUDA": torch.version.cuda or "", "NCCL": _nccl_version(), "driver": gpu.get("driver", "")}
    return {name: version for name, version in found.items() if version}


def source_hash() -> str:
    """Hash of the package's sources: hosts may run different files under the same version."""
    root = Path(ropewalk.__file__).parent
    digest = xxhash.xxh3_64()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _commit() -> str:
    root = Path(ropewalk.__file__).parents[1]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    done = _run(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
    return done.strip()


def _nccl_version() -> str:
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _host() -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = 1 << 62
    machine = this_machine()
    return {
        "processor": machine.processor,
        "cores": machine.cores,
        "threads": torch.get_num_threads(),
        "memory_bytes": machine.memory_bytes,
        "available_bytes": available_memory(),
        "shared_memory_bytes": shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        "open_files": unlimited if hard == resource.RLIM_INFINITY else hard,
        "open_files_now": unlimited if soft == resource.RLIM_INFINITY else soft,
    }


def _gpu(place: Ranks, smi: dict[str, dict[str, Any]]) -> dict[str, Any]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.local_rank >= count:
        return {"gpus": count}
    properties = torch.cuda.get_device_properties(place.local_rank)
    uuid = f"GPU-{properties.uuid}"
    told = smi.get(uuid, {})
    free, total = torch.cuda.mem_get_info(place.local_rank)
    return {
        **told,
        "gpus": count,
        "uuid": uuid,
        "name": properties.name,
        "memory_bytes": total,
        "free_bytes": free,
        "used_by_others_bytes": int(told["used_mib"]) << 20 if told.get("used_mib") is not None else None,
    }


def _gpus() -> dict[str, dict[str, Any]]:
    """GPUs by UUID as reported by nvidia-smi; none without it."""
    if shutil.which("nvidia-smi") is None:
        return {}
    text = _run(["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS.values())}", "--format=csv,noheader,nounits"])
    found = {}
    for line in text.strip().splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(GPU_FIELDS):
            row = {name: _number(cell) for name, cell in zip(GPU_FIELDS, cells, strict=True)}
            found[cells[0]] = {**row, "uuid": cells[0], "driver": cells[1]}
    return found


def _number(cell: str) -> int | None:
    return int(cell) if cell.isdigit() else None


def _run(command: list[str]) -> str:
    """The output of a command; empty if it fails or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return ""
