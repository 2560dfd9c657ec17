"""Point-to-point messages of a pipeline schedule as data: when each rank posts, sends, waits and frees.

`program` turns a schedule into one list of operations per rank. `parallel/pipeline.py` executes it; the tests run the
same lists under NCCL's ordering rules: NCCL executes the operations of a communicator in stream order without
buffering, so a send ends only when its receive runs, and an operation waits for all issued before it on the same
communicator. Hence

- every `Channel` (sender, receiver, direction) has its own communicator, so that a receive never blocks a send, and
  both sides of a channel issue their operations in the same order;
- a receive is posted one action before the one that needs it: communication overlaps with computation;
- waits for sends are free: for hidden states when their gradient has come back (they are alive until then anyway), for
  gradients after `IN_FLIGHT` later sends. The schedule bounds memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .schedules import Action, Schedule, receiver, sender

IN_FLIGHT = 2
"""Gradients in flight per channel: one is sent while the next is computed."""


class Channel(NamedTuple):
    """All messages from one pipeline rank to another in one direction."""

    source: int
    target: int
    backward: bool


class Message(NamedTuple):
    """Hidden states that `stage` receives for a microbatch, or (`backward`) the gradient of those it sent."""

    backward: bool
    stage: int
    """The receiving stage."""
    microbatch: int


@dataclass(frozen=True, slots=True)
class Post:
    """Post a receive."""

    message: Message
    channel: Channel
    steps_ago: int = 0
    """Steps since the message was sent."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Wait for `needs`, then run `action`."""

    action: Action
    needs: Message | None
    is_last: bool
    """Whether the action completes its stage's gradients."""


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending the output of the preceding action."""

    message: Message
    channel: Channel


@dataclass(frozen=True, slots=True)
class Release:
    """Wait for a send and free its tensor."""

    message: Message


Operation: TypeAlias = Post | Compute | Send | Release


def channels(ranks: int, *, wraps: bool) -> list[list[Channel]]:
    """All channels of a pipeline, in rounds in which every rank occurs at most once: the order in which communicators
    are created. With `wraps` (several stages per rank) the last rank also sends to the first."""
    pairs = [(rank, rank + 1) for rank in range(ranks - 1)]
    rounds = [pairs[0::2], pairs[1::2]]
    if wraps and ranks > 1:
        rounds.append([(ranks - 1, 0)])
    found = []
    for each in rounds:
        if each:
            found.append([Channel(before, after, False) for before, after in each])
            found.append([Channel(after, before, True) for before, after in each])
    return found


def program(schedule: Schedule, rank: int, *, stages: int) -> list[Operation]:
    """Operations of `rank` in order, for a step that leaves no message in flight."""
    return Programs(rank, stages=stages).step(schedule)


class Programs:
    """Operations of `rank` in consecutive steps. A message sent in one step may be received in a later one; its sender
    does not wait for it until then."""

    def __init__(self, rank: int, *, stages: int) -> None:
        self._rank, self._stages = rank, stages
        self._arriving: dict[Channel, deque[tuple[Message, int]]] = {}
        """Messages to this rank not yet posted, with the steps since they were sent."""
        self._in_flight: dict[Channel, deque[Message]] = {}
        """Sends of this rank not yet waited for, except those whose gradient comes back in the same step."""
        self._latest: tuple[Schedule, list[Operation]] | None = None

    def step(self, schedule: Schedule) -> list[Operation]:
        """Operations of `rank` in the next step, in order."""
        opened = self._is_open
        if not opened and self._latest and self._latest[0] is schedule:
            return self._latest[1]
        operations = self._operations(schedule)
        self._latest = None if opened or self._is_open else (schedule, operations)
        return operations

    @property
    def _is_open(self) -> bool:
        return any(self._arriving.values()) or any(self._in_flight.values())

    def _operations(self, schedule: Schedule) -> list[Operation]:
        ranks, own, stages = len(schedule), schedule[self._rank], self._stages
        self._expect(schedule)
        received = {_needed(action, stages) for near in _neighbours(self._rank, ranks) for action in schedule[near]}
        forward = {(a.stage, a.microbatch) for a in own if a.kind == "F"}
        returns = {(a.stage, a.microbatch) for a in own if a.kind in ("B", "I")}
        final = {action.stage: place for place, action in enumerate(own) if action.kind != "F"}
        found: list[Operation] = []
        found += self._posts(own[0], ranks) if own else ()
        for place, action in enumerate(own):
            if place + 1 < len(own):
                found += self._posts(own[place + 1], ranks)
            if action.kind in ("B", "I") and action.stage + 1 < stages:
                sent = Message(False, action.stage + 1, action.microbatch)
                waiting = self._in_flight.get(Channel(self._rank, sent.stage % ranks, False), deque())
                if sent in waiting:  # from an earlier step
                    waiting.remove(sent)
                    found.append(Release(sent))
                elif (action.stage, action.microbatch) in forward:
                    found.append(Release(sent))
            found.append(Compute(action, _needed(action, stages), final.get(action.stage) == place))
            message = _made(action, stages)
            if message is not None:
                channel = Channel(self._rank, message.stage % ranks, message.backward)
                if message.backward or (action.stage, action.microbatch) not in returns:
                    waiting = self._in_flight.setdefault(channel, deque())
                    if len(waiting) >= IN_FLIGHT and waiting[0] in received:
                        found.append(Release(waiting.popleft()))
                    waiting.append(message)
                found.append(Send(message, channel))
        for waiting in self._in_flight.values():
            while waiting and waiting[0] in received:
                found.append(Release(waiting.popleft()))
        return found

    def _expect(self, schedule: Schedule) -> None:
        """Queues the messages that other ranks send to this one in the next step, in the order of the sender."""
        ranks = len(schedule)
        for channel, left in self._arriving.items():
            self._arriving[channel] = deque((message, ago + 1) for message, ago in left)
        for source in _neighbours(self._rank, ranks):
            for message in _messages(schedule[source], self._stages):
                if message.stage % ranks == self._rank:
                    channel = Channel(source, self._rank, message.backward)
                    self._arriving.setdefault(channel, deque()).append((message, 0))

    def _posts(self, action: Action, ranks: int) -> Iterator[Operation]:
        """Posts receives up to the one that `action` needs, in the order of the sender."""
        message, source = _needed(action, self._stages), sender(action, self._stages)
        if message is None or source is None:
            return
        channel = Channel(source % ranks, action.stage % ranks, message.backward)
        waiting = self._arriving[channel]
        while any(message == each for each, _ in waiting):
            each, steps_ago = waiting.popleft()
            yield Post(each, channel, steps_ago)


def forward_lists(ranks: int, *, microbatches: int, chunks: int) -> list[list[Action]]:
    """A forward-only schedule, for scoring: `ranks` microbatches go through the first chunk of every rank, then through
    the second, and so on. Running all of them through one chunk first would exceed the messages allowed in flight."""
    order = [
        (chunk, microbatch)
        for first in range(0, microbatches, ranks)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + ranks, microbatches))
    ]
    return [[Action("F", rank + chunk * ranks, m) for chunk, m in order] for rank in range(ranks)]


def _needed(action: Action, stages: int) -> Message | None:
    """The message that `action` waits for."""
    if sender(action, stages) is None:
        return None
    return Message(action.kind != "F", action.stage, action.microbatch)


def _made(action: Action, stages: int) -> Message | None:
    """The message that `action` produces."""
    target = receiver(action, stages)
    return None if target is None else Message(action.kind != "F", target, action.microbatch)


def _neighbours(rank: int, ranks: int) -> set[int]:
    """Ranks that exchange messages with `rank`."""
    return {(rank - 1) % ranks, (rank + 1) % ranks}


def _messages(actions: Sequence[Action], stages: int) -> Iterator[Message]:
    for action in actions:
        message = _made(action, stages)
        if message is not None:
            yield message
