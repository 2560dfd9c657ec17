"""Where the time of a step goes, read from a trace of torch's profiler (Chrome's format, microseconds). No torch.

Spans with our labels are parts of a step; they do not overlap on the training thread. Spans that torch calls
`ProfilerStep#N` are whole steps. A step's time is divided in three ways: by label, by operator and by op class.

GPU work counts for the label that was open on the training thread when the work was launched: that thread waits in
`backward` while others launch its kernels.

The op class of an operator follows from the label it runs under (`loss`, `update`), from its own name (`aten::mm`), or
from the operator that calls it. The backward pass has a single label: there, an autograd node carries the sequence
number of the operator that created it, and takes that operator's class. A GPU kernel takes the class of the operator
that launched it, or, without one (compiled code), the class that its name shows.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from ropewalk.parallel.labels import PREFIX, Part
from ropewalk.plan.roofline import KINDS, Kind

OTHER = "other"
STEP = "ProfilerStep#"
OPERATOR, LABEL = "cpu_op", "user_annotation"
LAUNCHES = ("cuda_runtime", "cuda_driver")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of spans in a trace: torch's operators and labels, launches of GPU work, and that work."""
MOST_OPERATORS = 15

BY_LABEL: dict[str, Kind] = {
    PREFIX + "loss": "loss",
    PREFIX + "clip and guard": "optimizer",
    PREFIX + "update": "optimizer",
}
NODE = "autograd::engine::evaluate_function: "
"""Prefix of an autograd node's name in the backward pass."""
NUMBER, MADE_ON = "Sequence number", "Fwd thread id"
"""Arguments of an operator that needs a gradient and of the autograd node it creates: a number that pairs them, and the
thread that created the node, in a numbering of its own."""
ATTENTION = re.compile(
    r"scaled_dot_product|sdpa|flash|fmha|efficient_attention|flex_attention|attention_kernel|cpu_attention"
)
"""Operators and kernels of torch, cuDNN, FlashAttention, xFormers and model/cpu_attention.py."""
MATMULS = frozenset(
    {
        *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv"),
        *("_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "_int_mm"),
        *("mkldnn_linear", "_linear_pointwise"),
        "times",
    }
)
"""Matmul operators, without their name space; the last is that of model/matmul.py."""
MATMUL_KERNEL = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk|triton_tem|matmul|_mm_kernel", re.IGNORECASE)
FUSED_KERNEL = re.compile(r"triton_(poi|per|red|for)_")
"""Compiled pointwise and reduction kernels; their names list all fused operators, matmuls beside them too."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A named interval, in microseconds."""

    name: str
    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTime:
    """Time of a labelled part, per step."""

    part: str
    calls: float
    host_ms: float
    share: float
    """Of the step, in host time."""
    device_ms: float | None
    """GPU work that the part launched; None without a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTime:
    """Time of one of torch's operators per step, without the operators that it calls."""

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
    """Time in which the GPU was busy; None without one."""
    parts: tuple[PartTime, ...]
    operators: tuple[OperatorTime, ...]
    """The operators that take the most time: of the GPU if there is one, else of the host."""


Work = Sequence[tuple[int, TraceSpan]]
"""GPU work, each with the correlation number of its launch."""
Key = TypeVar("Key", str, int)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedSteps:
    """The complete steps of a trace and what was launched in them."""

    count: int
    first: float
    last: float
    """Start of the first and end of the last step."""
    total: float
    """Sum of the steps' lengths."""
    thread: object
    """The training thread."""
    labels: Sequence[TraceSpan]
    """Our labels in order of time."""
    host: Sequence[Event]
    """Everything but GPU work."""
    launches: Mapping[int, float]
    """Launch time of each piece of GPU work."""
    work: Work


def step_time(trace: Mapping[str, Any]) -> StepTime:
    """The mean step by label and by operator; the trace has at least one complete step."""
    steps = traced_steps(trace)
    return StepTime(
        steps=steps.count,
        step_ms=steps.total / steps.count / 1e3,
        device_busy_ms=_covered(span for _, span in steps.work) / steps.count / 1e3 if steps.work else None,
        parts=tuple(_parts(steps)),
        operators=tuple(_operators(steps)),
    )


def kind_times(trace: Mapping[str, Any]) -> dict[Kind, float]:
    """The mean step by op class, in milliseconds. Without a GPU nothing is `idle`: host time outside operators is
    `other`."""
    steps = traced_steps(trace)
    operators = _OpClasses(steps)
    if steps.work:
        spent = _device_times(steps, operators.of_launch)
        rest: Kind = "idle"
    else:
        spent = _host_times(steps, operators.on_the_host)
        rest = "other"
    found: dict[Kind, float] = dict.fromkeys(KINDS, 0.0) | spent
    found[rest] += steps.total - sum(spent.values())
    return {kind: time / steps.count / 1e3 for kind, time in found.items()}


def traced_steps(trace: Mapping[str, Any]) -> TracedSteps:
    """The complete steps of a trace that has at least one."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    notes = sorted((event for event in events if event.get("cat") == LABEL), key=lambda event: event["ts"])
    labels = [_span(event) for event in notes if event["name"].startswith(PREFIX)]
    steps = [event for event in notes if event["name"].startswith(STEP) and _is_complete(_span(event), labels)]
    assert steps, "a trace without a step"
    first, last = steps[0]["ts"], _span(steps[-1]).end
    # GPU work launched before the first step is excluded, even if it runs during the steps.
    host = [event for event in events if event.get("cat") not in DEVICE_WORK and first <= event["ts"] < last]
    launches = {event["args"]["correlation"]: event["ts"] for event in host if event.get("cat") in LAUNCHES}
    return TracedSteps(
        count=len(steps),
        first=first,
        last=last,
        total=sum(event["dur"] for event in steps),
        thread=steps[0].get("tid"),
        labels=[span for span in labels if first <= span.start < last],
        host=host,
        launches=launches,
        work=[
            (event["args"]["correlation"], _span(event))
            for event in events
            if event.get("cat") in DEVICE_WORK and event["args"]["correlation"] in launches
        ],
    )


def _is_complete(step: TraceSpan, labels: Sequence[TraceSpan]) -> bool:
    """Whether the step reached its update; a profiler that is stopped in the middle of a step leaves a partial one."""
    updates = (span for span in labels if span.name == PREFIX + "update")
    return any(step.start <= span.start < step.end for span in updates)


def _parts(steps: TracedSteps) -> Iterator[PartTime]:
    calls = Counter(span.name for span in steps.labels)
    host = _sums((span.name, span.length) for span in steps.labels)
    device = _sums((_label_at(steps.launches[key], steps.labels), span.length) for key, span in steps.work)
    calls[OTHER], host[OTHER] = steps.count, steps.total - sum(host.values())
    for name in (*(PREFIX + part for part in get_args(Part)), OTHER):
        if name in host:
            yield PartTime(
                part=name.removeprefix(PREFIX),
                calls=calls[name] / steps.count,
                host_ms=host[name] / steps.count / 1e3,
                share=host[name] / steps.total,
                device_ms=device.get(name, 0.0) / steps.count / 1e3 if steps.work else None,
            )


def _operators(steps: TracedSteps) -> list[OperatorTime]:
    calls: Counter[str] = Counter()
    host: dict[str, float] = {}
    device: dict[str, float] = {}
    done = _sums((key, span.length) for key, span in steps.work)
    for event, caller in _with_callers(steps):
        if event["cat"] in LAUNCHES:
            if caller:
                device[caller["name"]] = device.get(caller["name"], 0.0) + done.get(event["args"]["correlation"], 0.0)
            continue
        calls[event["name"]] += 1
        host[event["name"]] = host.get(event["name"], 0.0) + event["dur"]
        if caller:
            host[caller["name"]] -= event["dur"]
    most = sorted(host, key=lambda name: -(device.get(name, 0.0) if steps.work else host[name]))[:MOST_OPERATORS]
    return [
        OperatorTime(
            name=name,
            calls=calls[name] / steps.count,
            host_ms=host[name] / steps.count / 1e3,
            device_ms=device.get(name, 0.0) / steps.count / 1e3 if steps.work else None,
        )
        for name in most
    ]


class _OpClasses:
    """The op classes of all operators of a trace, found in one pass in order of time."""

    def __init__(self, steps: TracedSteps) -> None:
        self.of_launch: dict[int, Kind | None] = {}
        """The class of the operator that launched each piece of GPU work; None if unknown."""
        self.on_the_host: list[tuple[Kind, TraceSpan]] = []
        """The outermost operators of a class on the training thread."""
        self._steps = steps
        self._created: dict[tuple[bool, int], Kind | None] = {}
        """Class by the sequence number of the created node, and whether the training thread created it."""
        self._trainer: object = None
        """The training thread in the nodes' numbering: that of the first node, which is the loss's."""
        kinds: dict[int, Kind | None] = {}
        for event, caller in _with_callers(steps):
            of_caller = kinds[id(caller)] if caller else None
            if event["cat"] in LAUNCHES:
                self.of_launch[event["args"]["correlation"]] = of_caller
                continue
            kind = kinds[id(event)] = self._classify(event, of_caller)
            if kind and not of_caller and event["tid"] == steps.thread:
                self.on_the_host.append((kind, _span(event)))

    def _classify(self, event: Event, of_caller: Kind | None) -> Kind | None:
        name, details = event["name"], event.get("args", {})
        number, made_on = details.get(NUMBER), details.get(MADE_ON)
        is_node = name.startswith(NODE)
        if is_node and number is not None and self._trainer is None:
            self._trainer = made_on
        kind = BY_LABEL.get(_label_at(event["ts"], self._steps.labels)) or of_caller
        if kind is None and is_node and number is not None:
            kind = self._created.get((made_on == self._trainer, number))
            # A matmul's node also sums and reshapes; the matmul inside it has a name of its own.
            kind = None if kind == "gemm" else kind
        elif kind is None:
            kind = _operator_class(name)
        if number is not None and not is_node:
            # Operators without a node carry the number of the next one that has a node: the last one wins.
            self._created[event["tid"] == self._steps.thread, number] = kind
        return kind


def _operator_class(name: str) -> Kind | None:
    if ATTENTION.search(name):
        return "attention"
    return "gemm" if name.rpartition("::")[2] in MATMULS else None


def _kernel_class(name: str) -> Kind:
    if FUSED_KERNEL.match(name):
        return "other"
    if ATTENTION.search(name):
        return "attention"
    return "gemm" if MATMUL_KERNEL.search(name) else "other"


def _device_times(steps: TracedSteps, of_launch: Mapping[int, Kind | None]) -> dict[Kind, float]:
    """Microseconds of GPU work by class. Where two streams overlap, the time counts for the one that started first."""
    found: dict[Kind, float] = {}
    reached = steps.first
    for key, span in sorted(steps.work, key=lambda item: item[1].start):
        end = min(span.end, steps.last)
        labelled = BY_LABEL.get(_label_at(steps.launches[key], steps.labels))
        kind = labelled or of_launch[key] or _kernel_class(span.name)
        found[kind] = found.get(kind, 0.0) + max(0.0, end - max(span.start, reached))
        reached = max(reached, end)
    return found


def _host_times(steps: TracedSteps, operators: Iterable[tuple[Kind, TraceSpan]]) -> dict[Kind, float]:
    """Microseconds by class: of labels that imply a class, and of operators outside these labels."""
    found: dict[Kind, float] = {}
    labelled = [(BY_LABEL[label.name], label) for label in steps.labels if label.name in BY_LABEL]
    outside = [(kind, span) for kind, span in operators if _label_at(span.start, steps.labels) not in BY_LABEL]
    for kind, span in [*labelled, *outside]:
        found[kind] = found.get(kind, 0.0) + span.length
    return found


def _with_callers(steps: TracedSteps) -> Iterator[tuple[Event, Event | None]]:
    """Operators and launches in order of time, each with the operator that calls it."""
    calls = (event for event in steps.host if event.get("cat") in (OPERATOR, *LAUNCHES))
    open_calls: dict[object, list[Event]] = {}
    for event in sorted(calls, key=lambda event: (event["ts"], -event["dur"])):
        stack = open_calls.setdefault(event["tid"], [])
        while stack and _span(stack[-1]).end <= event["ts"]:
            stack.pop()
        yield event, stack[-1] if stack else None
        if event["cat"] == OPERATOR:
            stack.append(event)


def _label_at(time: float, labels: Sequence[TraceSpan]) -> str:
    """The label that is open at `time`; `labels` are sorted and do not overlap."""
    before = bisect.bisect_right(labels, time, key=lambda span: span.start) - 1
    return labels[before].name if before >= 0 and time < labels[before].end else OTHER


def _span(event: Event) -> TraceSpan:
    return TraceSpan(event["name"], event["ts"], event["ts"] + event["dur"])


def _sums(items: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    sums: dict[Key, float] = {}
    for name, value in items:
        sums[name] = sums.get(name, 0.0) + value
    return sums


def _covered(spans: Iterable[TraceSpan]) -> float:
    """Length of the union of spans; GPU streams overlap."""
    covered, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return covered
