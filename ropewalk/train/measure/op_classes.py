"""A profiler's trace -> what kind of work takes the time of a step. Plain JSON, as in trace.py.

An operator is of a kind by the label it runs under (`loss`, `update`), by its own name (`aten::mm`), or by that of the
operator that calls it. The backward pass has one label for everything: there, each node of autograd bears the number of
the operator that made it, and is of that one's kind. A kernel of a GPU is of the kind of the operator that launched it,
or, where that has none (compiled code), of the kind that its own name tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ropewalk.parallel.labels import PREFIX
from ropewalk.plan.roofline import KINDS, Kind

from .trace import LAUNCHES, OPERATOR, Event, Span, Steps, label_at, span_of, whole_steps

BY_LABEL: dict[str, Kind] = {
    PREFIX + "loss": "loss",
    PREFIX + "clip and guard": "optimizer",
    PREFIX + "update": "optimizer",
}
NODE = "autograd::engine::evaluate_function: "
"""What the name of a node of the backward pass begins with."""
NUMBER, MADE_ON = "Sequence number", "Fwd thread id"
"""What torch calls the number of an operator whose gradient is wanted, and of the node that it made; and the thread on
which the node was made, in a numbering of its own."""

ATTENTION = re.compile(
    r"scaled_dot_product|sdpa|flash|fmha|efficient_attention|flex_attention|attention_kernel|cpu_attention"
)
"""Operators and kernels of torch, cuDNN, FlashAttention, xFormers and model/cpu_attention.py."""
PRODUCTS = frozenset(
    {
        *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv"),
        *("_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "_int_mm"),
        *("mkldnn_linear", "_linear_pointwise"),
        "times",
    }
)
"""Operators that multiply matrices, without their name space; the last is that of model/matmul.py."""
PRODUCT_KERNEL = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk|triton_tem|matmul|_mm_kernel", re.IGNORECASE)
FUSED_KERNEL = re.compile(r"triton_(poi|per|red|for)_")
"""What the compiler makes of operators between products; the names list whatever was fused, products beside it too."""


def kind_times(trace: Mapping[str, Any]) -> dict[Kind, float]:
    """Milliseconds of the mean step by kind, which add up to it. Without a GPU nothing is `idle`: what the host does
    outside of operators is `other`."""
    steps = whole_steps(trace)
    operators = _Operators(steps)
    if steps.work:
        spent = _device_times(steps, operators.of_launch)
        rest: Kind = "idle"
    else:
        spent = _host_times(steps, operators.on_the_host)
        rest = "other"
    found: dict[Kind, float] = dict.fromkeys(KINDS, 0.0) | spent
    found[rest] += steps.total - sum(spent.values())
    return {kind: time / steps.count / 1e3 for kind, time in found.items()}


class _Operators:
    """The kinds of all operators of a trace, found by one pass in the order of time."""

    def __init__(self, steps: Steps) -> None:
        self.of_launch: dict[int, Kind | None] = {}
        """The kind of the operator that asked for each piece of a GPU's work; None: of no kind that is known."""
        self.on_the_host: list[tuple[Kind, Span]] = []
        """The outermost operators of a kind on the thread that trains."""
        self._steps = steps
        self._made: dict[tuple[bool, int], Kind | None] = {}
        """Kinds by the number of the node that an operator makes, and whether the thread that trains made it."""
        self._trainer: object = None
        """How nodes call that thread: as the first of them does, which is the loss's."""
        open_spans: dict[object, list[tuple[float, Kind | None]]] = {}
        ordered = (event for event in steps.asked if event.get("cat") in (OPERATOR, *LAUNCHES))
        for event in sorted(ordered, key=lambda event: (event["ts"], -event["dur"])):
            stack = open_spans.setdefault(event["tid"], [])
            while stack and stack[-1][0] <= event["ts"]:
                stack.pop()
            caller = stack[-1][1] if stack else None
            if event["cat"] in LAUNCHES:
                self.of_launch[event["args"]["correlation"]] = caller
                continue
            kind = self._kind(event, caller)
            if kind and not caller and event["tid"] == steps.thread:
                self.on_the_host.append((kind, span_of(event)))
            stack.append((event["ts"] + event["dur"], kind))

    def _kind(self, event: Event, caller: Kind | None) -> Kind | None:
        name, details = event["name"], event.get("args", {})
        number, made_on = details.get(NUMBER), details.get(MADE_ON)
        is_node = name.startswith(NODE)
        if is_node and number is not None and self._trainer is None:
            self._trainer = made_on
        kind = BY_LABEL.get(label_at(event["ts"], self._steps.labels)) or caller
        if kind is None and is_node and number is not None:
            kind = self._made.get((made_on == self._trainer, number))
            # A product's node also adds up and reshapes; the product in it has its own name.
            kind = None if kind == "gemm" else kind
        elif kind is None:
            kind = _named(name)
        if number is not None and not is_node:
            # Operators that make no node bear the number of the next that does: the last of them is the one.
            self._made[event["tid"] == self._steps.thread, number] = kind
        return kind


def _named(operator: str) -> Kind | None:
    if ATTENTION.search(operator):
        return "attention"
    return "gemm" if operator.rpartition("::")[2] in PRODUCTS else None


def _of_kernel(name: str) -> Kind:
    if FUSED_KERNEL.match(name):
        return "other"
    if ATTENTION.search(name):
        return "attention"
    return "gemm" if PRODUCT_KERNEL.search(name) else "other"


def _device_times(steps: Steps, of_launch: Mapping[int, Kind | None]) -> dict[Kind, float]:
    """Microseconds in which a GPU worked. Where two streams work at once, the time is the earlier one's."""
    found: dict[Kind, float] = {}
    reached = steps.first
    for key, span in sorted(steps.work, key=lambda item: item[1].start):
        end = min(span.end, steps.last)
        kind = BY_LABEL.get(label_at(steps.launches[key], steps.labels)) or of_launch[key] or _of_kernel(span.name)
        found[kind] = found.get(kind, 0.0) + max(0.0, end - max(span.start, reached))
        reached = max(reached, end)
    return found


def _host_times(steps: Steps, operators: Iterable[tuple[Kind, Span]]) -> dict[Kind, float]:
    """Microseconds of labels that name a kind, and of operators outside of these."""
    found: dict[Kind, float] = {}
    labelled = [(BY_LABEL[label.name], label) for label in steps.labels if label.name in BY_LABEL]
    outside = [(kind, span) for kind, span in operators if label_at(span.start, steps.labels) not in BY_LABEL]
    for kind, span in [*labelled, *outside]:
        found[kind] = found.get(kind, 0.0) + span.length
    return found
