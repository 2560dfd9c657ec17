"""CPU-offloaded optimizer (ZeRO-Offload, Ren et al. 2021): updates weights and moments in host memory or on disk.

The device keeps the compute weights. Gradients are copied to the host bucket by bucket during the backward pass, a
thread applies them there, and the new weights are copied back before the next forward pass. The update equals that of
the same optimizer on the device, without staleness.

What overlaps with the backward pass depends on clipping. Clipping needs the norm of all gradients: only the copies
overlap then, and updates of one bucket overlap with copies of others at the end. Without it, updates run as gradients
arrive and are rolled back, bit for bit, when the guard skips the step; the host keeps the state before meanwhile, which
doubles its memory (as SuperOffload, Lian et al. 2025). parallel/executor.py reports final gradients from the reducers.

Price, AdamW on 124 M parameters in float32, beside 243 ms of computing (H200, 16 cores, torch 2.11): 1.1 ms on the
device; 80 ms on the host, 60 of them exposed when updates wait; 125 when they do not, 45 of them exposed, mostly the
embedding's, whose gradient is the last; 470 from files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ..data.buckets import fused
from .state_files import StateFiles

BUCKET_BYTES = 16 << 20
"""Bytes of weights. Time is flat from here to 256 MB (4 MB: a quarter more); smaller buckets start sooner and need less
memory when the state is in files."""

Make = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]


@dataclass(slots=True)
class _Bucket:
    """Parameters copied and updated together."""

    number: int
    names: list[str]
    missing: set[str] = field(default_factory=set)
    arrived: _Arriving | None = None
    """Their gradients, being copied."""
    done: Future[None] | None = None
    before: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """State before an update that may be rolled back, by parameter; weights as `weight`."""


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Gradients being copied to the host, by name."""

    gradients: dict[str, Tensor]
    event: torch.cuda.Event | None

    def wait(self) -> dict[str, Tensor]:
        if self.event:
            self.event.synchronize()
        return self.gradients


class HostOptimizer:
    """Updates device `weights` with an optimizer on the host.

    A step: `begin`, then `ready` for each parameter whose gradient (`weights[name].grad`) is final, as early as
    possible, then `step`. `make` builds the optimizer from the host's master weights, `parameters`, in `dtype`
    (default: that of the weights). With `waits`, updates run in `step`, on gradients scaled there; an optimizer that
    communicates always waits. With `folder`, weights and moments are in files and only a few buckets of `bucket_bytes`
    of weights in memory; updates wait, and gradients stay on the device until then.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        make: Make,
        *,
        waits: bool,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        folder: Path | None = None,
    ) -> None:
        self._weights = weights
        self._device = next(iter(weights.values())).device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-optimizer")
        self._files = StateFiles(folder, pinned=self._stream is not None) if folder else None
        self._buckets = [_Bucket(number, names) for number, names in enumerate(fused(weights, bucket_bytes))]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        masters = {n: nn.Parameter(t) for bucket in self._buckets for n, t in self._masters(bucket, dtype).items()}
        self.parameters = {name: masters[name] for name in weights}
        """Host master weights; checkpoints save these without a copy from the device."""
        self.optimizer = make(self.parameters)
        """Its `state` holds the moments, keyed by master weight; its groups take learning rates."""
        self.waits = waits or folder is not None or communicates(self.optimizer)
        """Whether all updates wait for `step`."""
        for bucket in self._buckets:
            self._make_state(bucket)

    def begin(self) -> None:
        """Begins a step with the learning rates of the optimizer's groups; rolls back an unfinished step."""
        self._guard(torch.zeros(()))
        wait([bucket.done for bucket in self._buckets if bucket.done])
        for bucket in self._buckets:
            self._take_back(bucket)
            bucket.missing, bucket.arrived, bucket.done = set(bucket.names), None, None
            if self._files:
                self._files.start_read(bucket.number)

    def ready(self, names: Iterable[str]) -> None:
        """Marks the gradients of these weights as final."""
        for name in names:
            bucket = self._bucket_of[name]
            bucket.missing.discard(name)
            if not bucket.missing and not self._files and bucket.arrived is None:
                self._start(bucket)

    def step(self, skipped: Tensor, *, scale: Tensor | None = None) -> None:
        """Finishes the update with gradients times `scale`, or changes nothing where `skipped` is 1. Waits for the
        device and the host."""
        assert scale is None or self.waits, "updates were made before the scale was known"
        left_out = skipped.detach().to("cpu", torch.float32).reshape(())
        factor = None if scale is None else scale.detach().cpu()
        if self.waits:
            self._guard(left_out)
        if self._stream:
            # Kernels that read the old weights finish before the new ones arrive.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for bucket in self._buckets:
            if self._files:
                bucket.done = self._thread.submit(self._update_in_files, bucket, factor)
                continue
            if bucket.arrived is None:
                self._start(bucket)
            if self.waits:
                bucket.done = self._thread.submit(self._update, bucket, factor)
        for bucket in self._buckets:
            assert bucket.done is not None
            bucket.done.result()
            if left_out:
                self._take_back(bucket)
            elif not self._files:
                self._publish(bucket)
            bucket.arrived, bucket.done, bucket.before = None, None, {}
        if self._files:
            self._files.settle()
        if self._stream:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def publish(self) -> None:
        """Copies master weights to the device, after they were set from a checkpoint."""
        for bucket in self._buckets:
            self._publish(bucket)
        if self._stream:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        """Stops the threads; state in files is lost."""
        self._thread.shutdown()
        if self._files:
            self._files.close()

    def _masters(self, bucket: _Bucket, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Returns copies of a bucket's weights in host memory or files."""
        found = {name: self._weights[name].detach().to("cpu", dtype, copy=True) for name in bucket.names}
        if self._files:
            return dict(zip(found, self._files.add(bucket.number, list(found.values())), strict=True))
        return {name: weight.pin_memory() for name, weight in found.items()} if self._stream else found

    def _make_state(self, bucket: _Bucket) -> None:
        """Creates the moments of a bucket before its first step, by running a skipped update."""
        self._guard(torch.ones(()))
        self._apply({name: torch.zeros_like(self.parameters[name]) for name in bucket.names})
        if self._files:
            views = self._files.add(bucket.number, [tensor for *_, tensor in self._moments(bucket)])
            for (name, kind, _), view in zip(self._moments(bucket), views, strict=True):
                self.optimizer.state[self.parameters[name]][kind] = view

    def _guard(self, left_out: Tensor) -> None:
        """Sets whether the optimizer skips its next update (see train/optim/rule.py)."""
        vars(self.optimizer).update(found_inf=left_out, grad_scale=None)

    def _start(self, bucket: _Bucket) -> None:
        bucket.arrived = self._fetch(bucket)
        if not self.waits:
            bucket.done = self._thread.submit(self._update_for_now, bucket)

    def _fetch(self, bucket: _Bucket) -> _Arriving:
        """Starts to copy a bucket's gradients to the host; those of a CPU are used in place."""
        found = {name: grad for name in bucket.names if (grad := self._weights[name].grad) is not None}
        if not self._stream:
            return _Arriving(found, None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copies = {}
        with torch.cuda.stream(self._stream):
            for name, gradient in found.items():
                copies[name] = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
                copies[name].copy_(gradient, non_blocking=True)
                gradient.record_stream(self._stream)
            return _Arriving(copies, self._stream.record_event())

    def _update(self, bucket: _Bucket, scale: Tensor | None) -> None:
        assert bucket.arrived is not None
        gradients = bucket.arrived.wait()
        self._apply({n: g if scale is None else g * scale.to(g.dtype) for n, g in gradients.items()})

    def _update_for_now(self, bucket: _Bucket) -> None:
        """Updates a bucket such that it can be rolled back."""
        for name in bucket.names:
            parameter = self.parameters[name]
            moments = {kind: tensor.clone() for kind, tensor in self.optimizer.state[parameter].items()}
            bucket.before[name] = {"weight": parameter.detach().clone(), **moments}
        self._update(bucket, None)

    @torch.no_grad()
    def _take_back(self, bucket: _Bucket) -> None:
        """Rolls a bucket back to its state before the update; no-op without one."""
        for name, before in bucket.before.items():
            self.parameters[name].copy_(before.pop("weight"))
            for kind, tensor in before.items():
                self.optimizer.state[self.parameters[name]][kind].copy_(tensor)
        bucket.before = {}

    def _update_in_files(self, bucket: _Bucket, scale: Tensor | None) -> None:
        """Updates a bucket in memory and writes it back to its file."""
        assert self._files
        masters = {name: self.parameters[name].data for name in bucket.names}
        moments = list(self._moments(bucket))
        here = iter(self._files.take(bucket.number))
        bucket.arrived = self._fetch(bucket)
        try:
            for name in bucket.names:
                self.parameters[name].data = next(here)
            for name, kind, _ in moments:
                self.optimizer.state[self.parameters[name]][kind] = next(here)
            self._update(bucket, scale)
            self._publish(bucket)
            if self._stream:
                self._stream.synchronize()
            self._files.start_write(bucket.number)
        finally:
            self._files.drop(bucket.number)
            for name, mapped in masters.items():
                self.parameters[name].data = mapped
            for name, kind, mapped in moments:
                self.optimizer.state[self.parameters[name]][kind] = mapped
            bucket.arrived = None

    def _apply(self, gradients: Mapping[str, Tensor]) -> None:
        """Runs one optimizer step for the parameters in `gradients`; the optimizer skips the others."""
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient.to(self.parameters[name].dtype)
        self.optimizer.step()
        for name in gradients:
            self.parameters[name].grad = None

    @torch.no_grad()
    def _publish(self, bucket: _Bucket) -> None:
        with torch.cuda.stream(self._stream):
            for name in bucket.names:
                self._weights[name].copy_(self.parameters[name], non_blocking=True)

    def _moments(self, bucket: _Bucket) -> Iterable[tuple[str, str, Tensor]]:
        """Yields (parameter, kind, tensor) of all moments; step counts are excluded."""
        for name in bucket.names:
            for kind, tensor in self.optimizer.state[self.parameters[name]].items():
                if tensor.dim():
                    yield name, kind, tensor


def communicates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update of `optimizer` runs collectives, so that all ranks must call it together. Ours declare it;
    torch's never do."""
    return getattr(optimizer, "communicates", False)
