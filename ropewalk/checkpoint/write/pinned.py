"""Host memory that is there before it is needed: its pages exist, and a GPU may be given them page-locked.

torch's own page-locked memory is rounded up to a power of two, and made by one call of the driver, about a second a
gigabyte (H200). This is as large as it is asked for, its pages are made by a thread that holds nothing, and the driver
gets them when they are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref

import torch
from torch import Tensor

PIECE_BYTES = 64 << 20
"""Cleared by one call."""


class PinnedBuffer:
    """Memory for `count` numbers of `dtype`, all zero."""

    def __init__(self, count: int, dtype: torch.dtype, *, locked: bool) -> None:
        self.bytes = count * dtype.itemsize
        memory = mmap.mmap(-1, max(1, self.bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Large pages are made in less time, and there are fewer to lock. A kernel may do without.
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor: Tensor = (
            torch.frombuffer(memory, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
        )
        address = self.tensor.data_ptr()
        for begin in range(0, self.bytes, PIECE_BYTES):
            # Without the interpreter's lock, and by this thread alone.
            ctypes.memset(address + begin, 0, min(PIECE_BYTES, self.bytes - begin))
        if locked and count:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, self.bytes, 0)))
            weakref.finalize(self, _unlock, address)


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
