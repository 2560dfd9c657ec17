"""Simulates a pipeline schedule (discrete events): the time of each action, and the idle time of ranks.

An action starts when its rank is free and its inputs have arrived. Sends are asynchronous and cost the sender no time;
messages of one pair of ranks and direction are serialized on their link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .schedules import PIPELINE_SCHEDULES, Action, Schedule, Shape, held_after, in_order, needs, receiver


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one stage for one microbatch."""

    forward: float
    input: float
    """Backward pass for the gradient of the stage's input."""
    weight: float
    """Backward pass for the gradients of the weights."""

    @property
    def backward(self) -> float:
        """The full backward pass."""
        return self.input + self.weight

    def of(self, action: Action) -> float:
        """Seconds of `action`."""
        return {"F": self.forward, "B": self.backward, "I": self.input, "W": self.weight}[action.kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The link between two pipeline ranks, and the size of a message."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    message_bytes: int = 0

    @property
    def occupied_s(self) -> float:
        """Seconds for which a message occupies the link."""
        return self.message_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Span:
    """Start and end of one action, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """Spans of each rank, in order."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end of any rank."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """Idle seconds of each rank during the makespan."""
        return tuple(self.makespan - sum(span.end - span.start for span in spans) for spans in self.ranks)

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time."""
        return sum(self.idle) / (self.makespan * len(self.ranks)) if self.makespan else 0.0

    def live(self, rank: int) -> list[tuple[float, int]]:
        """(seconds, live forward passes) at each change on `rank`.

        Activations live from the start of F, which allocates them, to the end of B or W.
        """
        spans = self.ranks[rank]
        counts = held_after([span.action for span in spans])
        return [
            (span.start if span.action.kind == "F" else span.end, held)
            for span, held in zip(spans, counts, strict=True)
            if span.action.kind != "I"
        ]

    @property
    def peak_live(self) -> tuple[int, ...]:
        """Maximum number of live forward passes per rank."""
        return tuple(max((held for _, held in self.live(rank)), default=0) for rank in range(len(self.ranks)))


def simulate(schedule: Schedule, times: Sequence[StageTimes], *, link: Link | None = None) -> Simulation:
    """Times a schedule; `times` are per stage, and messages take no time without a `link`."""
    stages, ranks = len(times), len(schedule)
    # Stages on the same rank exchange no messages.
    link = link if link and ranks > 1 else Link()
    ended: dict[Action, float] = {}
    arrived: dict[Action, float] = {}
    link_free: dict[tuple[int, int, bool], float] = {}
    spans: list[list[Span]] = [[] for _ in schedule]
    for rank, action in in_order(schedule, stages=stages):
        ready = (ended[need] if need.stage == action.stage else arrived[need] for need in needs(action, stages))
        start = max(spans[rank][-1].end if spans[rank] else 0.0, *ready, 0.0)
        end = start + times[action.stage].of(action)
        spans[rank].append(Span(action, start, end))
        ended[action] = end
        told = receiver(action, stages)
        if told is not None:
            channel = (rank, told % ranks, action.kind == "F")
            sent = max(end, link_free.get(channel, 0.0)) + link.occupied_s
            link_free[channel] = sent
            arrived[action] = sent + link.latency_s
    stuck = [own[len(spans[rank])] for rank, own in enumerate(schedule) if len(spans[rank]) < len(own)]
    assert not stuck, f"ranks wait for one another before {', '.join(map(str, stuck))}"
    return Simulation(tuple(map(tuple, spans)))


def equal_stages_bubble(kind: str, shape: Shape, times: StageTimes) -> float | None:
    """The bubble in closed form, for equal stages and instant messages; None where there is none.

    GPipe and 1F1B: (p - 1) / (m + p - 1); interleaved stages take 1/v of the time: (p - 1) / (v m + p - 1).
    """
    of = PIPELINE_SCHEDULES[kind].idle
    idle = of(shape, times.forward, times.input, times.weight) if of else None
    both = times.forward + times.backward
    return None if idle is None else idle / (shape.microbatches * shape.chunks * both + idle)
