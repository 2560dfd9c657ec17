"""Background thread that runs named collectives in the order negotiated by all ranks.

Ranks negotiate in cycles: immediately while any rank waits for a collective, otherwise every `IDLE_S`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropewalk.base.errors import UserError
from ropewalk.config.horovod import HorovodSettings

from ..comm import Group
from .negotiation import CycleMessage, FusionTuner, Ready, Request, RequestTable, fuse

IDLE_S = 0.02
logger = logging.getLogger(__name__)


class Entry:
    """A collective that this rank has requested."""

    def __init__(self, request: Request, tensor: Tensor) -> None:
        self.request, self.tensor = request, tensor
        self.target: Tensor | None = None
        """Tensor that `synchronize` writes the result into."""
        self.result: Tensor | None = None
        self.error = ""
        self.over = threading.Event()
        self.ready: Any = _event(tensor)
        self.done: Any = None

    def wait(self) -> Tensor:
        """Waits and returns the result; on a GPU, the current stream waits for it."""
        self.over.wait()
        if self.error:
            raise UserError(self.error)
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        assert self.result is not None
        return self.result

    def finish(self, result: Tensor) -> None:
        self.result, self.done = result, _event(result)
        self.over.set()

    def fail(self, error: str) -> None:
        self.error = error
        self.over.set()


class Background:
    """One rank's thread and its requested collectives."""

    def __init__(self, tensors: Group, control: Group, settings: HorovodSettings) -> None:
        self._tensors, self._control, self._settings = tensors, control, settings
        self._table = RequestTable(tensors.size)
        self._lock = threading.Condition()
        self._new: list[Entry] = []
        self._open: dict[str, Entry] = {}
        self._joined: threading.Event | None = None
        self._last_joined = -1
        self._leaving = False
        self._failed = ""
        self._since: dict[str, float] = {}
        self.tuner = FusionTuner() if settings.autotune else None
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._run, name="horovod", daemon=True)
        self._thread.start()

    def ask(self, request: Request, tensor: Tensor) -> Entry:
        """Queues a collective without blocking."""
        entry = Entry(request, tensor)
        with self._lock:
            if self._failed or self._leaving:
                raise UserError(self._failed or "horovod: this process has shut down")
            if request.name in self._open:
                raise UserError(f"horovod: `{request.name}` is under way already; give each tensor a name of its own")
            self._open[request.name] = entry
            self._new.append(entry)
            self._lock.notify()
        return entry

    def join(self) -> int:
        """Contributes zeros until every rank has joined; returns the rank that joined last."""
        with self._lock:
            if self._failed:
                raise UserError(self._failed)
            self._joined = over = threading.Event()
            self._lock.notify()
        over.wait()
        if self._failed:
            raise UserError(self._failed)
        return self._last_joined

    def close(self) -> None:
        """Stops the threads of all ranks; pending collectives fail on other ranks."""
        with self._lock:
            self._leaving = True
            self._lock.notify()
        self._thread.join()

    def _run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        messages: Sequence[CycleMessage] = ()
        try:
            while not any(message.leaving for message in messages):
                messages = self._cycle(wait_s=self._pause(messages))
            gone = [rank for rank, message in enumerate(messages) if message.leaving]
            self._end(f"horovod: rank {gone[0]} has shut down")
        except Exception as error:  # a dead rank or a network failure: all waiters must fail
            self._end(f"horovod: the other ranks cannot be reached: {error}")

    def _pause(self, messages: Sequence[CycleMessage]) -> float:
        return self._settings.cycle_s if any(message.pending for message in messages) else IDLE_S

    def _cycle(self, *, wait_s: float) -> Sequence[CycleMessage]:
        with self._lock:
            if not self._new and not self._leaving:
                self._lock.wait(wait_s)
            new, self._new = self._new, []
            message = CycleMessage(
                requests=tuple(entry.request for entry in new),
                joined=self._joined is not None,
                leaving=self._leaving,
                pending=bool(self._open) or self._joined is not None,
                fusion_bytes=self.tuner.size if self.tuner else self._settings.fusion_bytes,
            )
        messages = self._exchange(message)
        ready = self._table.take(messages)
        for group in fuse(ready, messages[0].fusion_bytes):
            self._execute(group)
        if len(self._table.joined) == self._tensors.size:
            self._all_joined()
        self._tell_stalled()
        return messages

    def _exchange(self, message: CycleMessage) -> list[CycleMessage]:
        """Returns the messages of all ranks."""
        text = json.dumps(message.plain()).encode()
        sizes = self._control.gather_numbers(len(text))
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self._control.all_gather(padded.unsqueeze(0))
        texts = [bytes(row[:size].numpy()) for row, size in zip(rows, sizes, strict=True)]
        return [CycleMessage.read(json.loads(each)) for each in texts]

    def _execute(self, group: Sequence[Ready]) -> None:
        with self._lock:
            entries = [self._open.pop(each.request.name, None) for each in group]
        first = group[0]
        if first.error:
            for entry in entries:
                if entry:
                    entry.fail(f"horovod: {first.error}")
            return
        for entry in entries:
            if entry is not None and entry.ready is not None:
                torch.cuda.current_stream().wait_event(entry.ready)
        if first.request.kind == "allreduce":
            self._reduce([each.request for each in group], entries)
        elif first.request.kind == "allgather":
            result = self._gather(first, entries[0])
            if entries[0]:
                entries[0].finish(result)
        else:
            x = entries[0].tensor.detach().clone() if entries[0] else _zeros(first.request)
            result = self._group(first.request).broadcast(x.contiguous(), source=int(first.request.operation))
            if entries[0]:
                entries[0].finish(result)

    def _reduce(self, requests: Sequence[Request], entries: Sequence[Entry | None]) -> None:
        parts = [e.tensor.detach() if e else _zeros(r) for r, e in zip(requests, entries, strict=True)]
        kind, before, after = requests[0].operation.split()
        flat = torch.cat([part.reshape(-1) for part in parts])
        if float(before) != 1:
            flat *= float(before)
        group = self._group(requests[0])
        flat = adasum(group.all_gather(flat.unsqueeze(0))) if kind == "adasum" else group.all_reduce(flat)
        if kind == "average":
            flat = flat / self._tensors.size if flat.is_floating_point() else flat // self._tensors.size
        if float(after) != 1:
            flat *= float(after)
        if self.tuner:
            self.tuner.saw(flat.nbytes, time.monotonic())
        for entry, piece in zip(entries, flat.split([part.numel() for part in parts]), strict=True):
            if entry:
                entry.finish(piece.view(entry.tensor.shape))

    def _gather(self, ready: Ready, entry: Entry | None) -> Tensor:
        """Concatenates the ranks' rows, padded to equal counts for the transfer."""
        most = max(ready.rows.values())
        x = entry.tensor.detach() if entry else _zeros(replace(ready.request, shape=(0, *ready.request.shape[1:])))
        padded = x.new_zeros((most, *x.shape[1:]))
        padded[: len(x)] = x
        parts = self._group(ready.request).all_gather(padded.unsqueeze(0))
        return torch.cat([parts[rank, :rows] for rank, rows in sorted(ready.rows.items())])

    def _group(self, request: Request) -> Group:
        """Returns the group for the request's device: CPU tensors use the control group when others use NCCL."""
        return self._control if request.device == "cpu" and self._device is not None else self._tensors

    def _all_joined(self) -> None:
        self._last_joined = self._table.joined[-1]
        self._table.restart()
        with self._lock:
            over, self._joined = self._joined, None
        if over:
            over.set()

    def _tell_stalled(self) -> None:
        now, missing = time.monotonic(), self._table.missing()
        self._since = {name: self._since.get(name, now) for name in missing}
        for name, since in self._since.items():
            if now - since > self._settings.stall_s:
                who = f"ranks {', '.join(map(str, missing[name]))}, which have not asked for it"
                logger.warning("horovod: `%s` has waited %.0f s for %s", name, now - since, who)
                self._since[name] = now

    def _end(self, why: str) -> None:
        with self._lock:
            self._failed = why
            entries, self._open, self._new = list(self._open.values()), {}, []
            over = self._joined
        for entry in entries:
            entry.fail(why)
        if over:
            over.set()


def adasum(parts: Tensor) -> Tensor:
    """Sums the ranks' gradients as a binary tree; each pair counts its common component once (Maleki et al. 2021,
    equation 3)."""
    terms: list[Tensor] = list(parts.unbind(0))
    while len(terms) > 1:
        terms = [_adasum_of_two(terms[i], terms[i + 1]) for i in range(0, len(terms), 2)]
    return terms[0]


def _adasum_of_two(a: Tensor, b: Tensor) -> Tensor:
    wide = (a.double(), b.double())
    common, of_a, of_b = wide[0] @ wide[1], wide[0] @ wide[0], wide[1] @ wide[1]
    keep_a = 1 - common / (2 * of_a) if of_a > 0 else torch.ones_like(common)
    keep_b = 1 - common / (2 * of_b) if of_b > 0 else torch.ones_like(common)
    return (keep_a * wide[0] + keep_b * wide[1]).to(a.dtype)


def _zeros(request: Request) -> Tensor:
    """Returns the contribution of a joined rank."""
    device = torch.device("cuda", torch.cuda.current_device()) if request.device == "cuda" else torch.device("cpu")
    return torch.zeros(request.shape, dtype=getattr(torch, request.dtype), device=device)


def _event(tensor: Tensor) -> Any:
    """Records an event on a GPU's current stream."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event
