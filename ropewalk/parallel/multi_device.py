"""Single-process data parallelism: one model copy and one thread per device.

Microbatches go to the devices round-robin; gradients are summed on the first device, which runs the one update, and the
new weights are copied to the others. Loss, norm, clipping and checkpoints are those of one device, except that the sum
over microbatches has another order.

Needs no launcher and no collectives, but is slower than processes (`parallel.replicate`): threads share Python's GIL,
the sum and the copies wait for the last device without overlap, and the first device holds the whole optimizer state.
torch.nn.DataParallel also copies the weights, but splits every microbatch and gathers outputs rather than gradients;
here devices synchronize once per step.

On a CPU the devices are threads over the same cores and memory: for tests.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from ropewalk.model.protocol import ModelStage, build_stage


class Movable(Protocol):
    """An object that can be moved to a device."""

    def to(self, device: torch.device) -> Self: ...


Item = TypeVar("Item", bound=Movable)


class Devices:
    """`model` on its own device, and copies on the `others`."""

    def __init__(self, model: ModelStage, others: Sequence[torch.device]) -> None:
        self._models = [model, *(_copy(model, device) for device in others)]
        self._places = [next(each.parameters()).device for each in self._models]
        self._threads = concurrent.futures.ThreadPoolExecutor(len(self._models), thread_name_prefix="device")

    def each(self, work: Callable[[ModelStage, Item], Tensor], items: Sequence[Item]) -> list[Tensor]:
        """Runs `work(model, item)` for every item, item i on device i mod n, devices in parallel. Returns results in
        order, on the first device."""
        gradients = torch.is_grad_enabled()  # thread-local in torch

        def share(place: int) -> list[Tensor]:
            model, device = self._models[place], self._places[place]
            with torch.set_grad_enabled(gradients), _at(device):
                return [work(model, item.to(device)) for item in items[place :: len(self._models)]]

        started = [self._threads.submit(share, place) for place in range(len(self._models))]
        concurrent.futures.wait(started)  # all of them, before raising the error of one
        shares = [future.result() for future in started]
        count = len(self._models)
        return [shares[number % count][number // count].to(self._places[0]) for number in range(len(items))]

    @torch.no_grad()
    def gather(self) -> None:
        """Sums the other devices' gradients into the first's, in order, and clears them."""
        first, *others = (dict(model.named_parameters()) for model in self._models)
        for name, parameter in first.items():
            for other in others:
                gradient, other[name].grad = other[name].grad, None
                if gradient is not None:
                    moved = gradient.to(parameter.device)
                    parameter.grad = moved if parameter.grad is None else parameter.grad.add_(moved)

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the first device's weights to the others."""
        first, *others = self._models
        for other in others:
            for mine, theirs in zip(first.parameters(), other.parameters(), strict=True):
                theirs.copy_(mine, non_blocking=True)


def other_devices(device: torch.device, count: int) -> list[torch.device]:
    """Returns the machine's first `count` devices without `device`."""
    if device.type == "cpu":
        return [device] * (count - 1)
    return [torch.device(device.type, number) for number in range(1, count)]


def _copy(model: ModelStage, device: torch.device) -> ModelStage:
    with torch.device("meta"):
        made = build_stage(model.spec)
    made = made.to(next(model.parameters()).dtype).to_empty(device=device)
    made.run_block = model.run_block
    made.load_state_dict(model.state_dict())
    for mine, theirs in zip(model.parameters(), made.parameters(), strict=True):
        theirs.requires_grad_(mine.requires_grad)
    return made


def _at(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes `device` the default for kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
