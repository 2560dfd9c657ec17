"""Parameter groups, each with its own reducer over its own ranks.

All parameters of a dense model have the same ranks. Expert parameters have fewer replicas, and so a group of their own
with its own `Replicas` or `Shards`.
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
    """Parameters reduced over the same ranks."""

    names: frozenset[str]
    replicas: Group
    """Ranks with the same shards and different tokens: their gradients are summed."""
    shard: Group
    """Ranks that shard these parameters under ZeRO."""


class Reducer(Protocol):
    """Reduces the gradients of one group: parallel/data/replicas.py, parallel/data/shards.py."""

    parameters: dict[str, nn.Parameter]
    """Parameters that the optimizer updates."""
    placements: dict[str, Placement]

    def listen(self, final: Final) -> None:
        """Calls `final` as gradients become final in the backward pass of a step's last microbatch, or soon after.
        Exact sums are final only at `finish`, and not announced."""

    def begin(self) -> None:
        """Begins a step."""

    def microbatch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Context of the forward and backward pass of one microbatch."""

    def last_backward(self, names: Collection[str]) -> None:
        """Declares the gradients of `names` final after the backward pass that begins now: their buckets are reduced
        as soon as they are complete. For pipelines, whose stages finish their steps at different times; all
        data ranks must call in the same order.

        Not for weights whose gradients are computed outside autograd (`DeferredWeightGrads`): their hooks fire before
        the gradient exists. Use `complete` for these."""

    def complete(self, names: Collection[str]) -> None:
        """Marks the gradients of `names` as final, including those that autograd did not accumulate."""

    def finish(self) -> dict[str, Tensor]:
        """Returns this rank's shards of the gradients of the global batch, by name."""

    def publish(self, *, everything: bool = False) -> None:
        """Publishes updated parameters, or with `everything` all parameters, after these were set."""

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """In the block, all parameters are unsharded when used, and nothing is reduced."""

    def owed(self) -> dict[str, LocalShard]:
        """Returns the error-feedback state of gradient compression."""

    def owe(self, name: str, tensor: Tensor) -> None:
        """Restores one whole tensor of the state that `owed` returned."""


class Reducers:
    """Presents the reducers of all groups as one."""

    def __init__(
        self, groups: Sequence[ParameterGroup], make: Callable[[ParameterGroup], Reducer], *, order: Sequence[str]
    ) -> None:
        """`order` is that of the parameters in the model."""
        self._groups, self.each = groups, [make(group) for group in groups]
        held = {name: reducer for reducer in self.each for name in reducer.parameters}
        self.parameters = {name: held[name].parameters[name] for name in order}
        """Parameters that the optimizer updates."""
        self.placements = {name: held[name].placements[name] for name in order}

    def replicas_of(self, name: str) -> Group:
        """Returns the ranks that hold the same shard of this parameter, along the data axes."""
        return next(group.replicas for group in self._groups if name in group.names)

    def listen(self, final: Final) -> None:
        """As `Reducer.listen`."""
        for each in self.each:
            each.listen(final)

    def begin(self) -> None:
        """As `Reducer.begin`."""
        for each in self.each:
            each.begin()

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """As `Reducer.microbatch`."""
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
        """As `Reducer.finish`."""
        found = {name: gradient for each in self.each for name, gradient in each.finish().items()}
        return {name: found[name] for name in self.parameters if name in found}

    def publish(self, *, everything: bool = False) -> None:
        """As `Reducer.publish`."""
        for each in self.each:
            each.publish(everything=everything)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """As `Reducer.whole`."""
        with contextlib.ExitStack() as stack:
            for each in self.each:
                stack.enter_context(each.whole())
            yield

    def owed(self) -> dict[str, LocalShard]:
        """As `Reducer.owed`."""
        return {name: part for each in self.each for name, part in each.owed().items()}

    def owe(self, name: str, tensor: Tensor) -> None:
        """As `Reducer.owe`."""
        for each in self.each:
            each.owe(name, tensor)

    def _shares(self, names: Collection[str]) -> Iterator[tuple[Reducer, list[str]]]:
        for each in self.each:
            yield each, [name for name in names if name in each.parameters]
