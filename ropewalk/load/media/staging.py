"""Host memory that batches use again and again: buffers that wait for their copy to a GPU, and results on the CPU.

Page-locking costs milliseconds, and fresh pages cost more than what is written to them: 0.26 ms for the 600 KB of a
normalised image, where writing it takes 0.08 ms. So memory goes back to the shelf when nobody needs it any more.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .shared import Bytes, Shared

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Timing:
    """CUDA events around the copy and the work of one batch on the device."""

    began: torch.cuda.Event
    copied: torch.cuda.Event
    finished: torch.cuda.Event
    samples: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Some bytes of host memory."""

    bytes: Tensor
    """uint8."""
    shared: Shared | None = None
    """What worker processes know it by; None when it is this process's own."""


Allocate = Callable[[int], Memory]
"""Bytes -> memory of that size."""


def pageable(size: int) -> Memory:
    """Memory of this process."""
    return Memory(torch.empty(size, dtype=torch.uint8))


def page_locked(size: int) -> Memory:
    """Memory of this process that a GPU reads by itself, while the CPU goes on."""
    return Memory(torch.empty(size, dtype=torch.uint8, pin_memory=True))


def shared(size: int) -> Memory:
    """Memory that worker processes can write."""
    memory = Shared(size)
    return Memory(torch.from_numpy(memory.bytes), memory)


def shared_page_locked(size: int) -> Memory:
    """Memory that worker processes can write and a GPU reads by itself; it is unlocked when nobody holds it."""
    memory = shared(size)
    assert memory.shared is not None, "just made"
    runtime, address = torch.cuda.cudart(), memory.bytes.data_ptr()
    if int(runtime.cudaHostRegister(address, size, 1)) == 0:  # 1: for every device (cudaHostRegisterPortable)
        # The arguments of a finaliser live until it has run: the memory is not unmapped before it is unlocked.
        weakref.finalize(memory.shared, _unlock, address, memory.shared.bytes)
    else:
        _log.warning("%d bytes of memory could not be page-locked (`ulimit -l`?): copies to the GPU take longer", size)
    return memory


def _unlock(address: int, memory: Bytes) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


@dataclass(slots=True)
class Buffer:
    """Memory that a batch is written to and copied from."""

    memory: Memory
    last: Timing | None = None
    """Of the batch that was copied from it last: it must not be written before that is over."""


class Staging:
    """The buffers of one loader; as many as batches were ever in preparation at once. Safe from several threads."""

    def __init__(self, allocate: Allocate = pageable) -> None:
        self._allocate = allocate
        self._free: list[Buffer] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> tuple[Buffer, Timing | None]:
        """A buffer of at least `size` bytes that nobody reads any more, and the timing of what was copied from it."""
        with self._lock:
            buffer = self._free.pop(0) if self._free else None
        last = None
        if buffer is not None and buffer.last is not None:
            last, buffer.last = buffer.last, None
            last.copied.synchronize()
        if buffer is None or len(buffer.memory.bytes) < size:
            # A quarter more than asked: sizes of batches vary by some percent, and the largest comes soon.
            buffer = Buffer(self._allocate(size + size // 4))
        return buffer, last

    def give_back(self, buffer: Buffer) -> None:
        """For another batch, once the copy in `buffer.last` is over."""
        with self._lock:
            self._free.append(buffer)

    def clear(self) -> None:
        """Lets go of what is free; copies must be over."""
        with self._lock:
            self._free.clear()


class Results:
    """Memory that comes back when the last array or tensor that shows it is gone. Safe from several threads."""

    def __init__(self, allocate: Allocate = pageable) -> None:
        self._allocate = allocate
        # Finalisers run wherever an array dies, also while the list is in use; its methods are atomic.
        self._free: list[Memory] = []

    def take(self, size: int) -> tuple[Bytes, Shared | None]:
        """`size` bytes, not cleared, and the shared memory at whose beginning they lie, where it is shared."""
        memory = self._pop(size)
        shown: Bytes = memory.bytes.numpy()[:size]
        # Whatever is made of it, a tensor too, holds `shown`.
        weakref.finalize(shown, self._free.append, memory).atexit = False
        return shown, memory.shared

    def numbers(self, shape: tuple[int, ...]) -> tuple[Tensor, Shared | None]:
        """The same as a float32 tensor of `shape`."""
        shown, memory = self.take(4 * int(np.prod(shape)))
        return torch.from_numpy(shown).view(torch.float32).view(shape), memory

    def _pop(self, size: int) -> Memory:
        while True:
            try:
                memory = self._free.pop()
            except IndexError:
                return self._allocate(size)
            if len(memory.bytes) >= size:
                return memory
