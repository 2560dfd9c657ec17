"""An optimizer whose weights and moments lie in the host's memory, or on a disk, and which updates them there.

ZeRO-Offload (Ren et al. 2021): the device keeps the weights that it computes with; gradients travel to the host while
the backward pass goes on, a bucket at a time, are applied there by a thread, and the new weights travel back. The step
is that of the same optimizer on the device, and none is late: the next forward pass has the new weights.

What overlaps with the backward pass depends on what an update has to wait for. Clipping needs the length of all
gradients: then it is the copies alone, and the updates of one bucket overlap with the copies of others at the end. With
nothing to wait for, updates are made as gradients arrive and taken back, bit for bit, when the guard leaves the step
out; meanwhile the host remembers the state before (SuperOffload does so too, Lian et al. 2025), which takes as much
memory again. Who says that gradients are final is parallel/executor.py, as the reducers announce it.

Price, AdamW on 124 M parameters in float32, beside 243 ms of computing (H200, 16 cores, torch 2.11): 1.1 ms on the
device; 80 ms on the host, of which 60 remain visible when updates wait; 125 when they do not, of which 45 remain
visible, most of them the embedding's, whose gradient is the last; 470 from files.
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
"""Of weights. Time is flat from here to 256 MB (4 MB: a quarter more), and smaller ones begin sooner and need less
memory where the state lies in files."""

Make = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]


@dataclass(slots=True)
class _Bucket:
    """Parameters that travel and are updated together."""

    number: int
    names: list[str]
    missing: set[str] = field(default_factory=set)
    arrived: _Arriving | None = None
    """Their gradients, on the way."""
    done: Future[None] | None = None
    before: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """What an update that may be taken back found, by parameter; weights as `weight`."""


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Gradients on their way to the host, by name."""

    gradients: dict[str, Tensor]
    event: torch.cuda.Event | None

    def wait(self) -> dict[str, Tensor]:
        if self.event:
            self.event.synchronize()
        return self.gradients


class HostOptimizer:
    """Updates `weights` of the device by an optimizer on the host.

    A step: `begin`, then `ready` for each parameter whose gradient (`weights[name].grad`) is final, as early as that
    may be, then `step`. `make` makes the optimizer from the host's own weights, which are `parameters`, in `dtype`
    (that of the weights where not given). With `waits` updates are made in `step`, for gradients that are scaled there;
    those of an optimizer that communicates always are. With `folder` weights and moments lie in files there and only a
    few buckets of `bucket_bytes` of weights are in memory; updates wait, and gradients stay on the device until then.
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
        """The host's weights, which are what a checkpoint keeps: nothing has to come from the device for it."""
        self.optimizer = make(self.parameters)
        """Its `state` holds the moments by the host's weights; its groups take learning rates."""
        self.waits = waits or folder is not None or communicates(self.optimizer)
        """Whether nothing changes before `step`."""
        for bucket in self._buckets:
            self._make_state(bucket)

    def begin(self) -> None:
        """A step begins, with the learning rates of the optimizer's groups. What one that never came to its end has
        changed is taken back."""
        self._guard(torch.zeros(()))
        wait([bucket.done for bucket in self._buckets if bucket.done])
        for bucket in self._buckets:
            self._take_back(bucket)
            bucket.missing, bucket.arrived, bucket.done = set(bucket.names), None, None
            if self._files:
                self._files.start_read(bucket.number)

    def ready(self, names: Iterable[str]) -> None:
        """The gradients of these weights are final."""
        for name in names:
            bucket = self._bucket_of[name]
            bucket.missing.discard(name)
            if not bucket.missing and not self._files and bucket.arrived is None:
                self._start(bucket)

    def step(self, skipped: Tensor, *, scale: Tensor | None = None) -> None:
        """Finishes the update with gradients times `scale`, or leaves everything as it was where `skipped` is 1.

        Waits for the device, and for the host.
        """
        assert scale is None or self.waits, "updates were made before the scale was known"
        left_out = skipped.detach().to("cpu", torch.float32).reshape(())
        factor = None if scale is None else scale.detach().cpu()
        if self.waits:
            self._guard(left_out)
        if self._stream:
            # What computes with the old weights is over before the new ones arrive.
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
        """Gives the device the host's weights, after these were set from elsewhere."""
        for bucket in self._buckets:
            self._publish(bucket)
        if self._stream:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        """Ends the threads; what lies in files is gone."""
        self._thread.shutdown()
        if self._files:
            self._files.close()

    def _masters(self, bucket: _Bucket, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Copies of a bucket's weights where they are to lie."""
        found = {name: self._weights[name].detach().to("cpu", dtype, copy=True) for name in bucket.names}
        if self._files:
            return dict(zip(found, self._files.add(bucket.number, list(found.values())), strict=True))
        return {name: weight.pin_memory() for name, weight in found.items()} if self._stream else found

    def _make_state(self, bucket: _Bucket) -> None:
        """The moments of a bucket before its first step: what an update that is left out makes."""
        self._guard(torch.ones(()))
        self._apply({name: torch.zeros_like(self.parameters[name]) for name in bucket.names})
        if self._files:
            views = self._files.add(bucket.number, [tensor for *_, tensor in self._moments(bucket)])
            for (name, kind, _), view in zip(self._moments(bucket), views, strict=True):
                self.optimizer.state[self.parameters[name]][kind] = view

    def _guard(self, left_out: Tensor) -> None:
        """Tells the optimizer whether the next update is left out (see train/optim/rule.py)."""
        vars(self.optimizer).update(found_inf=left_out, grad_scale=None)

    def _start(self, bucket: _Bucket) -> None:
        bucket.arrived = self._fetch(bucket)
        if not self.waits:
            bucket.done = self._thread.submit(self._update_for_now, bucket)

    def _fetch(self, bucket: _Bucket) -> _Arriving:
        """Begins to copy the gradients of a bucket to the host; those of a CPU are there."""
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
        """An update that may be taken back."""
        for name in bucket.names:
            parameter = self.parameters[name]
            moments = {kind: tensor.clone() for kind, tensor in self.optimizer.state[parameter].items()}
            bucket.before[name] = {"weight": parameter.detach().clone(), **moments}
        self._update(bucket, None)

    @torch.no_grad()
    def _take_back(self, bucket: _Bucket) -> None:
        """Makes everything as it was before an update that may be taken back; nothing where none was made."""
        for name, before in bucket.before.items():
            self.parameters[name].copy_(before.pop("weight"))
            for kind, tensor in before.items():
                self.optimizer.state[self.parameters[name]][kind].copy_(tensor)
        bucket.before = {}

    def _update_in_files(self, bucket: _Bucket, scale: Tensor | None) -> None:
        """Updates a bucket in memory and sends it back to its file."""
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
        """One step of the parameters that have a gradient here; the optimizer passes over the others."""
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
        """(parameter, kind, tensor) of all moments; counts of steps are no tensors to speak of."""
        for name in bucket.names:
            for kind, tensor in self.optimizer.state[self.parameters[name]].items():
                if tensor.dim():
                    yield name, kind, tensor


def communicates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update of `optimizer` asks other ranks, so that all must make it at the same moment. Ours declare it;
    torch's know of no ranks."""
    return getattr(optimizer, "communicates", False)
