"""Memory that this process and its workers see together: anonymous files (memfd), handed over by descriptor. No torch.

It has no name, so nothing of it can outlive the processes, and it is not bound by the size of /dev/shm, of which
containers often give 64 MB.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_numbers = itertools.count()


class Shared:
    """Some bytes that workers can map by `descriptor`; it is closed when nobody here holds this object any more."""

    def __init__(self, size: int) -> None:
        self.number = next(_numbers)
        """What messages call it."""
        self.size = size
        self.descriptor = os.memfd_create("ropewalk-media", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        self.bytes = mapped(self.descriptor, size)
        weakref.finalize(self, os.close, self.descriptor)


def mapped(descriptor: int, size: int) -> Bytes:
    """The memory behind `descriptor`, as long as the array or a view of it lives."""
    # All pages at once: one by one, at the first write to each, they would cost 0.1 ms an image.
    return np.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
