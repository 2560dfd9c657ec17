"""A profiler's trace -> where the time of a step goes. Plain JSON, no torch.

A trace is a list of spans in microseconds (Chrome's format). Those with our labels are parts of the step and lie beside
each other on the thread that trains; those that torch calls `ProfilerStep#N` are whole steps. What a GPU does is
counted to the part during which it was asked to: that thread waits in `backward` while others launch its kernels.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from ropewalk.parallel.labels import PREFIX, Part

OTHER = "other"
STEP = "ProfilerStep#"
OPERATOR, LABEL = "cpu_op", "user_annotation"
LAUNCHES = ("cuda_runtime", "cuda_driver")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of spans in a trace: torch's operators and labels, what asks a GPU to work, and its work."""
MOST_OPERATORS = 15

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of time, in microseconds."""

    name: str
    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTime:
    """What a part takes of a step, in milliseconds."""

    part: str
    calls: float
    """How often it comes in a step."""
    host_ms: float
    share: float
    """Of the whole step, by the host's clock."""
    device_ms: float | None
    """Work of the GPU that the part asked for; None without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTime:
    """What one of torch's operators takes of a step, without those that it calls."""

    name: str
    calls: float
    host_ms: float
    device_ms: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The mean step of a trace; its parts add up to it."""

    steps: int
    step_ms: float
    device_busy_ms: float | None
    """Time in which the GPU did something; None without one."""
    parts: tuple[PartTime, ...]
    operators: tuple[OperatorTime, ...]
    """Those that take most: of the GPU where there is one, else of the host."""


Work = Sequence[tuple[int, Span]]
"""What a GPU did, each with the number of the launch that asked for it."""
Key = TypeVar("Key", str, int)


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The whole steps of a trace, with what was asked for in them."""

    count: int
    first: float
    last: float
    """When the first of them begins and the last ends."""
    total: float
    """Their length."""
    thread: object
    """The thread that trains."""
    labels: Sequence[Span]
    """Our labels in their order."""
    asked: Sequence[Event]
    """All but the work of a GPU."""
    launches: Mapping[int, float]
    """When each piece of such work was asked for."""
    work: Work


def whole_steps(trace: Mapping[str, Any]) -> Steps:
    """The steps of a trace that has at least one."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    notes = sorted((event for event in events if event.get("cat") == LABEL), key=lambda event: event["ts"])
    labels = [span_of(event) for event in notes if event["name"].startswith(PREFIX)]
    steps = [event for event in notes if event["name"].startswith(STEP) and _is_whole(span_of(event), labels)]
    assert steps, "a trace without a step"
    first, last = steps[0]["ts"], span_of(steps[-1]).end
    # Work that was asked for before the first step is not of these steps, though it may be done in them.
    asked = [event for event in events if event.get("cat") not in DEVICE_WORK and first <= event["ts"] < last]
    launches = {event["args"]["correlation"]: event["ts"] for event in asked if event.get("cat") in LAUNCHES}
    return Steps(
        count=len(steps),
        first=first,
        last=last,
        total=sum(event["dur"] for event in steps),
        thread=steps[0].get("tid"),
        labels=[span for span in labels if first <= span.start < last],
        asked=asked,
        launches=launches,
        work=[
            (event["args"]["correlation"], span_of(event))
            for event in events
            if event.get("cat") in DEVICE_WORK and event["args"]["correlation"] in launches
        ],
    )


def step_time(trace: Mapping[str, Any]) -> StepTime:
    """The mean over the whole steps of a trace that has at least one."""
    steps = whole_steps(trace)
    return StepTime(
        steps=steps.count,
        step_ms=steps.total / steps.count / 1e3,
        device_busy_ms=_covered(span for _, span in steps.work) / steps.count / 1e3 if steps.work else None,
        parts=tuple(_parts(steps.labels, steps.launches, steps.work, steps=steps.count, total=steps.total)),
        operators=tuple(_operators(steps.asked, steps.work, steps=steps.count)),
    )


def span_of(event: Event) -> Span:
    """When and how long something was."""
    return Span(event["name"], event["ts"], event["ts"] + event["dur"])


def _is_whole(step: Span, labels: Sequence[Span]) -> bool:
    """Whether the step came as far as its update: a profiler stopped in the middle leaves a stump."""
    updates = (span for span in labels if span.name == PREFIX + "update")
    return any(step.start <= span.start < step.end for span in updates)


def _parts(
    labels: Sequence[Span], launches: Mapping[int, float], work: Work, *, steps: int, total: float
) -> Iterator[PartTime]:
    calls = Counter(span.name for span in labels)
    host = _sums((span.name, span.length) for span in labels)
    device = _sums((label_at(launches[key], labels), span.length) for key, span in work)
    calls[OTHER], host[OTHER] = steps, total - sum(host.values())
    for name in (*(PREFIX + part for part in get_args(Part)), OTHER):
        if name in host:
            yield PartTime(
                part=name.removeprefix(PREFIX),
                calls=calls[name] / steps,
                host_ms=host[name] / steps / 1e3,
                share=host[name] / total,
                device_ms=device.get(name, 0.0) / steps / 1e3 if work else None,
            )


def label_at(time: float, labels: Sequence[Span]) -> str:
    """The label in whose span `time` lies; `labels` are sorted and lie beside each other."""
    before = bisect.bisect_right(labels, time, key=lambda span: span.start) - 1
    return labels[before].name if before >= 0 and time < labels[before].end else OTHER


def _operators(events: Sequence[Event], work: Work, *, steps: int) -> list[OperatorTime]:
    calls: Counter[str] = Counter()
    host: dict[str, float] = {}
    device: dict[str, float] = {}
    done = _sums((key, span.length) for key, span in work)
    by_thread = sorted(
        (event for event in events if event.get("cat") in (OPERATOR, *LAUNCHES)),
        key=lambda event: (str(event["tid"]), event["ts"], -event["dur"]),
    )
    for _, thread in itertools.groupby(by_thread, key=lambda event: event["tid"]):
        open_spans: list[Span] = []
        for event in thread:
            span = span_of(event)
            while open_spans and open_spans[-1].end <= span.start:
                open_spans.pop()
            caller = open_spans[-1].name if open_spans else None
            if event["cat"] in LAUNCHES:
                if caller:
                    device[caller] = device.get(caller, 0.0) + done.get(event["args"]["correlation"], 0.0)
                continue
            calls[span.name] += 1
            host[span.name] = host.get(span.name, 0.0) + span.length
            if caller:
                host[caller] -= span.length
            open_spans.append(span)
    most = sorted(host, key=lambda name: -(device.get(name, 0.0) if work else host[name]))[:MOST_OPERATORS]
    return [
        OperatorTime(
            name=name,
            calls=calls[name] / steps,
            host_ms=host[name] / steps / 1e3,
            device_ms=device.get(name, 0.0) / steps / 1e3 if work else None,
        )
        for name in most
    ]


def _sums(items: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    sums: dict[Key, float] = {}
    for name, value in items:
        sums[name] = sums.get(name, 0.0) + value
    return sums


def _covered(spans: Iterable[Span]) -> float:
    """Length of the union of spans, which overlap where a GPU has several streams."""
    covered, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return covered
