"""Gradients travel in buckets: which parameters share one, when it starts, and in which order terms are added up."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

UNDER_WAY = 2
"""Most buckets that are under way where somebody waits for their ends: one that travels and one that is being filled.
What is under way holds memory, and what has not ended is not final."""

Final = Callable[[Collection[str]], None]
"""Told the names of parameters whose gradients are those of the global batch."""


class Awaited(Protocol):
    """What is complete when nothing is missing."""

    missing: set[str]


Bucket = TypeVar("Bucket", bound=Awaited)


def fused(parameters: Mapping[str, Tensor], bucket_bytes: int) -> list[list[str]]:
    """The names of `parameters` in buckets of at least `bucket_bytes`, last ones first: as gradients arrive.

    A bucket is full when it has reached that size, as in torch's DDP. With an upper bound instead, matrices of 17 MB
    travel alone under the default of 25 MiB: twice the messages, and 0.90 of DDP's speed instead of 1.01 (350M
    parameters, two ranks over sockets, benchmarks/nccl.py).
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

    The method's owner is held weakly: a weight keeps its hooks where Python's collector does not look, and an owner
    that holds the weight would never be freed, nor would its process groups and their threads.
    """
    method = weakref.WeakMethod(tell)

    def hook(_: Tensor) -> None:
        told = method()
        assert told is not None, "the gradient of a model whose executor is gone"
        told(name)

    weight.register_post_accumulate_grad_hook(hook)


class InOrder(Generic[Bucket]):
    """Starts what is complete, in the same order on every rank: a later bucket waits for the ones before it."""

    def __init__(self, start: Callable[[Bucket], None]) -> None:
        self._start = start
        self._waiting: list[Bucket] = []
        self._ordered = True

    def reset(self, buckets: Sequence[Bucket], *, ordered: bool = True) -> None:
        """All of `buckets` are to come; not `ordered` where they get complete in the same order on every rank."""
        self._waiting, self._ordered = list(buckets), ordered

    def look(self) -> None:
        """Something has arrived."""
        if self._ordered:
            while self._waiting and not self._waiting[0].missing:
                self._start(self._waiting.pop(0))
        else:
            for bucket in [bucket for bucket in self._waiting if not bucket.missing]:
                self._waiting.remove(bucket)
                self._start(bucket)

    def flush(self) -> None:
        """Nothing more arrives: starts the rest."""
        while self._waiting:
            self._start(self._waiting.pop(0))


class BinaryCounter:
    """Adds up terms as a balanced binary tree over their order, holding log2 n of them: as a counter carries bits."""

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
        """The sum; begins anew."""
        held = [level for level in self._levels if level is not None]
        self._levels = []
        return functools.reduce(lambda low, high: high + low, held)
