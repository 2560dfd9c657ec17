"""A simulator of NCCL's ordering rules: says whether ranks that issue these operations ever finish.

Rules, each seen on a GPU (docs/guides/pipelines.md):

1. A communicator executes the operations of a rank in the order in which the rank issued them, on one stream.
2. Nothing is buffered: a send and its receive run together or not at all, and occupy their streams until then.
3. An operation starts after all that the rank had put on its compute stream when it was issued.
4. A communicator that does not exist yet is created at its first use, and the host waits until the peer comes, too.
5. The first launch of a kernel loads it, for which the host waits until no operation of the rank is spinning.

Hosts never wait for their streams otherwise: they run ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ropewalk.plan.messages import Compute, Message, Operation, Post, Release, Send


@dataclass(frozen=True, slots=True)
class Create:
    """Both ranks of a communicator make it here."""

    communicator: Hashable
    peer: int


@dataclass(frozen=True, slots=True)
class Issue:
    """Starts a send to, or a receive from, `peer`; `name` is the operation's on this rank."""

    kind: Literal["send", "receive"]
    communicator: Hashable
    peer: int
    name: Hashable


@dataclass(frozen=True, slots=True)
class Wait:
    """The compute stream goes on after the operation of this name."""

    name: Hashable


@dataclass(frozen=True, slots=True)
class Kernel:
    """A computation; `name` is loaded when it is launched for the first time."""

    name: Hashable


HostOperation = Create | Issue | Wait | Kernel


@dataclass(slots=True)
class _Running:
    """A send or receive on its stream; starts after `after` entries of the compute stream."""

    issue: Issue
    after: int


@dataclass(slots=True)
class _Rank:
    host: deque[HostOperation]
    loads: bool
    compute: deque[Wait | Kernel] = field(default_factory=deque)
    issued: int = 0
    """Entries ever put on the compute stream."""
    done: int = 0
    """Entries that have left it."""
    streams: dict[Hashable, deque[_Running]] = field(default_factory=dict)
    finished: set[Hashable] = field(default_factory=set)
    created: set[tuple[Hashable, int]] = field(default_factory=set)
    loaded: set[Hashable] = field(default_factory=set)

    def started(self, communicator: Hashable) -> Issue | None:
        """The operation that occupies the stream of `communicator` now."""
        stream = self.streams.get(communicator)
        return stream[0].issue if stream and stream[0].after <= self.done else None

    def is_spinning(self) -> bool:
        return any(self.started(communicator) for communicator in self.streams)


class Nccl:
    """Ranks with their host programs; with `loads`, kernels are loaded at their first launch."""

    def __init__(self, programs: Sequence[Sequence[HostOperation]], *, loads: bool = False) -> None:
        self._ranks = [_Rank(deque(program), loads) for program in programs]

    def stuck(self) -> dict[int, str]:
        """What each rank that never finishes waits for; empty when all finish."""
        moved = True
        while moved:
            moved = False
            for number, rank in enumerate(self._ranks):
                moved |= self._host(number, rank) | self._streams(number, rank)
        return {n: _waiting(r) for n, r in enumerate(self._ranks) if r.host or r.compute or any(r.streams.values())}

    def _host(self, number: int, rank: _Rank) -> bool:
        moved = False
        while rank.host and self._may_issue(number, rank, rank.host[0]):
            operation, moved = rank.host.popleft(), True
            if isinstance(operation, Issue):
                stream = rank.streams.setdefault(operation.communicator, deque())
                stream.append(_Running(operation, rank.issued))
            elif isinstance(operation, Wait | Kernel):
                rank.compute.append(operation)
                rank.issued += 1
                if isinstance(operation, Kernel):
                    rank.loaded.add(operation.name)
            self._compute(rank)
        return moved

    def _may_issue(self, number: int, rank: _Rank, operation: HostOperation) -> bool:
        if isinstance(operation, Kernel):
            return not rank.loads or operation.name in rank.loaded or not rank.is_spinning()
        if isinstance(operation, Wait):
            return True
        key = (operation.communicator, operation.peer)
        if key in rank.created:
            return True
        there = self._ranks[operation.peer]
        other = there.host[0] if there.host else None
        comes = (operation.communicator, number) in there.created or (
            isinstance(other, Create | Issue) and (other.communicator, other.peer) == (operation.communicator, number)
        )
        if comes:
            rank.created.add(key)
            there.created.add((operation.communicator, number))
        return comes

    def _compute(self, rank: _Rank) -> bool:
        moved = False
        while rank.compute:
            head = rank.compute[0]
            if isinstance(head, Wait) and head.name not in rank.finished:
                break
            rank.compute.popleft()
            rank.done += 1
            moved = True
        return moved

    def _streams(self, number: int, rank: _Rank) -> bool:
        moved = self._compute(rank)
        for communicator in rank.streams:
            while (mine := rank.started(communicator)) is not None:
                there = self._ranks[mine.peer]
                theirs = there.started(communicator)
                if theirs is None or theirs.peer != number or theirs.kind == mine.kind:
                    break
                for side in (rank, there):
                    side.finished.add(side.streams[communicator].popleft().issue.name)
                    self._compute(side)
                moved = True
        return moved


def _waiting(rank: _Rank) -> str:
    if rank.host:
        return f"host before {rank.host[0]}"
    return f"stream before {rank.compute[0]}" if rank.compute else "a send that nobody receives"


def host_program(operations: Sequence[Operation], *, relayed: bool = False) -> list[HostOperation]:
    """What the host of a rank does for its program of messages, one communicator per channel. `relayed` messages pass
    through the hosts: they occupy no stream, and are not seen here (rule 5 is all that they are for)."""
    found: list[HostOperation] = []
    for operation in operations:
        match operation:
            case Post(message, channel):
                found += [] if relayed else [Issue("receive", channel, channel.source, ("in", message))]
            case Send(message, channel):
                found += [] if relayed else [Issue("send", channel, channel.target, ("out", message))]
            case Release(message):
                found += [] if relayed else [Wait(("out", message))]
            case Compute(action, needs, _):
                found += [] if relayed or needs is None else [Wait(("in", needs))]
                found.append(Kernel((action.kind, action.stage)))
    return found


def unbatched_program(
    schedule: Sequence[Sequence[Any]], rank: int, *, stages: int, communicator: Literal["pair", "group"]
) -> list[HostOperation]:
    """The order of messages before there were channels (commit 35a25e0): one group for hidden states and one for
    gradients, the first receive of every neighbour posted at once, the next one with each that is taken, sends waited
    for at the end. In torch's lazy mode a group has a communicator for each pair, in eager mode one for all."""
    ranks = len(schedule)

    def sent_by(actions: Sequence[Any]) -> list[Message]:
        made = []
        for a in actions:
            if a.kind == "F" and a.stage < stages - 1:
                made.append(Message(False, a.stage + 1, a.microbatch))
            if a.kind in ("B", "I") and a.stage > 0:
                made.append(Message(True, a.stage - 1, a.microbatch))
        return made

    def key(backward: bool, peer: int) -> Hashable:
        return (backward, frozenset((rank, peer))) if communicator == "pair" else backward

    expected: dict[tuple[int, bool], deque[Message]] = {}
    for source, actions in enumerate(schedule):
        for message in sent_by(actions):
            if message.stage % ranks == rank:
                expected.setdefault((source, message.backward), deque()).append(message)
    found: list[HostOperation] = []
    posted: set[Message] = set()

    def post(channel: tuple[int, bool]) -> None:
        if expected[channel]:
            message = expected[channel].popleft()
            posted.add(message)
            found.append(Issue("receive", key(channel[1], channel[0]), channel[0], ("in", message)))

    for channel in expected:
        post(channel)
    sends = []
    for action in schedule[rank]:
        needs = None
        if action.kind == "F" and action.stage:
            needs = Message(False, action.stage, action.microbatch)
        if action.kind in ("B", "I") and action.stage < stages - 1:
            needs = Message(True, action.stage, action.microbatch)
        if needs:
            source = (action.stage + (1 if needs.backward else -1)) % ranks
            while needs not in posted:
                post((source, needs.backward))
            found.append(Wait(("in", needs)))
            post((source, needs.backward))
        found.append(Kernel((action.kind, action.stage)))
        for message in sent_by([action]):
            peer = message.stage % ranks
            found.append(Issue("send", key(message.backward, peer), peer, ("out", message)))
            sends.append(Wait(("out", message)))
    return [*found, *sends]
