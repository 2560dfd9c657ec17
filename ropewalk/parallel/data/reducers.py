"""Groups of parameters, each reduced over its own ranks.

All parameters of a dense model have the same ranks. Parameters of which ranks hold different ones, as experts, have
fewer replicas: a group of their own, with its own `Replicas` or `Shards`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from ..comm import Group
from ..placement import LocalShard, Placement
from .buckets import Final


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that are reduced over the same ranks."""

    names: frozenset[str]
    replicas: Group
    """The ranks that hold the same parts and see other tokens: their gradients add up."""
    shard: Group
    """The ranks that share these parameters under ZeRO."""


class Reducer(Protocol):
    """Brings the gradients of one group together: parallel/data/replicas.py, parallel/data/shards.py."""

    parameters: dict[str, nn.Parameter]
    """What the optimizer updates."""
    placements: dict[str, Placement]

    def listen(self, final: Final) -> None:
        """Calls `final` as gradients get final in the backward pass of a step's last microbatch, or soon after. Exact
        sums are final with `finish` only, and not announced."""

    def begin(self) -> None:
        """A step begins."""

    def microbatch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Forward and backward of one microbatch."""

    def last_backward(self, names: Collection[str]) -> None:
        """The backward pass that begins now makes the gradients of `names` final in this step: their buckets are
        reduced as soon as they are complete. For pipelines, whose stages end their steps one after the other; all data
        ranks must call in the same order.

        Not for weights whose gradients are computed outside of autograd (`DeferredWeightGrads`): their hooks are called
        with nothing added, before the gradient is there. For these, `complete` only."""

    def complete(self, names: Collection[str]) -> None:
        """The gradients of `names` are final, also of those that autograd did not accumulate."""

    def finish(self) -> dict[str, Tensor]:
        """This rank's parts of the gradients of the global batch, by name."""

    def publish(self, *, everything: bool = False) -> None:
        """The update is done, or with `everything` all parameters were set."""

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """In the block all parameters are whole when they are used, and nothing is reduced."""

    def owed(self) -> dict[str, LocalShard]:
        """What compression has not yet sent."""

    def owe(self, name: str, tensor: Tensor) -> None:
        """Takes over a whole tensor of what `owed` gave."""


class Reducers:
    """The reducers of all groups, as one."""

    def __init__(
        self, groups: Sequence[ParameterGroup], make: Callable[[ParameterGroup], Reducer], *, order: Sequence[str]
    ) -> None:
        """`order` is that of the parameters in the model."""
        self._groups, self.each = groups, [make(group) for group in groups]
        held = {name: reducer for reducer in self.each for name in reducer.parameters}
        self.parameters = {name: held[name].parameters[name] for name in order}
        """What the optimizer updates."""
        self.placements = {name: held[name].placements[name] for name in order}

    def replicas_of(self, name: str) -> Group:
        """The ranks that hold the same part of this parameter, along the data axes."""
        return next(group.replicas for group in self._groups if name in group.names)

    def listen(self, final: Final) -> None:
        """As `Reducer.listen`."""
        for each in self.each:
            each.listen(final)

    def begin(self) -> None:
        """A step begins."""
        for each in self.each:
            each.begin()

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Forward and backward of one microbatch."""
        with contextlib.ExitStack() as stack:
            for each in self.each:
                stack.enter_context(each.microbatch(last=last))
            yield

    def last_backward(self, names: Collection[str]) -> None:
        """As `Reducer.last_backward`."""
        for each, mine in self._shares(names):
            each.last_backward(mine)

    def complete(self, names: Collection[str]) -> None:
        """As `Reducer.complete`."""
        for each, mine in self._shares(names):
            each.complete(mine)

    def finish(self) -> dict[str, Tensor]:
        """This rank's parts of the gradients of the global batch, by name."""
        found = {name: gradient for each in self.each for name, gradient in each.finish().items()}
        return {name: found[name] for name in self.parameters if name in found}

    def publish(self, *, everything: bool = False) -> None:
        """The update is done, or with `everything` all parameters were set."""
        for each in self.each:
            each.publish(everything=everything)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """In the block all parameters are whole when they are used, and nothing is reduced."""
        with contextlib.ExitStack() as stack:
            for each in self.each:
                stack.enter_context(each.whole())
            yield

    def owed(self) -> dict[str, LocalShard]:
        """What compression has not yet sent."""
        return {name: part for each in self.each for name, part in each.owed().items()}

    def owe(self, name: str, tensor: Tensor) -> None:
        """Takes over a whole tensor of what `owed` gave."""
        for each in self.each:
            each.owe(name, tensor)

    def _shares(self, names: Collection[str]) -> Iterator[tuple[Reducer, list[str]]]:
        for each in self.each:
            yield each, [name for name in names if name in each.parameters]
