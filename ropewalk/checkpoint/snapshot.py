"""The state of a moment, copied aside while training goes on (CheckFreq, Mohan et al. 2021).

Weights and moments change in the update alone. So the copy may run during the next forward and backward pass, and the
update waits for it (`Snapshot.wait`): a step that saves costs what is left of the copy by then. Copies go into
buffers that were made, touched and (for a GPU) page-locked once: fresh memory costs five times the copy itself, the
kernel clearing page after page.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from .layouts import Held, as_bytes
from .payload import digest
from .priority import give_way

Overlap = Literal["step", "none"]
"""`step`: the copy runs during the next forward and backward pass. `none`: the caller waits for it."""


@dataclass(slots=True)
class Snapshot:
    """Parts of a state as they were at one moment, in host memory."""

    parts: dict[str, list[Held]]
    """By group; the tensors lie in a buffer that is free again after `release`."""
    began: float
    _slot: _Slot
    _from_host: Future[None] = field(default_factory=Future)
    """When what lay in host memory is copied."""
    _from_gpu: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    """When the copy of what lay on the GPU began, and ended."""
    _copied: Future[None] = field(default_factory=Future)
    """When both are."""
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    """By group and name, the hash of what was copied, taken right after the copy: a bit that flips in the buffer
    before it is written is found. Training does not wait for it."""
    _hashed: Future[None] = field(default_factory=Future)
    _waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Before and after the places in the GPU's queue that wait for the copy."""
    _host_waited_s: float = 0.0
    copy_s: float = 0.0
    """Seconds that the copy took."""

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
        self._copied.result()
        self._hashed.result()

    def release(self) -> None:
        """Gives the buffer back."""
        self._slot.free.release()


@dataclass(slots=True)
class _Slot:
    """One buffer a group and type, and whether it is free."""

    buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)
    free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))


class Stager:
    """Takes snapshots into two buffers in turn: one may be on its way to the disk while the next is filled."""

    def __init__(self, *, overlap: Overlap = "step", buffers: int = 2) -> None:
        self._overlap = overlap
        self._slots = [_Slot() for _ in range(buffers)]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        # Training waits for copies, never for hashes.
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash", initializer=give_way)
        self._stream: torch.cuda.Stream | None = None
        self._taken = 0

    def prepare(self, parts: Mapping[str, Sequence[Held]]) -> int:
        """Makes the buffers for such parts ahead of the first snapshot; returns their bytes."""
        return sum(_fit(slot, parts) for slot in self._slots)

    def take(
        self, parts: Mapping[str, Sequence[Held]], *, give_up: Callable[[], bool] = lambda: False
    ) -> Snapshot | None:
        """Begins a snapshot of `parts`. When both buffers are still on their way, waits for one, or until `give_up`
        says so: then there is none."""
        began = time.perf_counter()
        slot = self._slots[self._taken % len(self._slots)]
        while not slot.free.acquire(timeout=0.05):
            if give_up():
                return None
        self._taken += 1
        _fit(slot, parts)
        targets, pairs = _places(slot, parts)
        snapshot = Snapshot(targets, began, slot)
        on_gpu = [pair for pair in pairs if pair[0].is_cuda]
        if on_gpu:
            snapshot._from_gpu = self._copy_from_gpu(on_gpu)
        self._pool.submit(self._finish, snapshot, [pair for pair in pairs if not pair[0].is_cuda])
        snapshot.waited(time.perf_counter() - began)
        if self._overlap == "none":
            snapshot.wait()
        return snapshot

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()
        self._hashing.shutdown()

    def _copy_from_gpu(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Copies on a stream of their own, after what the step has queued; their begin and end."""
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        # `blocking`: the thread that waits for it sleeps and leaves the core to others.
        began, ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            began.record()
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            ended.record()
        return began, ended

    def _finish(self, snapshot: Snapshot, on_host: Sequence[tuple[Tensor, Tensor]]) -> None:
        start = time.perf_counter()
        try:
            _copy(on_host)
            snapshot._from_host.set_result(None)
            snapshot.copy_s = time.perf_counter() - start
            if snapshot._from_gpu:
                began, ended = snapshot._from_gpu
                ended.synchronize()
                snapshot.copy_s = max(snapshot.copy_s, began.elapsed_time(ended) / 1e3)
            snapshot._copied.set_result(None)
        except BaseException as error:  # belongs to whoever waits
            for future in (snapshot._from_host, snapshot._copied, snapshot._hashed):
                if not future.done():
                    future.set_exception(error)
            return
        self._hashing.submit(_hash, snapshot)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """One call for all tensors, on one thread: that takes the interpreter from training once, and one core copies as
    fast as memory allows (13.6 GB/s beside 12.8 with two threads, and 13.1 of `memcpy`, on two cores of an EPYC)."""
    if pairs:
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])


def _hash(snapshot: Snapshot) -> None:
    try:
        snapshot.digests = {
            group: {part.name: digest(as_bytes(part.local)) for part in parts}
            for group, parts in snapshot.parts.items()
        }
    except BaseException as error:  # belongs to whoever waits
        snapshot._hashed.set_exception(error)
        return
    snapshot._hashed.set_result(None)


def _fit(slot: _Slot, parts: Mapping[str, Sequence[Held]]) -> int:
    """Makes the slot's buffers large enough; returns the bytes of all."""
    for key, count in _counts(parts).items():
        buffer = slot.buffers.get(key)
        if buffer is None or buffer.numel() < count:
            pin = torch.cuda.is_available() and any(p.local.is_cuda for group in parts.values() for p in group)
            # Zeros written now: the first snapshot finds the pages there.
            slot.buffers[key] = torch.empty(count, dtype=key[1], pin_memory=pin).zero_()
    return sum(buffer.numel() * buffer.element_size() for buffer in slot.buffers.values())


def _counts(parts: Mapping[str, Sequence[Held]]) -> dict[tuple[str, torch.dtype], int]:
    counts: dict[tuple[str, torch.dtype], int] = {}
    for group, group_parts in parts.items():
        for part in group_parts:
            key = (group, part.local.dtype)
            counts[key] = counts.get(key, 0) + part.local.numel()
    return counts


def _places(
    slot: _Slot, parts: Mapping[str, Sequence[Held]]
) -> tuple[dict[str, list[Held]], list[tuple[Tensor, Tensor]]]:
    """The parts with tensors in the slot's buffers, and (from, to) of each."""
    used: dict[tuple[str, torch.dtype], int] = {}
    targets: dict[str, list[Held]] = {}
    pairs = []
    for group, group_parts in parts.items():
        targets[group] = []
        for part in group_parts:
            key = (group, part.local.dtype)
            begin = used.get(key, 0)
            used[key] = begin + part.local.numel()
            target = slot.buffers[key][begin : used[key]].view(part.local.shape)
            targets[group].append(replace(part, local=target))
            pairs.append((part.local, target))
    return targets, pairs
