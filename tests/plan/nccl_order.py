"""A simulator of NCCL's ordering rules: says whether ranks that issue these operations ever finish.

Rules, each seen on a GPU (docs/guides/pipelines.md):

1. A communicator executes the operations of a rank in the order in which the rank issued them, on one stream.
2. Nothing is buffered: a send and its receive run together or not at all, and occupy their streams until then. A
   collective runs when all members of its communicator have come to it.
3. An operation starts after all that the rank had put on its compute stream when it was issued.
4. A communicator that does not exist yet is created at its first use, and the host waits until its peers come, too.
5. The first launch of a kernel loads it, for which the host waits until no operation of the rank is spinning.

Hosts wait for their own stream before they relay what it computes, and for each other where they meet. Otherwise they
run ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ropewalk.plan.messages import Compute, Message, Operation, Post, Release, Send


@dataclass(frozen=True, slots=True)
class Create:
    """Both ranks of a communicator make it here."""

    communicator: Hashable
    peer: int


# Not frozen: a test makes hundreds of thousands of these.
@dataclass(slots=True)
class Issue:
    """Starts a send to, or a receive from, `peer`; `name` is the operation's on this rank."""

    kind: Literal["send", "receive"]
    communicator: Hashable
    peer: int
    name: Hashable


@dataclass(slots=True)
class Collective:
    """Starts `what` with all `members`; `name` is the operation's on this rank."""

    communicator: Hashable
    members: tuple[int, ...]
    what: Hashable
    name: Hashable


@dataclass(slots=True)
class Wait:
    """The compute stream goes on after the operation of this name."""

    name: Hashable


@dataclass(slots=True)
class Kernel:
    """A computation; `name` is loaded when it is launched for the first time."""

    name: Hashable


@dataclass(slots=True)
class Relay:
    """The host puts a message that its stream has computed where the other host takes it, or waits for one."""

    kind: Literal["put", "take"]
    name: Hashable


@dataclass(slots=True)
class Meet:
    """A collective of hosts: none goes on before all `members` are there."""

    name: Hashable
    members: tuple[int, ...]


HostOperation: TypeAlias = Create | Issue | Collective | Wait | Kernel | Relay | Meet


@dataclass(slots=True)
class _Running:
    """An operation on its stream; starts after `after` entries of the compute stream."""

    operation: Issue | Collective
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
    met: set[tuple[Hashable, int]] = field(default_factory=set)
    """Communicators that exist, and meetings, each with one of the others."""
    loaded: set[Hashable] = field(default_factory=set)

    def launch(self, operation: Wait | Kernel) -> None:
        self.compute.append(operation)
        self.issued += 1
        if type(operation) is Kernel:
            self.loaded.add(operation.name)
        self.run()

    def run(self) -> bool:
        """The compute stream goes as far as it can."""
        moved = False
        while self.compute:
            head = self.compute[0]
            if type(head) is Wait and head.name not in self.finished:
                break
            self.compute.popleft()
            self.done += 1
            moved = True
        return moved

    def started(self, communicator: Hashable) -> Issue | Collective | None:
        """The operation that occupies the stream of `communicator` now."""
        stream = self.streams.get(communicator)
        return stream[0].operation if stream and stream[0].after <= self.done else None

    def finish(self, communicator: Hashable) -> None:
        """What occupies the stream of `communicator` is over."""
        self.finished.add(self.streams[communicator].popleft().operation.name)
        self.run()

    def is_spinning(self) -> bool:
        return any(self.started(communicator) for communicator in self.streams)


class Nccl:
    """Ranks with their host programs; with `loads`, kernels are loaded at their first launch."""

    def __init__(self, programs: Sequence[Sequence[HostOperation]], *, loads: bool = False) -> None:
        self._ranks = [_Rank(deque(program), loads) for program in programs]
        self._relayed: set[Hashable] = set()

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
        while rank.host and self._may_go_on(number, rank, rank.host[0]):
            operation, moved = rank.host.popleft(), True
            kind = type(operation)
            if kind is Wait or kind is Kernel:
                rank.launch(operation)  # type: ignore[arg-type]
            elif kind is Issue or kind is Collective:
                stream = rank.streams.setdefault(operation.communicator, deque())  # type: ignore[union-attr]
                stream.append(_Running(operation, rank.issued))  # type: ignore[arg-type]
            elif isinstance(operation, Relay) and operation.kind == "put":
                self._relayed.add(operation.name)
        return moved

    def _may_go_on(self, number: int, rank: _Rank, operation: HostOperation) -> bool:
        match operation:
            case Wait():
                return True
            case Kernel(name):
                return not rank.loads or name in rank.loaded or not rank.is_spinning()
            case Relay("put", _):
                return not rank.compute
            case Relay("take", name):
                return name in self._relayed
            case Meet(name, members) | Collective(name, members):
                return self._meet(number, name, [member for member in members if member != number])
            case Issue(_, communicator, peer) | Create(communicator, peer):
                return (communicator, peer) in rank.met or self._meet(number, communicator, [peer])
        raise AssertionError(operation)

    def _meet(self, number: int, what: Hashable, others: Sequence[int]) -> bool:
        """Whether `others` are where they wait for this rank, too, or have been there."""
        ranks = self._ranks
        if not all((what, number) in ranks[n].met or _met_by(ranks[n], number) == what for n in others):
            return False
        for other in others:
            ranks[number].met.add((what, other))
            ranks[other].met.add((what, number))
        return True

    def _streams(self, number: int, rank: _Rank) -> bool:
        moved = rank.run()
        for communicator in rank.streams:
            while (mine := rank.started(communicator)) is not None:
                if not (self._send(number, mine) if isinstance(mine, Issue) else self._gather(mine)):
                    break
                moved = True
        return moved

    def _send(self, number: int, mine: Issue) -> bool:
        """Executes an operation of rank `number` with its peer, if that has come to it."""
        rank, peer = self._ranks[number], self._ranks[mine.peer]
        theirs = peer.started(mine.communicator)
        if not isinstance(theirs, Issue) or theirs.peer != number or theirs.kind == mine.kind:
            return False
        rank.finish(mine.communicator)
        peer.finish(mine.communicator)
        return True

    def _gather(self, mine: Collective) -> bool:
        """Executes a collective, if all members have come to it."""
        ranks = [self._ranks[member] for member in mine.members]
        for rank in ranks:
            theirs = rank.started(mine.communicator)
            if not isinstance(theirs, Collective) or theirs.what != mine.what:
                return False
        for rank in ranks:
            rank.finish(mine.communicator)
        return True


def _met_by(rank: _Rank, number: int) -> Hashable:
    """The communicator, or the meeting, at which the host of `rank` waits for rank `number`."""
    match rank.host[0] if rank.host else None:
        case Meet(name, members) | Collective(name, members):
            return name if number in members else None
        case Issue(_, communicator, peer) | Create(communicator, peer):
            return communicator if peer == number else None
    return None


def _waiting(rank: _Rank) -> str:
    if rank.host:
        return f"host before {rank.host[0]}"
    return f"stream before {rank.compute[0]}" if rank.compute else "a send that nobody receives"


def host_program(operations: Sequence[Operation], *, relayed: bool = False) -> list[HostOperation]:
    """What the host of a rank does for its program of messages, one communicator per channel. `relayed` messages pass
    through the hosts and occupy no stream."""
    found: list[HostOperation] = []
    for operation in operations:
        match operation:
            case Send(message) if relayed:
                found.append(Relay("put", message))
            case Post(message, channel) if not relayed:
                found.append(Issue("receive", channel, channel.source, ("in", message)))
            case Send(message, channel):
                found.append(Issue("send", channel, channel.target, ("out", message)))
            case Release(message) if not relayed:
                found.append(Wait(("out", message)))
            case Compute(action, needs, _):
                if needs is not None:
                    found.append(Relay("take", needs) if relayed else Wait(("in", needs)))
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
