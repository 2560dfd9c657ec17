"""How much memory a process takes for a while: resident, as the system counts it, and in tensors that are alive."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import pytest
import torch

from ropewalk.parallel.compat import MMAP_THRESHOLD

KNOWN = Path("/proc/self/clear_refs").exists()
needs_peaks = pytest.mark.skipif(not KNOWN, reason="only Linux tells the peak of a while")


class Resident:
    """The peak of this process's resident memory above what it was."""

    def __init__(self) -> None:
        gc.collect()
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)  # or memory that others gave back would hide what is taken now
            library.mallopt(MMAP_THRESHOLD, 1 << 16)  # a mapping for each tensor, or holes between them would count
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = self._read("VmRSS")

    def growth(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, key: str) -> int:
        found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        return 1024 * int(found[1])


def alive_bytes() -> int:
    """Bytes of all CPU tensors of this process."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
