"""Wraps a user's optimizer: gradient reduction overlaps with the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ropewalk.base.errors import UserError

Start = Callable[[str, Tensor], Callable[[], Tensor]]
"""Starts to reduce a parameter's gradient; returns a function that waits for the result."""


def distribute(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None,
    start: Start,
    *,
    passes: int,
) -> Any:
    """Changes the class of `optimizer` to one that reduces before each step: schedulers and scripts keep the same
    object and state."""
    kind = type(optimizer)
    if hasattr(optimizer, "skip_synchronize"):
        raise UserError("horovod: this optimizer is distributed already")
    if "step" in vars(optimizer):
        raise UserError("horovod: a scheduler holds this optimizer already; make it after `DistributedOptimizer`")
    reduction = _Reduction(_named(optimizer, named_parameters), start, passes)

    class Distributed(kind):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            """Runs the `closure`, if any, waits for the reduced gradients, then updates."""
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            reduction.finish()
            super().step()
            return loss

        def zero_grad(self, set_to_none: bool = True) -> None:
            if reduction.handles:
                raise UserError("horovod: `zero_grad()` between `backward()` and `step()` would lose gradients")
            super().zero_grad(set_to_none=set_to_none)

        def synchronize(self) -> None:
            """Waits for the reduced gradients, for clipping before `step`; call `step` in `skip_synchronize()`."""
            reduction.finish()

        @contextmanager
        def skip_synchronize(self) -> Iterator[None]:
            """In the block, `step` does not wait for gradients."""
            reduction.skips = True
            try:
                yield
            finally:
                reduction.skips = False

    Distributed.__name__ = kind.__name__
    optimizer.__class__ = Distributed
    return optimizer


class _Reduction:
    """Tracks which gradients of a step are being reduced."""

    def __init__(self, named: dict[str, Tensor], start: Start, passes: int) -> None:
        self._named, self._start, self._passes = named, start, passes
        self._seen = dict.fromkeys(named, 0)
        self.handles: dict[str, Callable[[], Tensor]] = {}
        self.skips = False
        for name, parameter in named.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))

    def finish(self) -> None:
        """Waits for all reduced gradients. A parameter unused on this rank counts as 0."""
        if self.skips:
            return
        for name, parameter in self._named.items():
            if name not in self.handles:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._begin(name)
        for name, wait in self.handles.items():
            gradient = self._named[name].grad
            assert gradient is not None
            gradient.copy_(wait())
        self.handles = {}
        self._seen = dict.fromkeys(self._named, 0)

    def _arrived(self, name: str) -> None:
        if name in self.handles:
            raise UserError(
                f"horovod: the gradient of `{name}` was computed more often than `backward_passes_per_step` "
                f"({self._passes}) between two steps; raise it"
            )
        self._seen[name] += 1
        if self._seen[name] == self._passes:
            self._begin(name)

    def _begin(self, name: str) -> None:
        gradient = self._named[name].grad
        assert gradient is not None
        self.handles[name] = self._start(name, gradient)


def _named(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> dict[str, Tensor]:
    """Returns the trained parameters by names that agree on all ranks."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if named is None:
        return {str(place): parameter for place, parameter in enumerate(parameters)}
    listed = list(named)
    names = {id(parameter): name for name, parameter in listed}
    if len(names) < len(listed) or len({name for name, _ in listed}) < len(listed):
        raise UserError("horovod: `named_parameters` has a name or a parameter twice")
    missing = sum(id(parameter) not in names for parameter in parameters)
    if missing:
        raise UserError(
            f"horovod: {missing} parameters of the optimizer are not in `named_parameters`; "
            "pass `model.named_parameters()`"
        )
    return {names[id(parameter)]: parameter for parameter in parameters}
