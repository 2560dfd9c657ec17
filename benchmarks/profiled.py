"""Where the time of a contender's steps goes: a short table from torch's profiler.

Of a GPU: how long it computes, how long NCCL's kernels run, how much of that nothing else covers (exposed), and how
long it is idle. A kernel of NCCL also runs while it waits for the other rank.
"""

from __future__ import annotations

import collections
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ropewalk.config.quiet import quiet_profiler

STEPS, LINES, NAME = 3, 10, 88
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Spans = list[tuple[float, float]]


def table(step: Callable[[], object], *, device: torch.device) -> str:
    """The table of a few steps of this rank. All ranks must make as many steps at the same time."""
    quiet_profiler()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds, record_shapes=True, acc_events=True) as profiler:
        for _ in range(STEPS):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    return "\n".join([*_device_lines(events), *_host_lines(profiler.key_averages()), *_collective_lines(events)])


def _device_lines(events: list[dict[str, Any]]) -> Iterator[str]:
    work = [event for event in events if event.get("cat") in DEVICE]
    if not work:
        yield "  GPU: nothing in the trace"
        return
    nccl = _union(_span(event) for event in work if "nccl" in event["name"].lower())
    compute = _union(_span(event) for event in work if "nccl" not in event["name"].lower())
    either = _union([*nccl, *compute])
    whole = either[-1][1] - either[0][0]
    exposed = _length(either) - _length(compute)
    figures = {
        "a step": whole,
        "compute": _length(compute),
        "NCCL": _length(nccl),
        "NCCL exposed": exposed,
        "idle": whole - _length(either),
    }
    yield "  GPU, ms/step: " + ", ".join(f"{key} {value / STEPS / 1e3:.1f}" for key, value in figures.items())
    spent: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for event in work:
        spent[event["name"]] += event["dur"]
        calls[event["name"]] += 1
    for name, microseconds in spent.most_common(LINES):
        yield f"    {microseconds / STEPS / 1e3:8.2f} ms/step {calls[name] / STEPS:7.1f} calls  {name[:NAME]}"


def _host_lines(averages: Iterable[Any]) -> Iterator[str]:
    found = sorted(averages, key=lambda each: -each.self_cpu_time_total)
    yield f"  host, self ms/step: {sum(each.self_cpu_time_total for each in found) / STEPS / 1e3:.1f} in all threads"
    for each in found[:LINES]:
        spent, calls = each.self_cpu_time_total / STEPS / 1e3, each.count / STEPS
        yield f"    {spent:8.2f} ms/step {calls:7.1f} calls  {each.key[:NAME]}"


def _collective_lines(events: list[dict[str, Any]]) -> Iterator[str]:
    """Operators of torch.distributed with the numbers of the larger of what they take and give, the same for any
    backend. Of lists of tensors the trace does not tell the type."""
    calls: collections.Counter[str] = collections.Counter()
    numbers: collections.Counter[str] = collections.Counter()
    for event in events:
        if event["name"].startswith("c10d::"):
            details = event.get("args", {})
            shapes, types = details.get("Input Dims", []), details.get("Input type", [])
            largest, kind = max(zip(map(_count, shapes), types, strict=False), default=(0, ""))
            key = f"{event['name']} {kind}"
            calls[key] += 1
            numbers[key] += largest
    yield "  collectives"
    for key, count in calls.most_common():
        yield f"    {count / STEPS:7.1f} calls/step, {numbers[key] / STEPS / 1e6:10.2f} M numbers/step  {key}"


def _count(shape: Any) -> int:
    """Numbers of a tensor of this shape, or of a list of tensors."""
    if not shape:
        return 0
    if isinstance(shape[0], list):
        return sum(_count(each) for each in shape)
    return math.prod(int(side) for side in shape) if all(isinstance(side, int) for side in shape) else 0


def _span(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The same time as spans that do not overlap, in order."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
