"""Pipeline parallelism: one rank's walk through its list of actions (plan/schedules.py).

Stage s sends its hidden states to s + 1 and receives their gradient from there. Messages need no labels: every rank
knows the lists of all, so it receives what a neighbour sends in the order in which that neighbour sends it, and keeps
what comes early. Hidden states and gradients travel by two groups, so that on a GPU neither waits behind the other.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropewalk.model.modules import Linear
from ropewalk.plan.schedules import Action

from .comm import Group, Pending


class Message(NamedTuple):
    """The hidden states that `stage` gets for a microbatch, or their gradients."""

    backward: bool
    stage: int
    """Who receives it."""
    microbatch: int


class Work(Protocol):
    """What the stages of this rank compute."""

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        """Hidden states for the next stage; of the last stage, the loss."""

    def like(self, microbatch: int) -> Tensor:
        """An empty tensor for hidden states of this microbatch."""


@dataclass(slots=True)
class _Live:
    """A microbatch between its forward and its backward pass on a stage."""

    x: Tensor | None
    y: Tensor


class Pipeline:
    """Interprets `lists`, the actions of every rank for one step."""

    def __init__(
        self,
        lists: Sequence[Sequence[Action]],
        *,
        stages: int,
        forward: Group,
        backward: Group,
        later: Later | None = None,
        busy: Busy | None = None,
    ) -> None:
        """`busy` counts the time of every stage."""
        self._busy = busy or Busy(torch.device("cpu"))
        self._lists, self._stages, self._rank = lists, stages, forward.rank
        self._groups = (forward, backward)
        self._later = later
        self.peak_live: dict[int, int] = {}
        """Most microbatches that a stage of this rank held at once."""

    def run(self, work: Work, *, scale: Tensor | None = None) -> list[Tensor]:
        """All actions of a step; the losses of the last stage in the order of microbatches, elsewhere none.

        Gradients are those of the losses times `scale`.
        """
        self._mail = _Mail(self._lists, stages=self._stages, rank=self._rank, groups=self._groups, like=work.like)
        self._live: dict[tuple[int, int], _Live] = {}
        self._losses: dict[int, Tensor] = {}
        for action in self._lists[self._rank]:
            if action.kind == "F":
                self._forward(work, action.stage, action.microbatch)
            elif action.kind == "W":
                assert self._later is not None, "a schedule with W needs products that wait"
                with self._busy.counting(action.stage):
                    self._later.run((action.stage, action.microbatch))
            else:
                self._backward(action, scale)
        self._mail.finish()
        self._busy.settle()
        return [self._losses[number] for number in sorted(self._losses)]

    def _forward(self, work: Work, stage: int, microbatch: int) -> None:
        x = self._mail.receive(Message(False, stage, microbatch)).requires_grad_() if stage else None
        with self._busy.counting(stage):
            y = work.forward(stage, microbatch, x)
        if stage == self._stages - 1:
            self._losses[microbatch] = y.detach()
        else:
            self._mail.send(Message(False, stage + 1, microbatch), y)
        self._live[stage, microbatch] = _Live(x, y)
        here = sum(1 for live_stage, _ in self._live if live_stage == stage)
        self.peak_live[stage] = max(self.peak_live.get(stage, 0), here)

    def _backward(self, action: Action, scale: Tensor | None) -> None:
        stage, microbatch = action.stage, action.microbatch
        live = self._live.pop((stage, microbatch))
        last = stage == self._stages - 1
        gradient = scale if last else self._mail.receive(Message(True, stage, microbatch))
        with self._busy.counting(stage):
            if action.kind == "I" and self._later:
                with self._later.collecting((stage, microbatch)):
                    live.y.backward(gradient)
            else:
                live.y.backward(gradient)
        if live.x is not None:
            assert live.x.grad is not None, "nothing in this stage depends on its input"
            self._mail.send(Message(True, stage - 1, microbatch), live.x.grad)


class Busy:
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


def run_forward(work: Work, microbatches: int, *, chunks: int, group: Group) -> list[Tensor]:
    """Forward passes alone: what the last stage gives for each microbatch, elsewhere nothing."""
    ranks, stages = group.size, group.size * chunks
    lists = [
        [Action("F", rank + chunk * ranks, m) for chunk in range(chunks) for m in range(microbatches)]
        for rank in range(ranks)
    ]
    mail = _Mail(lists, stages=stages, rank=group.rank, groups=(group, group), like=work.like)
    found = []
    for action in lists[group.rank]:
        x = mail.receive(Message(False, action.stage, action.microbatch)) if action.stage else None
        y = work.forward(action.stage, action.microbatch, x)
        if action.stage == stages - 1:
            found.append(y)
        else:
            mail.send(Message(False, action.stage + 1, action.microbatch), y)
    mail.finish()
    return found


class _Mail:
    """Messages between the stages of neighbours, each pair's in the sender's order."""

    def __init__(
        self,
        lists: Sequence[Sequence[Action]],
        *,
        stages: int,
        rank: int,
        groups: tuple[Group, Group],
        like: Callable[[int], Tensor],
    ) -> None:
        self._groups, self._like, self._ranks = groups, like, len(lists)
        self._sent: deque[Pending] = deque()
        self._arrived: dict[Message, Pending] = {}
        self._expected: dict[tuple[int, bool], deque[Message]] = {}
        self._source: dict[Message, int] = {}
        for sender, actions in enumerate(lists):
            for message in _messages(actions, stages):
                if message.stage % self._ranks == rank:
                    self._expected.setdefault((sender, message.backward), deque()).append(message)
                    self._source[message] = sender
        for channel in self._expected:
            self._post(channel)

    def send(self, message: Message, x: Tensor) -> None:
        group = self._groups[message.backward]
        self._sent.append(group.start_send(x.detach(), message.stage % self._ranks))

    def receive(self, message: Message) -> Tensor:
        channel = (self._source[message], message.backward)
        while message not in self._arrived:
            self._post(channel)
        x = self._arrived.pop(message).wait()
        self._post(channel)  # the next one may travel while this one is used
        return x

    def finish(self) -> None:
        """All that was sent has arrived."""
        while self._sent:
            self._sent.popleft().wait()

    def _post(self, channel: tuple[int, bool]) -> None:
        sender, backward = channel
        waiting = self._expected[channel]
        if waiting:
            message = waiting.popleft()
            out = self._like(message.microbatch)
            self._arrived[message] = self._groups[backward].start_receive(out, sender)


def _messages(actions: Sequence[Action], stages: int) -> list[Message]:
    """What a rank sends, in order."""
    sent = []
    for action in actions:
        if action.kind == "F" and action.stage < stages - 1:
            sent.append(Message(False, action.stage + 1, action.microbatch))
        if action.kind in ("B", "I") and action.stage > 0:
            sent.append(Message(True, action.stage - 1, action.microbatch))
    return sent


class Later:
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
    def __init__(self, later: Later, key: Any) -> None:
        self._later, self._new = later, key

    def __enter__(self) -> None:
        self._later._key = self._new

    def __exit__(self, *_: object) -> None:
        self._later._key = None


class _LaterProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, later: Later) -> Tensor:
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
    if hasattr(weight, "hand_over"):  # to a float32 master
        weight.hand_over(weight)
