"""When every action of a pipeline schedule runs, and how long ranks wait: a discrete-event simulation.

An action starts when its rank is free and what it needs has arrived. Sends cost the sender no time, as with
asynchronous sends; messages of one pair of ranks and direction follow one another on their link.
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
    """The part of the backward pass that gives the gradient of the stage's input."""
    weight: float
    """The part that gives the gradients of its weights."""

    @property
    def backward(self) -> float:
        """The whole backward pass."""
        return self.input + self.weight

    def of(self, action: Action) -> float:
        """Seconds that `action` takes."""
        return {"F": self.forward, "B": self.backward, "I": self.input, "W": self.weight}[action.kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The way between two pipeline ranks, and what one message on it carries."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    message_bytes: int = 0

    @property
    def occupied_s(self) -> float:
        """Seconds for which a message keeps the next one waiting."""
        return self.message_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Span:
    """One action and the seconds between which it runs, counted from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """The spans of every rank, in order."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end of any rank."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds that each rank waits during the makespan."""
        return tuple(self.makespan - sum(span.end - span.start for span in spans) for spans in self.ranks)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is waited away."""
        return sum(self.idle) / (self.makespan * len(self.ranks)) if self.makespan else 0.0

    def live(self, rank: int) -> list[tuple[float, int]]:
        """How many forward passes `rank` holds, from the moment on at which that changes.

        Activations are there from the start of F, which allocates them, to the end of B or W.
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
        """The most forward passes that each rank holds at once."""
        return tuple(max((held for _, held in self.live(rank)), default=0) for rank in range(len(self.ranks)))


def simulate(schedule: Schedule, times: Sequence[StageTimes], *, link: Link | None = None) -> Simulation:
    """The times of a schedule whose stages take `times`, one for each stage; messages take none without a `link`."""
    stages, ranks = len(times), len(schedule)
    # Stages of one rank have nothing to send.
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
    """The share of waiting in closed form, for equal stages and messages that take no time; None where there is none.

    Under GPipe and 1F1B it is (p - 1) / (m + p - 1); interleaved stages are a v-th as long: (p - 1) / (v m + p - 1).
    """
    of = PIPELINE_SCHEDULES[kind].idle
    idle = of(shape, times.forward, times.input, times.weight) if of else None
    both = times.forward + times.backward
    return None if idle is None else idle / (shape.microbatches * shape.chunks * both + idle)
