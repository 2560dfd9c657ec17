"""Host memory that batches use again and again: buffers that wait for their copy to a GPU, and results on the CPU.

Page-locking costs milliseconds, and fresh pages cost more than what is written to them: 0.26 ms for the 600 KB of a
normalised image, where writing it takes 0.08 ms. So memory goes back to the shelf when nobody needs it any more.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(slots=True)
class Timing:
    """CUDA events around the copy and the work of one batch on the device."""

    began: torch.cuda.Event
    copied: torch.cuda.Event
    finished: torch.cuda.Event
    samples: int


@dataclass(slots=True)
class Buffer:
    """Some bytes of host memory."""

    bytes: Tensor
    """uint8."""
    last: Timing | None = None
    """Of the batch that was copied from it last: it must not be written before that is over."""


class Staging:
    """The buffers of one loader; as many as batches were ever in preparation at once. Safe from several threads."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._free: list[Buffer] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> tuple[Buffer, Timing | None]:
        """A buffer of at least `size` bytes that nobody reads any more, and the timing of what was copied from it."""
        with self._lock:
            buffer = self._free.pop(0) if self._free else Buffer(torch.empty(0, dtype=torch.uint8))
        last, buffer.last = buffer.last, None
        if last is not None:
            last.copied.synchronize()
        if len(buffer.bytes) < size:
            # A quarter more than asked: sizes of batches vary by some percent, and the largest comes soon.
            buffer.bytes = torch.empty(size + size // 4, dtype=torch.uint8, pin_memory=self._pin)
        return buffer, last

    def give_back(self, buffer: Buffer) -> None:
        """For another batch, once the copy in `buffer.last` is over."""
        with self._lock:
            self._free.append(buffer)


class Results:
    """Memory of batches that stay on the CPU; it comes back when the last tensor that shows it is gone. Safe from
    several threads."""

    def __init__(self) -> None:
        # Finalisers run wherever a tensor dies, also while the list is in use; its methods are atomic.
        self._free: list[npt.NDArray[np.float32]] = []

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """A float32 tensor of `shape`, not cleared."""
        size = int(np.prod(shape))
        memory = self._pop(size)
        shown = memory[:size].reshape(shape)
        # The tensor's storage, and so every view of it, holds `shown`.
        weakref.finalize(shown, self._free.append, memory).atexit = False
        return torch.from_numpy(shown)

    def _pop(self, size: int) -> npt.NDArray[np.float32]:
        while True:
            try:
                memory = self._free.pop()
            except IndexError:
                return np.empty(size, np.float32)
            if len(memory) >= size:
                return memory
