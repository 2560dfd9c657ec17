"""Pipeline parallelism: executes one rank's list of actions (plan/schedules.py) and messages (plan/messages.py).

Stage s sends hidden states to s + 1 and receives their gradient. Every channel has its own communicator, created with
the mesh; plan/messages.py shows why this cannot hang on NCCL.

The first step of each shape sends its messages through the hosts (`relay`). A receive posted on a GPU is a spinning
kernel; the first launch of any other kernel loads its code, which waits until the GPU is idle. In that step all kernels
are loaded, compiled and tuned while nothing spins.
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
from ropewalk.model.protocol import Edge, Edges
from ropewalk.plan.messages import Channel, Compute, Message, Operation, Post, Programs, Release, Send, forward_lists
from ropewalk.plan.schedules import Action, Schedule

from .comm import Group, Pending


@dataclass(frozen=True, slots=True)
class Result:
    """Output of a stage for a microbatch."""

    outputs: tuple[Tensor, ...]
    """For the next stage; empty on the last."""
    loss: Tensor | None = None
    """Its loss terms: the main loss on the last stage, auxiliary losses on any. When scoring, the scores."""


class Work(Protocol):
    """The computation of this rank's stages."""

    def forward(self, action: Action, inputs: tuple[Tensor, ...]) -> Result:
        """Runs a stage's forward pass on a microbatch with the weights of `action.version`; the first stage has no
        inputs."""

    def edges(self, stage: int, microbatch: int) -> Edges:
        """Returns the tensors that `stage` receives and sends for this microbatch."""

    def empty(self, edge: Edge) -> Tensor:
        """Allocates a tensor to receive `edge`, or its gradient."""

    def begin_last_backward(self, stage: int) -> None:
        """Called before the action that makes the gradients of `stage` final."""

    def end_last_backward(self, stage: int) -> None:
        """Called when the gradients of `stage` are final."""


@dataclass(slots=True)
class _Live:
    """A microbatch between its forward and backward pass on a stage: the tensors with a gradient."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    loss: Tensor | None


class Pipeline:
    """Executes the schedules of consecutive `steps`, one per `run`. All ranks must create and run it.

    Messages and microbatches that a step's schedule leaves open are completed by a later step; microbatches are then
    numbered across steps.
    """

    def __init__(
        self,
        steps: Iterator[Schedule],
        *,
        stages: int,
        rank: int,
        channels: Mapping[Channel, Group],
        relay: Group | None = None,
        later: DeferredWeightGrads | None = None,
        timer: StageTimer | None = None,
    ) -> None:
        """`channels` are this rank's. `timer` measures the time of every stage."""
        self._steps, self._programs = steps, Programs(rank, stages=stages)
        self._messages = _Messages(channels, relay)
        self._live: dict[tuple[int, int], _Live] = {}
        self._timer = timer or StageTimer(torch.device("cpu"))
        self._later = later

    def run(self, work: Work, *, scale: Tensor | None = None, relayed: bool = False) -> list[Tensor]:
        """Runs the next step; returns this rank's loss terms, ordered by microbatch, then stage.

        Gradients are of the losses times `scale`. With `relayed`, messages use the relay, if there is one.
        """
        self._messages.begin(work, relayed=relayed)
        self._losses: dict[tuple[int, int], Tensor] = {}
        for operation in self._programs.step(next(self._steps)):
            if isinstance(operation, Compute):
                self._compute(work, operation, scale, reduces=not relayed)
            else:
                self._messages.do(operation)
        self._timer.settle()
        return [self._losses[key] for key in sorted(self._losses)]

    def _compute(self, work: Work, operation: Compute, scale: Tensor | None, *, reduces: bool) -> None:
        action = operation.action
        if reduces and operation.is_last:
            work.begin_last_backward(action.stage)
        if action.kind == "F":
            self._forward(work, operation)
        elif action.kind == "W":
            assert self._later is not None, "a schedule with W needs linear layers that can wait"
            with self._timer.counting(action.stage):
                self._later.run((action.stage, action.microbatch))
        else:
            self._backward(operation, scale)
        if reduces and operation.is_last:
            work.end_last_backward(action.stage)

    def _forward(self, work: Work, operation: Compute) -> None:
        action, inputs = operation.action, self._messages.take(operation.needs)
        edges = work.edges(action.stage, action.microbatch)
        for x, edge in zip(inputs, edges.inputs, strict=True):
            x.requires_grad_(edge.has_gradient)
        with self._timer.counting(action.stage):
            result = work.forward(action, inputs)
        if result.loss is not None:
            self._losses[action.microbatch, action.stage] = result.loss.detach()
        self._messages.offer([y.detach() for y in result.outputs])
        outputs = [y for y, edge in zip(result.outputs, edges.outputs, strict=True) if edge.has_gradient]
        self._live[action.stage, action.microbatch] = _Live(
            [x for x in inputs if x.requires_grad], outputs, result.loss
        )

    def _backward(self, operation: Compute, scale: Tensor | None) -> None:
        action = operation.action
        live = self._live.pop((action.stage, action.microbatch))
        ends: list[Tensor] = live.outputs
        gradients: list[Tensor | None] = list(self._messages.take(operation.needs))
        if live.loss is not None:
            ends, gradients = [*ends, live.loss], [*gradients, scale]
        with self._timer.counting(action.stage):
            if action.kind == "I" and self._later:
                with self._later.collecting((action.stage, action.microbatch)):
                    torch.autograd.backward(ends, gradients)
            else:
                torch.autograd.backward(ends, gradients)
        assert all(x.grad is not None for x in live.inputs), "the stage does not depend on all of its inputs"
        self._messages.offer([x.grad for x in live.inputs if x.grad is not None])


class StageTimer:
    """Measures the compute seconds of stages, excluding waits for messages; on a GPU with CUDA events, since the
    host runs ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[int, float] = {}
        self._queued: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def counting(self, stage: int) -> Iterator[None]:
        """Counts the time in the block for `stage`."""
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
        """Adds up finished GPU timings; does not wait."""
        while self._queued and self._queued[0][2].query():
            stage, begin, end = self._queued.popleft()
            self._add(stage, begin.elapsed_time(end) / 1e3)

    def take(self) -> dict[int, float]:
        """Returns seconds per stage since the last call; unfinished work counts in the next."""
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
    """Runs forward passes only; returns the last stage's scores per microbatch, nothing on other ranks."""
    messages = _Messages(channels, relay)
    messages.begin(work, relayed=relay is not None)
    found: dict[int, Tensor] = {}
    lists = forward_lists(ranks, microbatches=microbatches, chunks=chunks)
    for operation in Programs(rank, stages=ranks * chunks).step(lists):
        if not isinstance(operation, Compute):
            messages.do(operation)
            continue
        result = work.forward(operation.action, messages.take(operation.needs))
        if result.loss is not None:
            found[operation.action.microbatch] = result.loss
        messages.offer(result.outputs)
    return [found[number] for number in sorted(found)]


class _Messages:
    """Messages in flight to and from this rank, across steps."""

    def __init__(self, channels: Mapping[Channel, Group], relay: Group | None) -> None:
        self._channels, self._relay = channels, relay
        self._receiving: dict[Message, list[Pending]] = {}
        self._sending: dict[Message, list[Pending]] = {}
        self._offered: Sequence[Tensor] = ()
        self._step = 0
        self._relayed: set[int] = set()
        """Steps whose messages use the relay."""

    def begin(self, work: Work, *, relayed: bool) -> None:
        """Begins a step."""
        self._work, self._step = work, self._step + 1
        if relayed and self._relay:
            self._relayed.add(self._step)

    def do(self, operation: Operation) -> None:
        match operation:
            case Post(message, channel, steps_ago):
                self._receiving[message] = self._start_receive(message, channel, self._step - steps_ago)
            case Send(message, channel):
                self._sending[message] = self._start_send(channel)
            case Release(message):
                for pending in self._sending.pop(message):
                    pending.wait()

    def offer(self, tensors: Sequence[Tensor]) -> None:
        """Sets the tensors of the next `Send`."""
        self._offered = tensors

    def take(self, message: Message | None) -> tuple[Tensor, ...]:
        """Waits for a posted message and returns its tensors; none without a message."""
        return () if message is None else tuple(pending.wait() for pending in self._receiving.pop(message))

    def _start_receive(self, message: Message, channel: Channel, step: int) -> list[Pending]:
        edges = self._work.edges(message.stage, message.microbatch)
        wanted = [edge for edge in edges.outputs if edge.has_gradient] if message.backward else edges.inputs
        outs = [self._work.empty(edge) for edge in wanted]
        if step not in self._relayed:
            source = 0 if channel.source < channel.target else 1
            return [self._channels[channel].start_receive(out, source) for out in outs]
        return [self._start_relayed(out, channel) for out in outs]

    def _start_relayed(self, out: Tensor, channel: Channel) -> Pending:
        assert self._relay is not None
        landed = torch.empty_like(out, device="cpu")
        pending = self._relay.start_receive(landed, channel.source, tag=int(channel.backward))
        return Pending([pending], out, finish=lambda: _copy(out, landed))

    def _start_send(self, channel: Channel) -> list[Pending]:
        tensors, self._offered = self._offered, ()
        assert tensors, "nothing was computed to be sent"
        if self._relay and self._step in self._relayed:
            tag = int(channel.backward)
            return [self._relay.start_send(x.cpu(), channel.target, tag=tag) for x in tensors]
        target = 1 if channel.source < channel.target else 0
        return [self._channels[channel].start_send(x, target) for x in tensors]


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x)


class DeferredWeightGrads:
    """Zero-bubble weight gradients (Qi et al. 2023): the backward pass of a linear returns its input gradient at once
    and defers the weight gradient (W) until `run`."""

    def __init__(self) -> None:
        self._waiting: dict[Any, list[Callable[[], None]]] = {}
        self._key: Any = None

    def serve(self, model: nn.Module) -> None:
        """Makes the linears of `model` defer their weight gradients inside `collecting`."""
        for module in model.modules():
            if isinstance(module, Linear):
                module.product = self.product

    def collecting(self, key: Any) -> _Collecting:
        """Collects weight gradients deferred in this block for `run(key)`."""
        return _Collecting(self, key)

    def run(self, key: Any) -> None:
        """Computes the weight gradients deferred under `key`."""
        for work in self._waiting.pop(key, ()):
            work()

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns x W^T + b."""
        if not weight.requires_grad:
            return F.linear(x, weight, bias)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = _LaterProduct.apply(x, weight, self)
        return y if bias is None else y + bias.to(y.dtype)

    def leave(self, weight: Tensor, x: Tensor, gradient: Tensor) -> Tensor | None:
        """Returns the gradient of `weight`, or None when deferred."""
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
    # As the backward pass would: masters take the gradient over, reductions start.
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)
