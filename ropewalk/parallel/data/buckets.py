"""Gradient buckets: which parameters share a bucket, when its reduction starts, and in which order terms are summed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

UNDER_WAY = 2
"""Maximum buckets in flight when final gradients are awaited: one in transit and one being filled. Buckets in flight
hold memory, and their gradients are not final."""

Final = Callable[[Collection[str]], None]
"""Called with the names of parameters whose gradients are those of the global batch."""


class Awaited(Protocol):
    """Complete when `missing` is empty."""

    missing: set[str]


Bucket = TypeVar("Bucket", bound=Awaited)


def fused(parameters: Mapping[str, Tensor], bucket_bytes: int) -> list[list[str]]:
    """Groups the names of `parameters` into buckets of at least `bucket_bytes`, last ones first: as gradients arrive.

    The size is a lower bound, as in torch's DDP. With an upper bound, matrices of 17 MB are sent alone under the
    default of 25 MiB: twice the messages, and 0.90 of DDP's speed instead of 1.01 (350M parameters, two ranks over
    sockets, benchmarks/nccl.py).
    """
    buckets: list[list[str]] = []
    held = bucket_bytes
    for name in reversed(list(parameters)):
        if not buckets or held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(name)
        held += parameters[name].numel() * parameters[name].element_size()
    return buckets


def when_accumulated(weight: Tensor, tell: Callable[[str], None], name: str) -> None:
    """Calls the method `tell` with `name` whenever the backward pass has completed the gradient of `weight`.

    The method's owner is held weakly: Python's collector does not see a weight's hooks, so an owner that holds the
    weight would never be freed, nor would its process groups and their threads.
    """
    method = weakref.WeakMethod(tell)

    def hook(_: Tensor) -> None:
        told = method()
        assert told is not None, "the gradient of a model whose executor is gone"
        told(name)

    weight.register_post_accumulate_grad_hook(hook)


class InOrder(Generic[Bucket]):
    """Starts complete buckets in the same order on every rank: a bucket waits for those before it."""

    def __init__(self, start: Callable[[Bucket], None]) -> None:
        self._start = start
        self._waiting: list[Bucket] = []
        self._ordered = True

    def reset(self, buckets: Sequence[Bucket], *, ordered: bool = True) -> None:
        """Resets to `buckets`; with `ordered=False`, they complete in the same order on every rank anyway."""
        self._waiting, self._ordered = list(buckets), ordered

    def look(self) -> None:
        """Starts the buckets that have become complete."""
        if self._ordered:
            while self._waiting and not self._waiting[0].missing:
                self._start(self._waiting.pop(0))
        else:
            for bucket in [bucket for bucket in self._waiting if not bucket.missing]:
                self._waiting.remove(bucket)
                self._start(bucket)

    def flush(self) -> None:
        """Starts all remaining buckets."""
        while self._waiting:
            self._start(self._waiting.pop(0))


class BinaryCounter:
    """Sums terms as a balanced binary tree over their order, holding log2 n partial sums, as a counter carries bits."""

    def __init__(self) -> None:
        self._levels: list[Tensor | None] = []

    def add(self, term: Tensor) -> None:
        for level, held in enumerate(self._levels):
            if held is None:
                self._levels[level] = term
                return
            term, self._levels[level] = held + term, None
        self._levels.append(term)

    def total(self) -> Tensor:
        """Returns the sum and resets."""
        held = [level for level in self._levels if level is not None]
        self._levels = []
        return functools.reduce(lambda low, high: high + low, held)
