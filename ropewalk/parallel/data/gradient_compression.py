"""Gradient compression for replicas: all-reduces gradients unchanged, rounded, or as low-rank factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ropewalk.base.seeds import seed_for
from ropewalk.plan.plan import Plan

from ..comm import Pending


class Summing(Protocol):
    """Sums a tensor over ranks, in place; a `Group` is one."""

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Starts the all-reduce; `x` must not be touched before its end."""


class Compressor(Protocol):
    """Sums a bucket of gradients over replicas. All replicas must start the same buckets in the same order, and wait
    for them in that order."""

    def start(self, bucket: Tensor, parts: Mapping[str, Tensor]) -> Pending:
        """Starts to sum flat `bucket` in place; `parts` are its views in the shapes of the parameters."""


def make_compressor(plan: Plan, summing: Summing, *, seed: int) -> Compressor:
    """Returns the compressor that `plan` selects."""
    match plan.gradient_compression:
        case "none":
            return Plain(summing)
        case "bf16":
            return RoundedGradients(summing, torch.bfloat16)
        case "fp16":
            return RoundedGradients(summing, torch.float16)
        case "powersgd":
            return PowerSgd(summing, rank=plan.powersgd_rank, seed=seed)


class Plain:
    """No compression."""

    def __init__(self, summing: Summing) -> None:
        self._summing = summing

    def start(self, bucket: Tensor, parts: Mapping[str, Tensor]) -> Pending:
        return self._summing.start_all_reduce(bucket)


class RoundedGradients:
    """Gradients rounded to `dtype` and summed in it: half the bytes of float32.

    Values beyond float16's range (65504) become infinite, so that the guard skips the step; values below 6e-8 become
    0. bfloat16 has the range of float32 and 8 bits of precision.
    """

    def __init__(self, summing: Summing, dtype: torch.dtype) -> None:
        self._summing, self._dtype = summing, dtype

    def start(self, bucket: Tensor, parts: Mapping[str, Tensor]) -> Pending:
        narrow = bucket.to(self._dtype)
        pending = self._summing.start_all_reduce(narrow)
        return Pending([pending], bucket, finish=lambda: _copy(bucket, narrow))


class PowerSgd:
    """PowerSGD (Vogels et al. 2019, algorithms 1 and 2): sends each matrix as two factors of `rank` columns.

    One step of power iteration, warm-started from the last, finds the columns: P spans the sum of the ranks' matrices
    times Q, and every matrix is projected on it. Error feedback adds the projection error to the same rank's next
    gradient: over any number of steps, applied updates and remaining errors sum to the gradients. Vectors, and matrices
    whose factors would be no smaller, are sent uncompressed. A x B becomes `rank` (A + B) numbers, in two messages per
    bucket. The second starts once the next bucket's first is sent, so that both overlap with the backward pass; only
    the last bucket's second message is exposed in `wait`. On a GPU the compute stream waits for the first message,
    which by then has had the time of a whole bucket.

    Needs a constant gradient scale: loss scaling would have to rescale the errors. Price: one float32 per parameter.
    """

    def __init__(self, summing: Summing, *, rank: int, seed: int) -> None:
        self._summing, self._rank, self._seed = summing, rank, seed
        self._newest: _LowRank | None = None
        self.state: dict[str, Tensor] = {}
        """Checkpointed state: `error/parameter`, per rank, and `factor/parameter`, the same on all ranks."""

    def start(self, bucket: Tensor, parts: Mapping[str, Tensor]) -> Pending:
        low = {name: part for name, part in parts.items() if self._is_worth_it(part)}
        plain = [part for name, part in parts.items() if name not in low]
        for name, part in low.items():
            if f"error/{name}" in self.state:
                part += self.state[f"error/{name}"]
        spans = [part @ self._factor(name, part) for name, part in low.items()]
        this = _LowRank(self._summing, low, plain, spans)
        before, self._newest = self._newest, this
        if before:
            before.send_factors()
        return Pending((), bucket, finish=lambda: self._finish(this))

    def _finish(self, this: _LowRank) -> None:
        if this is self._newest:
            self._newest = None
        for name, (basis, mine, factor) in this.factors().items():
            part = this.low[name]
            lost = part - basis @ mine.mT
            torch.matmul(basis, factor.mT, out=part)
            # The guard skips the step of an infinite gradient; its error is dropped.
            sound = torch.isfinite(factor).all()
            before = self.state.get(f"error/{name}", torch.zeros_like(lost))
            self.state[f"error/{name}"] = torch.where(sound, lost, before)
            self.state[f"factor/{name}"] = torch.where(sound, factor, self._factor(name, part))

    def _is_worth_it(self, part: Tensor) -> bool:
        return part.dim() == 2 and self._rank * sum(part.shape) < part.numel()

    def _factor(self, name: str, part: Tensor) -> Tensor:
        """Returns Q of the last step; the first is random, the same on all ranks."""
        if f"factor/{name}" not in self.state:
            # Drawn on the host: generators differ between devices.
            draw = torch.Generator().manual_seed(seed_for(self._seed, "powersgd", name))
            first = torch.randn(part.shape[1], self._rank, generator=draw, dtype=torch.float64)
            self.state[f"factor/{name}"] = first.to(part)
        return self.state[f"factor/{name}"]


class _LowRank:
    """A bucket in flight: its first message, `plain` gradients and `spans`, and its second, the factors."""

    def __init__(self, summing: Summing, low: Mapping[str, Tensor], plain: list[Tensor], spans: list[Tensor]) -> None:
        self._summing, self.low = summing, low
        self._whole = [*plain, *spans]
        self._spans = spans
        self._bases: list[Tensor] = []
        self._mine: list[Tensor] = []
        self._first: Pending | None = summing.start_all_reduce(_joined(self._whole))
        self._second: Pending | None = None

    def send_factors(self) -> None:
        """Waits for the first message and starts the second; no-op if started."""
        if self._first is None:
            return
        _part(self._whole, self._first.wait())
        self._first = None
        self._bases = [torch.linalg.qr(span).Q for span in self._spans]
        self._mine = [part.mT @ basis for part, basis in zip(self.low.values(), self._bases, strict=True)]
        if self._mine:
            self._second = self._summing.start_all_reduce(_joined(self._mine))

    def factors(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Returns (basis, this rank's factor, the sum of all ranks' factors) of each matrix."""
        self.send_factors()
        if self._second is None:
            return {}
        sums = [torch.empty_like(factor) for factor in self._mine]
        _part(sums, self._second.wait())
        return dict(zip(self.low, zip(self._bases, self._mine, sums, strict=True), strict=True))


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _part(tensors: list[Tensor], flat: Tensor) -> None:
    """Inverts `_joined`, in place."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x)
