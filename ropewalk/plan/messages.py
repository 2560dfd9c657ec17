"""Point-to-point messages of a pipeline schedule as data: when each rank posts, sends, waits and frees.

`program` turns a schedule into one list of operations per rank. `parallel/pipeline.py` executes it; the tests run the
same lists under NCCL's ordering rules. The rules that it is written for: NCCL executes the operations of a communicator
in stream order and buffers nothing, so a send ends only when its receive runs, and an operation waits behind all that
were issued before it on the same communicator. Hence

- every `Channel` (sender, receiver, direction) has a communicator of its own, so that a receive never stands in front
  of a send, and the two sides of a channel issue their operations in the same order;
- a receive is posted one action before the one that needs it: the message travels while the rank computes;
- sends are waited for where that costs nothing: hidden states when their gradient has come back (they are alive until
  then anyway), gradients when `IN_FLIGHT` others were sent after them. Memory is bounded by the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .schedules import Action, Schedule, receiver, sender

IN_FLIGHT = 2
"""Gradients per channel that may be on their way: one that travels while the next one is computed."""


class Channel(NamedTuple):
    """All messages of one direction from one pipeline rank to another."""

    source: int
    target: int
    backward: bool


class Message(NamedTuple):
    """The hidden states that `stage` receives for a microbatch, or (`backward`) the gradient of those that it sent."""

    backward: bool
    stage: int
    """The stage that receives it."""
    microbatch: int


@dataclass(frozen=True, slots=True)
class Post:
    """Start to receive."""

    message: Message
    channel: Channel
    steps_ago: int = 0
    """Steps since the one in which the message was sent."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Wait for `needs`, then do `action`."""

    action: Action
    needs: Message | None
    is_last: bool
    """Whether the gradients of the action's stage are complete after it."""


@dataclass(frozen=True, slots=True)
class Send:
    """Start to send what the action before has computed."""

    message: Message
    channel: Channel


@dataclass(frozen=True, slots=True)
class Release:
    """Wait for a send and free its tensor."""

    message: Message


Operation: TypeAlias = Post | Compute | Send | Release


def channels(ranks: int, *, wraps: bool) -> list[list[Channel]]:
    """All channels of a pipeline in rounds, in which every rank occurs at most once: the order in which communicators
    are created. With `wraps` (several stages per rank) the last rank sends to the first, too."""
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
    """What `rank` does in a step that leaves nothing open, in order."""
    return Programs(rank, stages=stages).step(schedule)


class Programs:
    """What `rank` does in consecutive steps. A message that is sent in one step may be received in a later one; until
    then its sender does not wait for it."""

    def __init__(self, rank: int, *, stages: int) -> None:
        self._rank, self._stages = rank, stages
        self._arriving: dict[Channel, deque[tuple[Message, int]]] = {}
        """Messages to this rank that it has not posted, with the steps since they were sent."""
        self._in_flight: dict[Channel, deque[Message]] = {}
        """Messages of this rank that it has not waited for, unless their gradient comes back in the same step."""
        self._latest: tuple[Schedule, list[Operation]] | None = None

    def step(self, schedule: Schedule) -> list[Operation]:
        """What `rank` does in the next step, in order."""
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
                if sent in waiting:  # since an earlier step
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
        """Adds the messages that the others send to this rank in the next step, in the order of the sender."""
        ranks = len(schedule)
        for channel, left in self._arriving.items():
            self._arriving[channel] = deque((message, ago + 1) for message, ago in left)
        for source in _neighbours(self._rank, ranks):
            for message in _messages(schedule[source], self._stages):
                if message.stage % ranks == self._rank:
                    channel = Channel(source, self._rank, message.backward)
                    self._arriving.setdefault(channel, deque()).append((message, 0))

    def _posts(self, action: Action, ranks: int) -> Iterator[Operation]:
        """Receives up to the one that `action` needs, in the order in which the sender sends them."""
        message, source = _needed(action, self._stages), sender(action, self._stages)
        if message is None or source is None:
            return
        channel = Channel(source % ranks, action.stage % ranks, message.backward)
        waiting = self._arriving[channel]
        while any(message == each for each, _ in waiting):
            each, steps_ago = waiting.popleft()
            yield Post(each, channel, steps_ago)


def forward_lists(ranks: int, *, microbatches: int, chunks: int) -> list[list[Action]]:
    """A schedule of forward passes alone, for scoring: `ranks` microbatches go through the first chunk of every rank,
    then through the second, and so on. All of them through one chunk first would fill what may be in flight."""
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
    """The message that `action` computes."""
    target = receiver(action, stages)
    return None if target is None else Message(action.kind != "F", target, action.microbatch)


def _neighbours(rank: int, ranks: int) -> set[int]:
    """The ranks that `rank` exchanges messages with."""
    return {(rank - 1) % ranks, (rank + 1) % ranks}


def _messages(actions: Sequence[Action], stages: int) -> Iterator[Message]:
    for action in actions:
        message = _made(action, stages)
        if message is not None:
            yield message
