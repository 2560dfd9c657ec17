"""Snapshots of the training state, copied while training continues (CheckFreq, Mohan et al. 2021).

Weights and moments change only in the optimizer update. So the copy runs during the next forward and backward pass, and
the update waits for it (`Snapshot.wait`): a save costs only what is left of the copy by then. Copies go into reused
buffers that were touched and (for a GPU) page-locked once: fresh memory costs five times the copy, because the kernel
clears each page. Creating the buffers takes about 1 s per GB, so it is done in the background at the start of training
(`Stager.prepare`).

A large state is copied in batches, each with its own future: hashing and writing of a tensor start before all tensors
are copied.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..run_state import TensorShard, as_bytes
from ..shard_file import digest
from .task_graph import lower_priority

BATCH_BYTES = 256 << 20
"""Bytes per copy call. Each call takes the GIL from training once."""
BUFFER_BYTES = 512 << 20
"""Size of a buffer, or slightly more. One driver call page-locks a buffer, and other calls may wait for it."""
CLEAR_BYTES = 64 << 20
"""Bytes cleared per call."""
_Pair = tuple[str, TensorShard, TensorShard]
"""Group, shard of the state, and its copy in a buffer."""
_Key = tuple[str, torch.dtype, int]
"""Group and dtype of the shards in a buffer, and its number among these buffers."""


@dataclass(slots=True)
class Snapshot:
    """The shards of a state at one moment, in host memory."""

    parts: dict[str, list[TensorShard]]
    """By group; the tensors are in buffers that are reused after `release`."""
    _slot: _Slot
    arrivals: dict[str, dict[str, Future[None]]] = field(default_factory=dict)
    """By group and name; completes when a shard is copied and hashed."""
    _from_host: Future[None] = field(default_factory=Future)
    """Completes when tensors in host memory are copied."""
    _from_gpu: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    """Start and end of the copy from the GPU."""
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    """By group and name, the hash right after the copy, which detects bit flips in the buffer before it is written.
    Training does not wait for hashes."""
    _waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Events before and after each wait of the GPU for the copy."""
    _host_waited_s: float = 0.0
    copy_s: float = 0.0
    """Seconds of copying."""
    hash_s: float = 0.0
    """Seconds of hashing."""
    copied_at: float = 0.0
    """End of the copy, by `time.perf_counter`."""

    def wait(self) -> None:
        """Returns when the state may change. On a GPU, it returns at once: the current stream waits for the copy, not
        the host."""
        start = time.perf_counter()
        self._from_host.result()
        if self._from_gpu:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            torch.cuda.current_stream().wait_event(self._from_gpu[1])
            after.record()
            self._waits.append((before, after))
        self.waited(time.perf_counter() - start)

    def waited(self, seconds: float) -> None:
        """Records that training waited."""
        self._host_waited_s += seconds

    @property
    def blocked_s(self) -> float:
        """Seconds that training has waited so far, on host or GPU."""
        passed = (before.elapsed_time(after) / 1e3 for before, after in self._waits if after.query())
        return self._host_waited_s + sum(passed)

    def wait_copied(self) -> None:
        """Returns when all shards are copied and hashed; for background threads."""
        for arrival in self._pending():
            arrival.result()

    def release(self) -> None:
        """Frees the buffers, after the copy has ended."""
        concurrent.futures.wait(self._pending())
        self._slot.free.release()

    def _pending(self) -> list[Future[None]]:
        return [arrival for group in self.arrivals.values() for arrival in group.values()]


@dataclass(slots=True)
class _Slot:
    """The buffers of one snapshot, and whether they are free."""

    buffers: dict[_Key, HostBuffer] = field(default_factory=dict)
    free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))


class Stager:
    """Takes snapshots into two slots in turn: one is written to disk while the next is filled."""

    def __init__(self, *, slots: int = 2) -> None:
        self._slots = [_Slot() for _ in range(slots)]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        _keep_to_one_thread(self._pool)
        # Training waits for copies, but never for hashes.
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash", initializer=lower_priority)
        self._stream: torch.cuda.Stream | None = None
        self._taken = 0
        self._prepared: Future[int] | None = None

    def prepare(self, parts: Mapping[str, Sequence[TensorShard]]) -> Future[int]:
        """Creates the buffers for these shards in the background; a future of their bytes. Snapshots wait for it."""
        if self._prepared:
            return self._prepared
        counts, locked = _counts(parts), _on_gpu(parts)
        self._prepared = self._hashing.submit(lambda: sum(_fit(slot, counts, locked=locked) for slot in self._slots))
        return self._prepared

    def take(
        self, parts: Mapping[str, Sequence[TensorShard]], *, give_up: Callable[[], bool] = lambda: False
    ) -> Snapshot | None:
        """Starts a snapshot of `parts`. Waits while both slots are in use; None after `give_up`."""
        began = time.perf_counter()
        slot = self._slots[self._taken % len(self._slots)]
        while not slot.free.acquire(timeout=0.05):
            if give_up():
                return None
        self._taken += 1
        if self._prepared:
            self._prepared.result()
        _fit(slot, _counts(parts), locked=_on_gpu(parts))
        pairs = _targets(slot, parts)
        snapshot = Snapshot({group: [to for g, _, to in pairs if g == group] for group in parts}, slot)
        on_host = [_Batch(pairs) for pairs in _batches([pair for pair in pairs if not pair[1].local.is_cuda])]
        on_gpu = [_Batch(pairs) for pairs in _batches([pair for pair in pairs if pair[1].local.is_cuda])]
        for batch in (*on_host, *on_gpu):
            for group, _, part in batch.pairs:
                snapshot.arrivals.setdefault(group, {})[part.name] = batch.arrival
        if on_gpu:
            snapshot._from_gpu = self._copy_from_gpu(on_gpu)
        self._pool.submit(self._finish, snapshot, on_host, on_gpu)
        snapshot.waited(time.perf_counter() - began)
        return snapshot

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()
        self._hashing.shutdown()
        for slot in self._slots:
            slot.buffers.clear()

    def _copy_from_gpu(self, batches: Sequence[_Batch]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Copies on a separate stream, after the kernels queued so far; start and end of the copy."""
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        # `blocking`: the waiting thread sleeps instead of spinning.
        began, *ends = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(len(batches) + 1))
        with torch.cuda.stream(self._stream):
            began.record()
            for batch, end in zip(batches, ends, strict=True):
                for _, source, target in batch.pairs:
                    target.local.copy_(source.local, non_blocking=True)
                    source.local.record_stream(self._stream)
                end.record()
                batch.copied = end
        return began, ends[-1]

    def _finish(self, snapshot: Snapshot, on_host: Sequence[_Batch], on_gpu: Sequence[_Batch]) -> None:
        start = time.perf_counter()
        try:
            for batch in on_host:
                _copy(batch.pairs)
                self._hashing.submit(_hash, snapshot, batch)
            snapshot._from_host.set_result(None)
            snapshot.copy_s = time.perf_counter() - start
            for batch in on_gpu:
                assert batch.copied
                batch.copied.synchronize()
                self._hashing.submit(_hash, snapshot, batch)
            if snapshot._from_gpu:
                began, ended = snapshot._from_gpu
                snapshot.copy_s = max(snapshot.copy_s, began.elapsed_time(ended) / 1e3)
            snapshot.copied_at = time.perf_counter()
        except BaseException as error:  # raised by the waiting threads
            # One thread hashes in order, so this follows the batches that were copied.
            self._hashing.submit(_fail, [snapshot._from_host, *snapshot._pending()], error)


@dataclass(slots=True)
class _Batch:
    """Shards copied by one call."""

    pairs: Sequence[_Pair]
    arrival: Future[None] = field(default_factory=Future)
    """Completes when they are copied and hashed."""
    copied: torch.cuda.Event | None = None
    """End of their copy from the GPU."""


def _keep_to_one_thread(pool: ThreadPoolExecutor) -> None:
    """Makes torch single-threaded in the only thread of `pool`.

    OpenMP threads that it started would stay: with more threads than cores in a process, GNU OpenMP no longer spins
    while waiting for work, and every parallel operation of training is slower after the first save (`quickstart` on two
    cores: 0.19 s per step instead of 0.13).
    """
    threads = torch.get_num_threads()
    pool.submit(torch.get_num_threads).result()  # a new thread ignores the setting until it was queried once
    pool.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(threads)  # the call above also changed the default of new threads


def _copy(pairs: Sequence[_Pair]) -> None:
    """One call for all tensors, on one thread: it takes the GIL from training once, and one core saturates the memory
    (13.6 GB/s; two threads: 12.8, `memcpy`: 13.1, on two cores of an EPYC)."""
    torch._foreach_copy_([target.local for _, _, target in pairs], [source.local for _, source, _ in pairs])


def _hash(snapshot: Snapshot, batch: _Batch) -> None:
    start = time.perf_counter()
    try:
        for group, _, part in batch.pairs:
            snapshot.digests.setdefault(group, {})[part.name] = digest(as_bytes(part.local))
    except BaseException as error:  # raised by the waiting threads
        batch.arrival.set_exception(error)
        return
    snapshot.hash_s += time.perf_counter() - start
    batch.arrival.set_result(None)


def _fail(futures: Sequence[Future[None]], error: BaseException) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


def _batches(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """The pairs in order, in batches of BATCH_BYTES or slightly more."""
    batch: list[_Pair] = []
    size = 0
    for pair in pairs:
        batch.append(pair)
        size += pair[1].bytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _fit(slot: _Slot, counts: Mapping[_Key, int], *, locked: bool) -> int:
    """Makes the buffers of a slot large enough; returns their bytes."""
    for key, count in counts.items():
        buffer = slot.buffers.get(key)
        if buffer is None or buffer.tensor.numel() < count:
            slot.buffers.pop(key, None)
            slot.buffers[key] = HostBuffer(count, key[1], locked=locked)
    return sum(buffer.bytes for buffer in slot.buffers.values())


def _on_gpu(parts: Mapping[str, Sequence[TensorShard]]) -> bool:
    return any(part.local.is_cuda for group in parts.values() for part in group)


def _counts(parts: Mapping[str, Sequence[TensorShard]]) -> dict[_Key, int]:
    """Elements per buffer."""
    counts: dict[_Key, int] = {}
    for _, part, key, begin in _layout(parts):
        counts[key] = begin + part.local.numel()
    return counts


def _layout(parts: Mapping[str, Sequence[TensorShard]]) -> Iterator[tuple[str, TensorShard, _Key, int]]:
    """Group, shard, its buffer and its offset there; buffers have BUFFER_BYTES or slightly more."""
    for group, group_parts in parts.items():
        filled: dict[torch.dtype, tuple[int, int]] = {}
        for part in group_parts:
            dtype = part.local.dtype
            number, begin = filled.get(dtype, (0, 0))
            if begin * dtype.itemsize >= BUFFER_BYTES:
                number, begin = number + 1, 0
            filled[dtype] = number, begin + part.local.numel()
            yield group, part, (group, dtype, number), begin


def _targets(slot: _Slot, parts: Mapping[str, Sequence[TensorShard]]) -> list[_Pair]:
    """Each shard and its copy in the buffers of the slot."""
    pairs = []
    for group, part, key, begin in _layout(parts):
        target = slot.buffers[key].tensor[begin : begin + part.local.numel()].view(part.local.shape)
        pairs.append((group, part, replace(part, local=target)))
    return pairs


class HostBuffer:
    """Zeroed host memory for `count` elements of `dtype`, page-locked for a GPU if `locked`.

    torch's page-locked memory is rounded up to a power of two and allocated by one driver call, about 1 s per GB
    (H200). This buffer has the exact size, a thread without the GIL touches its pages, and then the driver locks them.
    """

    def __init__(self, count: int, dtype: torch.dtype, *, locked: bool) -> None:
        self.bytes = count * dtype.itemsize
        memory = mmap.mmap(-1, max(1, self.bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Huge pages are faster to create, and fewer to lock. Optional.
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor: Tensor = (
            torch.frombuffer(memory, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
        )
        address = self.tensor.data_ptr()
        for begin in range(0, self.bytes, CLEAR_BYTES):
            # Releases the GIL, on this thread only.
            ctypes.memset(address + begin, 0, min(CLEAR_BYTES, self.bytes - begin))
        if locked and count:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, self.bytes, 0)))
            weakref.finalize(self, _unlock, address)


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
