"""Pipeline parallelism: executes one rank's list of actions (plan/schedules.py) and messages (plan/messages.py).

Stage s sends its hidden states to s + 1 and receives their gradient from there. Every channel has a communicator of its
own, made with the mesh; plan/messages.py says why this cannot hang on NCCL.

The first step of each shape sends its messages through the hosts (`relay`). A receive that is posted on a GPU is a
kernel that spins; the first launch of any other kernel loads its code, which waits until nothing runs. In that step all
kernels are loaded, compiled and tuned while nothing spins.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropewalk.model.modules import Linear
from ropewalk.plan.messages import Channel, Compute, Message, Operation, Post, Release, Send, forward_lists, program
from ropewalk.plan.schedules import Action

from .comm import Group, Pending


class Work(Protocol):
    """What the stages of this rank compute."""

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        """Hidden states for the next stage; of the last stage, the loss."""

    def like(self, microbatch: int) -> Tensor:
        """An empty tensor for hidden states of this microbatch."""

    def begin_last_backward(self, stage: int) -> None:
        """The next action makes the gradients of `stage` final."""

    def end_last_backward(self, stage: int) -> None:
        """The gradients of `stage` are final."""


@dataclass(slots=True)
class _Live:
    """A microbatch between its forward and its backward pass on a stage."""

    x: Tensor | None
    y: Tensor


class Pipeline:
    """Executes `lists`, the actions of every rank for one step. All ranks must make and run it."""

    def __init__(
        self,
        lists: Sequence[Sequence[Action]],
        *,
        stages: int,
        rank: int,
        channels: Mapping[Channel, Group],
        relay: Group | None = None,
        later: DeferredWeightGrads | None = None,
        busy: StageTimer | None = None,
    ) -> None:
        """`channels` are those of this rank. `busy` counts the time of every stage."""
        self._operations = program(lists, rank, stages=stages)
        self._stages, self._channels, self._relay = stages, channels, relay
        self._busy = busy or StageTimer(torch.device("cpu"))
        self._later = later

    def run(self, work: Work, *, scale: Tensor | None = None, relayed: bool = False) -> list[Tensor]:
        """All actions of a step; the losses of the last stage in the order of microbatches, elsewhere none.

        Gradients are those of the losses times `scale`. `relayed`: messages go through the hosts, if there is a relay.
        """
        self._messages = _Messages(self._channels, self._relay if relayed else None, work.like)
        self._live: dict[tuple[int, int], _Live] = {}
        self._losses: dict[int, Tensor] = {}
        for operation in self._operations:
            if isinstance(operation, Compute):
                self._compute(work, operation, scale, reduces=not relayed)
            else:
                self._messages.do(operation)
        self._busy.settle()
        return [self._losses[number] for number in sorted(self._losses)]

    def _compute(self, work: Work, operation: Compute, scale: Tensor | None, *, reduces: bool) -> None:
        action = operation.action
        if reduces and operation.is_last:
            work.begin_last_backward(action.stage)
        if action.kind == "F":
            self._forward(work, operation)
        elif action.kind == "W":
            assert self._later is not None, "a schedule with W needs linear layers that can wait"
            with self._busy.counting(action.stage):
                self._later.run((action.stage, action.microbatch))
        else:
            self._backward(operation, scale)
        if reduces and operation.is_last:
            work.end_last_backward(action.stage)

    def _forward(self, work: Work, operation: Compute) -> None:
        stage, microbatch = operation.action.stage, operation.action.microbatch
        x = self._messages.take(operation.needs).requires_grad_() if operation.needs else None
        with self._busy.counting(stage):
            y = work.forward(stage, microbatch, x)
        if stage == self._stages - 1:
            self._losses[microbatch] = y.detach()
        else:
            self._messages.offer(y.detach())
        self._live[stage, microbatch] = _Live(x, y)

    def _backward(self, operation: Compute, scale: Tensor | None) -> None:
        action = operation.action
        live = self._live.pop((action.stage, action.microbatch))
        gradient = self._messages.take(operation.needs) if operation.needs else scale
        with self._busy.counting(action.stage):
            if action.kind == "I" and self._later:
                with self._later.collecting((action.stage, action.microbatch)):
                    live.y.backward(gradient)
            else:
                live.y.backward(gradient)
        if live.x is not None:
            assert live.x.grad is not None, "nothing in this stage depends on its input"
            self._messages.offer(live.x.grad)


class StageTimer:
    """Seconds in which stages compute, without their waiting for messages; on a GPU by its own clock, since what is
    queued there takes no time of the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[int, float] = {}
        self._queued: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def counting(self, stage: int) -> Iterator[None]:
        """Time in the block is that of `stage`."""
        if self._on_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._queued.append((stage, begin, end))
        else:
            started = time.perf_counter()
            yield
            self._add(stage, time.perf_counter() - started)

    def settle(self) -> None:
        """Adds up what a GPU has done by now; does not wait for it."""
        while self._queued and self._queued[0][2].query():
            stage, begin, end = self._queued.popleft()
            self._add(stage, begin.elapsed_time(end) / 1e3)

    def take(self) -> dict[int, float]:
        """Seconds by stage since the last call, those of unfinished work left for the next one."""
        self.settle()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _add(self, stage: int, seconds: float) -> None:
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds


def run_forward(
    work: Work,
    microbatches: int,
    *,
    ranks: int,
    chunks: int,
    rank: int,
    channels: Mapping[Channel, Group],
    relay: Group | None = None,
) -> list[Tensor]:
    """Forward passes alone: what the last stage gives for each microbatch, elsewhere nothing."""
    stages = ranks * chunks
    messages = _Messages(channels, relay, work.like)
    found: dict[int, Tensor] = {}
    for operation in program(forward_lists(ranks, microbatches=microbatches, chunks=chunks), rank, stages=stages):
        if not isinstance(operation, Compute):
            messages.do(operation)
            continue
        action = operation.action
        y = work.forward(action.stage, action.microbatch, messages.take(operation.needs) if operation.needs else None)
        if action.stage == stages - 1:
            found[action.microbatch] = y
        else:
            messages.offer(y)
    return [found[number] for number in sorted(found)]


class _Messages:
    """The messages of one step: those on their way to this rank and those on their way from it."""

    def __init__(self, channels: Mapping[Channel, Group], relay: Group | None, like: Callable[[int], Tensor]) -> None:
        self._channels, self._relay, self._like = channels, relay, like
        self._receiving: dict[Message, Pending] = {}
        self._sending: dict[Message, Pending] = {}
        self._offered: Tensor | None = None

    def do(self, operation: Operation) -> None:
        match operation:
            case Post(message, channel):
                self._receiving[message] = self._start_receive(message, channel)
            case Send(message, channel):
                self._sending[message] = self._start_send(channel)
            case Release(message):
                self._sending.pop(message).wait()

    def offer(self, x: Tensor) -> None:
        """What the next `Send` sends."""
        self._offered = x

    def take(self, message: Message) -> Tensor:
        """A message that was posted, when it is there."""
        return self._receiving.pop(message).wait()

    def _start_receive(self, message: Message, channel: Channel) -> Pending:
        out = self._like(message.microbatch)
        if self._relay is None:
            return self._channels[channel].start_receive(out, 0 if channel.source < channel.target else 1)
        landed = torch.empty_like(out, device="cpu")
        pending = self._relay.start_receive(landed, channel.source, tag=int(channel.backward))
        return Pending([pending], out, finish=lambda: _copy(out, landed))

    def _start_send(self, channel: Channel) -> Pending:
        x, self._offered = self._offered, None
        assert x is not None, "nothing was computed to be sent"
        if self._relay is None:
            return self._channels[channel].start_send(x, 1 if channel.source < channel.target else 0)
        return self._relay.start_send(x.cpu(), channel.target, tag=int(channel.backward))


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x)


class DeferredWeightGrads:
    """Gradients of weights that are computed when there is time for them (Qi et al. 2023): the backward pass of a
    linear map gives its input's gradient at once and leaves the product for its weight to `run`."""

    def __init__(self) -> None:
        self._waiting: dict[Any, list[Callable[[], None]]] = {}
        self._key: Any = None

    def serve(self, model: nn.Module) -> None:
        """From now on the linear maps of `model` leave their products here while something is `collecting`."""
        for module in model.modules():
            if isinstance(module, Linear):
                module.product = self.product

    def collecting(self, key: Any) -> _Collecting:
        """What backward passes leave in this block is run by `run(key)`."""
        return _Collecting(self, key)

    def run(self, key: Any) -> None:
        """Computes what waits under `key`."""
        for work in self._waiting.pop(key, ()):
            work()

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b."""
        if not weight.requires_grad:
            return F.linear(x, weight, bias)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = _LaterProduct.apply(x, weight, self)
        return y if bias is None else y + bias.to(y.dtype)

    def leave(self, weight: Tensor, x: Tensor, gradient: Tensor) -> Tensor | None:
        """The gradient of `weight`, or None when it is to be computed later."""
        if self._key is None:
            return _weight_gradient(weight, x, gradient)
        work = functools.partial(_add_gradient, weight, x, gradient)
        self._waiting.setdefault(self._key, []).append(work)
        return None


class _Collecting:
    def __init__(self, later: DeferredWeightGrads, key: Any) -> None:
        self._later, self._new = later, key

    def __enter__(self) -> None:
        self._later._key = self._new

    def __exit__(self, *_: object) -> None:
        self._later._key = None


class _LaterProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, later: DeferredWeightGrads) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        return of_x, ctx.later.leave(weight, x, gradient), None


def _weight_gradient(weight: Tensor, x: Tensor, gradient: Tensor) -> Tensor:
    return (gradient.flatten(0, -2).mT @ x.flatten(0, -2)).to(weight.dtype)


@torch.no_grad()
def _add_gradient(weight: Tensor, x: Tensor, gradient: Tensor) -> None:
    added = _weight_gradient(weight, x, gradient)
    weight.grad = added.to(weight.grad_dtype) if weight.grad is None else weight.grad.add_(added)
    # As the backward pass would have: masters take the gradient over, reductions start.
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)
