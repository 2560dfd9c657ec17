"""Gradient compression for replicas: gradients are all-reduced as they are, rounded, or as low-rank factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ropewalk.base.seeds import seed_for
from ropewalk.plan.plan import Plan

from .comm import Pending


class Summing(Protocol):
    """Adds up a tensor over ranks, in place; a `Group` is one."""

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Begins; `x` is not to be touched before the end."""


class Compressor(Protocol):
    """How a bucket of gradients is added up over replicas. All of them must start the same buckets in the same order,
    and wait for them in that order."""

    def start(self, bucket: Tensor, parts: Mapping[str, Tensor]) -> Pending:
        """Begins to sum flat `bucket`, of which `parts` are views in the shapes of the parameters, in place."""


def make_compressor(plan: Plan, summing: Summing, *, seed: int) -> Compressor:
    """The compressor that `plan` asks for."""
    match plan.compression:
        case "none":
            return Plain(summing)
        case "bf16":
            return Rounded(summing, torch.bfloat16)
        case "fp16":
            return Rounded(summing, torch.float16)
        case "powersgd":
            return PowerSgd(summing, rank=plan.compression_rank, seed=seed)


class Plain:
    """Gradients as they are."""

    def __init__(self, summing: Summing) -> None:
        self._summing = summing

    def start(self, bucket: Tensor, parts: Mapping[str, Tensor]) -> Pending:
        return self._summing.start_all_reduce(bucket)


class Rounded:
    """Gradients rounded to `dtype`, and added up in it: half the bytes of float32.

    What exceeds float16 (65504) becomes infinite, so that the guard leaves the step out; what lies below 6e-8 becomes
    0. bfloat16 has the range of float32 and 8 bits of precision.
    """

    def __init__(self, summing: Summing, dtype: torch.dtype) -> None:
        self._summing, self._dtype = summing, dtype

    def start(self, bucket: Tensor, parts: Mapping[str, Tensor]) -> Pending:
        narrow = bucket.to(self._dtype)
        pending = self._summing.start_all_reduce(narrow)
        return Pending([pending], bucket, finish=lambda: _copy(bucket, narrow))


class PowerSgd:
    """Each matrix as the product of two factors of `rank` columns (Vogels et al. 2019, algorithms 1 and 2).

    One step of a power iteration, begun where the last one ended, finds the columns: P spans the sum of the ranks'
    matrices times Q, and every matrix is projected on it. What the projection loses is added to the next gradient of
    the rank that lost it, so that late is all it is: over any number of steps what was applied and what is still owed
    make up the gradients. Vectors, and matrices whose factors would be no smaller, travel as they are. A x B becomes
    `rank` (A + B) numbers, in two messages a bucket of which only the first overlaps with the backward pass.

    Takes gradients of one scale: loss scaling would have to rescale what is owed. Price: a float32 number a parameter.
    """

    def __init__(self, summing: Summing, *, rank: int, seed: int) -> None:
        self._summing, self._rank, self._seed = summing, rank, seed
        self.state: dict[str, Tensor] = {}
        """What a checkpoint keeps: `error/parameter`, of this rank alone, and `factor/parameter`, the same on all."""

    def start(self, bucket: Tensor, parts: Mapping[str, Tensor]) -> Pending:
        low = {name: part for name, part in parts.items() if self._is_worth_it(part)}
        plain = [part for name, part in parts.items() if name not in low]
        for name, part in low.items():
            if f"error/{name}" in self.state:
                part += self.state[f"error/{name}"]
        spans = [part @ self._factor(name, part) for name, part in low.items()]
        message = _joined([*plain, *spans])
        pending = self._summing.start_all_reduce(message)
        return Pending([pending], bucket, finish=lambda: self._finish(low, plain, spans, message))

    def _finish(self, low: Mapping[str, Tensor], plain: list[Tensor], spans: list[Tensor], message: Tensor) -> None:
        _part([*plain, *spans], message)
        bases = [torch.linalg.qr(span).Q for span in spans]
        factors = [part.mT @ basis for part, basis in zip(low.values(), bases, strict=True)]
        lost = [part - basis @ f.mT for part, basis, f in zip(low.values(), bases, factors, strict=True)]
        if not factors:
            return
        message = _joined(factors)
        self._summing.start_all_reduce(message).wait()
        _part(factors, message)
        for (name, part), basis, factor, error in zip(low.items(), bases, factors, lost, strict=True):
            torch.matmul(basis, factor.mT, out=part)
            # An infinite gradient makes the guard leave the step out; it is not owed.
            sound = torch.isfinite(factor).all()
            before = self.state.get(f"error/{name}", torch.zeros_like(error))
            self.state[f"error/{name}"] = torch.where(sound, error, before)
            self.state[f"factor/{name}"] = torch.where(sound, factor, self._factor(name, part))

    def _is_worth_it(self, part: Tensor) -> bool:
        return part.dim() == 2 and self._rank * sum(part.shape) < part.numel()

    def _factor(self, name: str, part: Tensor) -> Tensor:
        """Q of the last step; at first drawn, the same on all ranks."""
        if f"factor/{name}" not in self.state:
            # On the host: every device draws differently.
            draw = torch.Generator().manual_seed(seed_for(self._seed, "powersgd", name))
            first = torch.randn(part.shape[1], self._rank, generator=draw, dtype=torch.float64)
            self.state[f"factor/{name}"] = first.to(part)
        return self.state[f"factor/{name}"]


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _part(tensors: list[Tensor], flat: Tensor) -> None:
    """The inverse of `_joined`, in place."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x)
