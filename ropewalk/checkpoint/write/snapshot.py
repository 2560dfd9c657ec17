"""The state of a moment, copied aside while training goes on (CheckFreq, Mohan et al. 2021).

Weights and moments change in the update alone. So the copy may run during the next forward and backward pass, and the
update waits for it (`Snapshot.wait`): a step that saves costs what is left of the copy by then. Copies go into
buffers that were made, touched and (for a GPU) page-locked once: fresh memory costs five times the copy itself, the
kernel clearing page after page.

That takes about a second a gigabyte, so they are made in the background while training begins (`Stager.prepare`).

A large state is copied in batches, and each part says when it is there: what follows the copy of a part need not wait
for the copy of all.
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
from typing import Literal

import torch
from torch import Tensor

from ..run_state import TensorShard, as_bytes
from ..shard_file import digest
from .task_graph import lower_priority

Overlap = Literal["step", "none"]
"""`step`: the copy runs during the next forward and backward pass. `none`: the caller waits for it."""


BATCH_BYTES = 256 << 20
"""Copied by one call. Each takes the interpreter from training once; fewer bytes would take it more often."""


ROOM_BYTES = 512 << 20
"""Of one piece of a buffer, or a little more. One call of the driver page-locks it, for which others may wait."""


PIECE_BYTES = 64 << 20
"""Cleared by one call."""


_Pair = tuple[str, TensorShard, TensorShard]
"""Group, part of the state, and its place in the buffer."""


_Key = tuple[str, torch.dtype, int]
"""Group and type of the parts that a piece of a buffer holds, and its number among those."""


@dataclass(slots=True)
class Snapshot:
    """Parts of a state as they were at one moment, in host memory."""

    parts: dict[str, list[TensorShard]]
    """By group; the tensors lie in a buffer that is free again after `release`."""
    began: float
    _slot: _Slot
    there: dict[str, dict[str, Future[None]]] = field(default_factory=dict)
    """By group and name, when a part is copied and hashed."""
    _from_host: Future[None] = field(default_factory=Future)
    """When what lay in host memory is copied."""
    _from_gpu: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    """When the copy of what lay on the GPU began, and ended."""
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    """By group and name, the hash of what was copied, taken right after the copy: a bit that flips in the buffer
    before it is written is found. Training does not wait for it."""
    _waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Before and after the places in the GPU's queue that wait for the copy."""
    _host_waited_s: float = 0.0
    copy_s: float = 0.0
    """Seconds that the copy took."""
    hash_s: float = 0.0
    """Seconds that the hashes took."""
    copied_at: float = 0.0
    """When the copy ended, of `time.perf_counter`."""

    def wait(self) -> None:
        """Returns when the state may change. On a GPU that is at once: what is asked of it from here on waits for the
        copy, while the host goes on asking."""
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
        """Training has waited for it so long."""
        self._host_waited_s += seconds

    @property
    def blocked_s(self) -> float:
        """Seconds that training has waited for it so far, host or GPU."""
        passed = (before.elapsed_time(after) / 1e3 for before, after in self._waits if after.query())
        return self._host_waited_s + sum(passed)

    def wait_copied(self) -> None:
        """Returns when the copy is done and hashed; for whoever is not training."""
        for arrival in self._arrivals():
            arrival.result()

    def release(self) -> None:
        """Gives the buffer back, as soon as nothing is copied there any more."""
        concurrent.futures.wait(self._arrivals())
        self._slot.free.release()

    def _arrivals(self) -> list[Future[None]]:
        return [arrival for group in self.there.values() for arrival in group.values()]


@dataclass(slots=True)
class _Slot:
    """A buffer in pieces, and whether it is free."""

    rooms: dict[_Key, HostBuffer] = field(default_factory=dict)
    free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))


class Stager:
    """Takes snapshots into two buffers in turn: one may be on its way to the disk while the next is filled."""

    def __init__(self, *, overlap: Overlap = "step", buffers: int = 2) -> None:
        self._overlap = overlap
        self._slots = [_Slot() for _ in range(buffers)]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        _keep_to_one_thread(self._pool)
        # Training waits for copies, never for hashes.
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash", initializer=lower_priority)
        self._stream: torch.cuda.Stream | None = None
        self._taken = 0
        self._prepared: Future[int] | None = None

    def prepare(self, parts: Mapping[str, Sequence[TensorShard]]) -> Future[int]:
        """Begins to make the buffers for such parts; their bytes, when they are there. A snapshot waits for them."""
        if self._prepared:
            return self._prepared
        counts, locked = _counts(parts), _on_gpu(parts)
        self._prepared = self._hashing.submit(lambda: sum(_fit(slot, counts, locked=locked) for slot in self._slots))
        return self._prepared

    def take(
        self, parts: Mapping[str, Sequence[TensorShard]], *, give_up: Callable[[], bool] = lambda: False
    ) -> Snapshot | None:
        """Begins a snapshot of `parts`. When both buffers are still on their way, waits for one, or until `give_up`
        says so: then there is none."""
        began = time.perf_counter()
        slot = self._slots[self._taken % len(self._slots)]
        while not slot.free.acquire(timeout=0.05):
            if give_up():
                return None
        self._taken += 1
        if self._prepared:
            self._prepared.result()
        _fit(slot, _counts(parts), locked=_on_gpu(parts))
        pairs = _places(slot, parts)
        snapshot = Snapshot({group: [to for g, _, to in pairs if g == group] for group in parts}, began, slot)
        on_host = [_Batch(pairs) for pairs in _batches([pair for pair in pairs if not pair[1].local.is_cuda])]
        on_gpu = [_Batch(pairs) for pairs in _batches([pair for pair in pairs if pair[1].local.is_cuda])]
        for batch in (*on_host, *on_gpu):
            for group, _, part in batch.pairs:
                snapshot.there.setdefault(group, {})[part.name] = batch.there
        if on_gpu:
            snapshot._from_gpu = self._copy_from_gpu(on_gpu)
        self._pool.submit(self._finish, snapshot, on_host, on_gpu)
        snapshot.waited(time.perf_counter() - began)
        if self._overlap == "none":
            snapshot.wait()
        return snapshot

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()
        self._hashing.shutdown()
        for slot in self._slots:
            slot.rooms.clear()

    def _copy_from_gpu(self, batches: Sequence[_Batch]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Copies on a stream of their own, after what the step has queued; their begin and end."""
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        # `blocking`: the thread that waits for it sleeps and leaves the core to others.
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
        except BaseException as error:  # belongs to whoever waits
            # One thread hashes, in order: what is hashed already, or will be, says so before this is said of the rest.
            self._hashing.submit(_fail, [snapshot._from_host, *snapshot._arrivals()], error)


@dataclass(slots=True)
class _Batch:
    """Parts that are copied by one call."""

    pairs: Sequence[_Pair]
    there: Future[None] = field(default_factory=Future)
    """When they are copied and hashed."""
    copied: torch.cuda.Event | None = None
    """When they are copied from the GPU."""


def _keep_to_one_thread(pool: ThreadPoolExecutor) -> None:
    """Lets torch do in the only thread of `pool` itself what it would share among several.

    Helpers of its own would be there for good: with more of them in a process than the machine has cores, GNU's OpenMP
    no longer waits for work awake, and from the first save on all that training shares among its threads takes longer
    (`quickstart` on two cores: 0.19 s a step instead of 0.13).
    """
    threads = torch.get_num_threads()
    pool.submit(torch.get_num_threads).result()  # a thread that was never asked forgets what it is told
    pool.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(threads)  # the other call was also for threads that are yet to come


def _copy(pairs: Sequence[_Pair]) -> None:
    """One call for all tensors, on one thread: that takes the interpreter from training once, and one core copies as
    fast as memory allows (13.6 GB/s beside 12.8 with two threads, and 13.1 of `memcpy`, on two cores of an EPYC)."""
    torch._foreach_copy_([target.local for _, _, target in pairs], [source.local for _, source, _ in pairs])


def _hash(snapshot: Snapshot, batch: _Batch) -> None:
    start = time.perf_counter()
    try:
        for group, _, part in batch.pairs:
            snapshot.digests.setdefault(group, {})[part.name] = digest(as_bytes(part.local))
    except BaseException as error:  # belongs to whoever waits
        batch.there.set_exception(error)
        return
    snapshot.hash_s += time.perf_counter() - start
    batch.there.set_result(None)


def _fail(futures: Sequence[Future[None]], error: BaseException) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


def _batches(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """The pairs in order, in batches of BATCH_BYTES or a little more."""
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
    """Makes the slot's buffer large enough; returns its bytes."""
    for key, count in counts.items():
        room = slot.rooms.get(key)
        if room is None or room.tensor.numel() < count:
            slot.rooms.pop(key, None)
            slot.rooms[key] = HostBuffer(count, key[1], locked=locked)
    return sum(room.bytes for room in slot.rooms.values())


def _on_gpu(parts: Mapping[str, Sequence[TensorShard]]) -> bool:
    return any(part.local.is_cuda for group in parts.values() for part in group)


def _counts(parts: Mapping[str, Sequence[TensorShard]]) -> dict[_Key, int]:
    """How many numbers each piece of a buffer holds."""
    counts: dict[_Key, int] = {}
    for _, part, key, begin in _layout(parts):
        counts[key] = begin + part.local.numel()
    return counts


def _layout(parts: Mapping[str, Sequence[TensorShard]]) -> Iterator[tuple[str, TensorShard, _Key, int]]:
    """Group, part, the piece that holds it, and where it begins there: pieces of ROOM_BYTES or a little more."""
    for group, group_parts in parts.items():
        filled: dict[torch.dtype, tuple[int, int]] = {}
        for part in group_parts:
            dtype = part.local.dtype
            number, begin = filled.get(dtype, (0, 0))
            if begin * dtype.itemsize >= ROOM_BYTES:
                number, begin = number + 1, 0
            filled[dtype] = number, begin + part.local.numel()
            yield group, part, (group, dtype, number), begin


def _places(slot: _Slot, parts: Mapping[str, Sequence[TensorShard]]) -> list[_Pair]:
    """Each part and its place in the slot's buffer."""
    pairs = []
    for group, part, key, begin in _layout(parts):
        target = slot.rooms[key].tensor[begin : begin + part.local.numel()].view(part.local.shape)
        pairs.append((group, part, replace(part, local=target)))
    return pairs


class HostBuffer:
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
