"""Activation offload: moves a block's saved tensors off the device after forward and back for its backward pass.

On a GPU, copies run on a side stream, to and from pinned host memory; the backward pass of a block prefetches the
activations of the block before it. With a folder, host memory is a bounded staging buffer for files; on a CPU only the
folder makes sense. Storages are offloaded, each once, however many saved tensors are views of it.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ropewalk.base.errors import storage_error
from ropewalk.model.modules import Block

SMALL_BYTES = 1 << 20
"""Smaller storages stay on the device: PCIe 5 copies this in 20 microseconds, about the cost of launching the copy."""
WAITING_BYTES = 1 << 30
"""Maximum bytes in host memory that wait to be written to disk."""


class ActivationOffload:
    """Offloads the activations of `layers` between forward and backward, to host memory or to `folder`.

    Leave the last layer of a stage out of `layers`: its activations are needed immediately.
    """

    def __init__(
        self,
        layers: Collection[int],
        *,
        folder: Path | None = None,
        small_bytes: int = SMALL_BYTES,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        self._layers = frozenset(layers)
        self._small_bytes = small_bytes
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._disk = _Disk(folder, waiting_bytes) if folder else None
        self.moved_bytes = 0
        """Bytes offloaded so far."""
        self._last: weakref.ref[Parcel] | None = None

    def open(self, block: Block) -> Parcel | None:
        """Returns the hooks that offload what `block` saves in the next forward pass; None for other layers."""
        if block.layer not in self._layers:
            return None
        before = self._last() if self._last else None
        if before and before.layer >= block.layer:
            before = None  # another pass
        parcel = Parcel(block, self, before, self._small_bytes)
        self._last = weakref.ref(parcel)
        return parcel

    @property
    def most_waiting_bytes(self) -> int:
        """Peak of the bytes that waited to be written."""
        return self._disk.most_waiting_bytes if self._disk else 0

    def send(self, flat: Tensor, parcel: Parcel) -> _Away:
        """Starts to offload the bytes `flat`."""
        self.moved_bytes += flat.nbytes
        if not flat.is_cuda:
            return self._disk.write(flat, None, parcel) if self._disk else _OnHost(flat.clone(), None)
        stream = self._streams.setdefault(flat.device, torch.cuda.Stream(flat.device))
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            copied = stream.record_event()
            # The allocator must not reuse the memory before the copy is done.
        flat.record_stream(stream)
        return self._disk.write(host, copied, parcel) if self._disk else _OnHost(host, stream)


class Parcel:
    """Saved tensors of one block in one forward pass: the autograd hooks `pack` and `unpack`.

    Autograd's tickets keep a parcel alive; all references to it from here are weak.
    """

    def __init__(self, block: Block, offload: ActivationOffload, before: Parcel | None, small_bytes: int) -> None:
        self.layer = block.layer
        self.file: IO[bytes] | None = None
        """Created and filled by `_Disk`."""
        self.size = 0
        """Bytes in the file."""
        self._block, self._offload, self._small_bytes = block, offload, small_bytes
        self._before = weakref.ref(before) if before else None
        self._items: list[weakref.ref[_Item]] = []
        self._seen: dict[int, tuple[StorageWeakRef, weakref.ref[_Item]]] = before._seen if before else {}
        """Storages offloaded in this pass, by address."""

    def pack(self, x: Tensor) -> Any:
        """Starts to offload `x` and returns a ticket; returns `x` detached if it stays."""
        storage = x.untyped_storage()
        # Detached: the producer's graph saves the tensor, and the tensor would hold the graph.
        if storage.nbytes() < self._small_bytes or self._is_weight(storage):
            return x.detach()
        item = self._sent(storage)
        if item is None:
            flat = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
            item = _Item(self, self._offload.send(flat, self), x.device)
            self._items.append(weakref.ref(item))
            self._seen[storage.data_ptr()] = StorageWeakRef(storage), self._items[-1]
        elif item.parcel is not self:
            return x.detach()  # shared by blocks (rotations, masks): stays on the device for the others anyway
        return _Ticket(item, x.dtype, x.shape, x.stride(), int(x.storage_offset()))

    def unpack(self, packed: Any) -> Tensor:
        """Returns the tensor on the device; prefetches the activations of the block before."""
        if not isinstance(packed, _Ticket):
            return packed
        self.start()
        before = self._before() if self._before else None
        if before:
            before.start()
        return packed.tensor()

    def start(self) -> None:
        """Starts to copy all storages back."""
        for reference in self._items:
            if (item := reference()) is not None:
                item.start()

    def _sent(self, storage: torch.UntypedStorage) -> _Item | None:
        present, item = self._seen.get(storage.data_ptr(), (None, None))
        # The address may have been reused by a new storage.
        return item() if present and item and not present.expired() else None

    def _is_weight(self, storage: torch.UntypedStorage) -> bool:
        return any(weight.untyped_storage().data_ptr() == storage.data_ptr() for weight in self._block.parameters())


class _Away(Protocol):
    """Offloaded bytes."""

    def start(self, device: torch.device) -> None:
        """Starts to copy the bytes to `device`."""

    def finish(self, device: torch.device) -> Tensor:
        """Returns the bytes, usable on the current stream."""


class _Item:
    """One offloaded storage; it and its copy on the device live as long as a ticket does."""

    def __init__(self, parcel: Parcel, away: _Away, device: torch.device) -> None:
        self.parcel, self._away, self._device = parcel, away, device
        self._started = False
        self._flat: Tensor | None = None

    def start(self) -> None:
        if not self._started:
            self._started = True
            self._away.start(self._device)

    def flat(self) -> Tensor:
        """Returns the bytes of the storage on the device."""
        self.start()
        if self._flat is None:
            self._flat = self._away.finish(self._device)
        return self._flat


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A tensor as a view of its storage."""

    item: _Item
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        flat = self.item.flat()
        return torch.empty(0, dtype=self.dtype, device=flat.device).set_(
            flat.untyped_storage(), self.offset, self.shape, self.stride
        )


class _OnHost:
    """Bytes in host memory; `stream` copies to and from a GPU."""

    def __init__(self, host: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._host, self._stream = host, stream
        self._back: tuple[Tensor, torch.cuda.Event] | None = None

    def start(self, device: torch.device) -> None:
        if self._stream:
            with torch.cuda.stream(self._stream):
                self._back = self._host.to(device, non_blocking=True), self._stream.record_event()

    def finish(self, device: torch.device) -> Tensor:
        if not self._back:
            return self._host
        flat, arrived = self._back
        current = torch.cuda.current_stream(device)
        current.wait_event(arrived)
        flat.record_stream(current)
        return flat


class _Disk:
    """Unlinked files in a folder, which vanish with the process. One thread reads and writes."""

    def __init__(self, folder: Path, waiting_bytes: int) -> None:
        self._folder = folder
        self._waiting_bytes = waiting_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="activations")
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self.most_waiting_bytes = 0

    def write(self, host: Tensor, copied: torch.cuda.Event | None, parcel: Parcel) -> _OnDisk:
        """Queues `host` for the parcel's file after the event `copied`; blocks while too many bytes wait."""
        while self._waiting and (
            self._waiting[0][0].done() or sum(size for _, size in self._waiting) + host.nbytes > self._waiting_bytes
        ):
            written, _ = self._waiting.popleft()
            written.result()
        if parcel.file is None:
            parcel.file = self._make_file()
        away = _OnDisk(self._thread, parcel.file, parcel.size, host, copied)
        parcel.size += host.nbytes
        self._waiting.append((away.written, host.nbytes))
        self.most_waiting_bytes = max(self.most_waiting_bytes, sum(size for _, size in self._waiting))
        return away

    def _make_file(self) -> IO[bytes]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryFile(dir=self._folder, buffering=0)
        except OSError as error:
            raise storage_error(error, doing=f"moving activations to {self._folder}") or error from None


class _OnDisk:
    """Bytes at `offset` of a file, or being written or read."""

    def __init__(
        self, thread: ThreadPoolExecutor, file: IO[bytes], offset: int, host: Tensor, copied: torch.cuda.Event | None
    ) -> None:
        self._thread, self._file, self._offset, self._size = thread, file, offset, host.nbytes
        self._read: Future[Tensor] | None = None
        self.written = thread.submit(self._write, host, copied)

    def start(self, device: torch.device) -> None:
        self._read = self._thread.submit(self._fetch, device)

    def finish(self, device: torch.device) -> Tensor:
        assert self._read is not None
        return self._read.result().to(device, non_blocking=True)

    def _write(self, host: Tensor, copied: torch.cuda.Event | None) -> None:
        if copied:
            copied.synchronize()
        view, offset = _view(host), self._offset
        try:
            while view:
                done = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[done:], offset + done
        except OSError as error:
            raise storage_error(error, doing="moving activations to `parallel.offload_path`") or error from None

    def _fetch(self, device: torch.device) -> Tensor:
        self.written.result()  # ran earlier in this thread; re-raises its error
        host = torch.empty(self._size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        view, offset = _view(host), self._offset
        while view:
            done = os.preadv(self._file.fileno(), [view], offset)
            view, offset = view[done:], offset + done
        return host


def _view(host: Tensor) -> memoryview:
    return host.numpy().data
