"""The only place that knows differences between torch versions and devices."""

from __future__ import annotations

import torch

OLDEST, NEWEST = (2, 11), (2, 13)
"""Released versions we test with."""


def torch_version() -> tuple[int, int]:
    """Major and minor version."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def version_warning() -> str | None:
    """What to tell the user when torch is not one of the tested versions."""
    if OLDEST <= torch_version() <= NEWEST:
        return None
    return f"torch {torch.__version__} is not tested; ropewalk is tested with torch 2.11 to 2.13"


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
