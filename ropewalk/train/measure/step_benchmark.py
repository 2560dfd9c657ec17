"""Steps by themselves, on random rows: how long one takes, and what kinds of work it consists of.

Nothing is read and nothing kept: the model has fresh weights, and no run directory is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from ropewalk.base.files import read_json
from ropewalk.config.quiet import quiet_profiler
from ropewalk.config.ranks import ranks
from ropewalk.load.batch import Batch
from ropewalk.model.decoder import Decoder
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import apply
from ropewalk.parallel.compat import deterministic, peak_memory_bytes
from ropewalk.parallel.labels import label
from ropewalk.parallel.mesh import pick_device
from ropewalk.plan.forecast import Precision
from ropewalk.plan.plan import PhasePlan, Plan
from ropewalk.plan.roofline import Kind

from ..config import Optimizer, Train
from ..optim.optimizers import make_optimizer
from .ceilings import measure_ceilings, nominal_bytes
from .op_classes import kind_times
from .peak_flops import peak_flops

WARMUP_STEPS = 3
"""Steps that do not count: they ask the system for memory, a GPU for its libraries and a compiler for kernels."""
PROFILED_STEPS = 3
LEARNING_RATE = 1e-4
DOCUMENT_TOKENS = 500
"""Of a web page, more or less."""

Step = Callable[[], Tensor]
"""Makes one step and returns its loss, without waiting for the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """What was measured."""

    steps: int
    step_ms: float
    """Median."""
    spread: float
    """Half of the distance between the quartiles, over the median."""
    kinds: dict[Kind, float]
    """Milliseconds of each kind of work, which add up to `step_ms`."""
    profiled_ms: float
    """A step under the profiler, which slows the host down."""
    memory_bytes: int
    """The most that was used: allocated on a GPU, resident in this process on a CPU."""
    loss: float


def measure_phase(planned: PhasePlan, train: Train, *, seed: int, steps: int) -> dict[str, Any]:
    """What `device_figures` and `measure_steps` find for a phase of a recipe, as plain values."""
    if train.threads:
        torch.set_num_threads(train.threads)
    device = pick_device(planned.plan, ranks())
    figures = device_figures(device, planned.plan.precision)
    step = own_step(
        planned.spec,
        planned.plan,
        device=device,
        optimizer=train.optimizer,
        clip_norm=train.clip_norm,
        trained=planned.trained,
        seed=seed,
    )
    return figures | dataclasses.asdict(measure_steps(step, device=device, steps=steps))


def device_figures(device: torch.device, precision: Precision) -> dict[str, Any]:
    """Ceilings as measured now, and as the data sheet has them where one is known."""
    ceilings = measure_ceilings(device, precision)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        threads = torch.get_num_threads()
        name = f"{threads} {'thread' if threads == 1 else 'threads'}"
    return {
        "device": str(device),
        "device_name": name,
        "torch": torch.__version__,
        "ceilings": dataclasses.asdict(ceilings),
        "nominal_flops": peak_flops(device, precision) if device.type == "cuda" else None,
        "nominal_bytes": nominal_bytes(device),
    }


def measure_steps(step: Step, *, device: torch.device, steps: int) -> Stepped:
    """Times `steps` steps after a few that do not count, then profiles a few more."""
    for _ in range(WARMUP_STEPS):
        step()
    seconds, loss = _timed(step, device=device, steps=steps)
    memory_bytes = peak_memory_bytes(device)
    times = kind_times(_traced(step, device=device))
    step_ms = 1e3 * statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4) if steps > 1 else (seconds[0],) * 3
    return Stepped(
        steps=steps,
        step_ms=step_ms,
        spread=1e3 * (high - low) / 2 / step_ms,
        kinds=scaled(times, step_ms=step_ms, on_gpu=device.type == "cuda"),
        profiled_ms=sum(times.values()),
        memory_bytes=memory_bytes,
        loss=loss,
    )


def scaled(times: Mapping[Kind, float], *, step_ms: float, on_gpu: bool) -> dict[Kind, float]:
    """The times of a profiled step for one that nobody looked at.

    A profiler slows the host down, not a GPU: what a GPU works stays as it is, and it idles for what is left of the
    step. Without a GPU all kinds shrink alike.
    """
    busy = sum(time for kind, time in times.items() if kind != "idle")
    factor = min(1.0, step_ms / busy) if on_gpu else step_ms / busy
    worked: dict[Kind, float] = {kind: factor * time for kind, time in times.items() if kind != "idle"}
    return {**worked, "idle": max(0.0, step_ms - factor * busy) if on_gpu else 0.0}


def own_step(
    spec: Spec,
    plan: Plan,
    *,
    device: torch.device,
    optimizer: Optimizer,
    clip_norm: float,
    trained: Collection[str] | None = None,
    seed: int = 0,
) -> Step:
    """A step as training makes it under `plan`, for one process."""
    with torch.device("meta"):
        model = Decoder(spec)
    executor = apply(
        plan,
        model,
        None,
        lambda parameters, placements: make_optimizer(
            parameters, optimizer, spec=spec, placements=placements, exact=plan.exact
        ),
        device=device,
        trained=trained,
        clip_norm=clip_norm,
        seed=seed,
        init_seed=seed,
    )
    batch = random_rows(spec, rows=plan.batch_size, device=device)

    def step() -> Tensor:
        with deterministic(device) if plan.deterministic else contextlib.nullcontext():
            return executor.step(batch, lr=LEARNING_RATE).loss

    return step


def random_rows(spec: Spec, *, rows: int, device: torch.device) -> Batch:
    """Full rows of random tokens, every target with weight 1. A row is a single document, or several of about
    DOCUMENT_TOKENS tokens for a spec that separates them."""
    length, draw = spec.sequence_length, torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocabulary, (rows, length + 1), generator=draw)
    documents = torch.zeros(rows, length, dtype=torch.int32)
    if spec.documents == "separate":
        documents = (torch.rand(rows, length, generator=draw) < 1 / DOCUMENT_TOKENS).cumsum(1, dtype=torch.int32)
    return Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        weight=torch.ones(rows, length),
        positions=torch.arange(length).expand(rows, -1),
        documents=documents,
    ).to(device)


def _timed(step: Step, *, device: torch.device, steps: int) -> tuple[list[float], float]:
    """Seconds of each step, and the last loss. Training does not wait for a GPU after each step, so the GPU's own
    clock tells when each one ended."""
    if device.type == "cuda":
        moments = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        torch.cuda.synchronize(device)
        moments[0].record()
        for moment in moments[1:]:
            loss = step()
            moment.record()
        torch.cuda.synchronize(device)
        seconds = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(moments)]
        return seconds, loss.item()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
    return seconds, loss.item()


def _traced(step: Step, *, device: torch.device) -> dict[str, Any]:
    """The trace of a few steps, as torch's profiler writes it."""
    quiet_profiler()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
            schedule=schedule(wait=0, warmup=1, active=PROFILED_STEPS, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            acc_events=True,  # there is one cycle; without this torch 2.11 warns about those before it
        ) as profiler:
            for _ in range(1 + PROFILED_STEPS):
                step()
                if device.type == "cuda":
                    with label("device wait"):
                        torch.cuda.synchronize(device)
                profiler.step()
        trace: dict[str, Any] = read_json(path, what="trace")
    return trace
