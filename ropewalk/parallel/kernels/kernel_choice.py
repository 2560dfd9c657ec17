"""Kernel choice: compiled blocks, the fastest attention, the fastest matmuls, in 8 bits where allowed.

The fastest depends on shapes, the GPU and library versions, so kernels are measured at startup on the run's shapes. One
rank measures for all that compute the same (`decide`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropewalk.config.cache import keep_compiled
from ropewalk.model import fp8
from ropewalk.model import matmul as products
from ropewalk.model.attend import CausalAttend, Kernel
from ropewalk.model.protocol import ModelStage
from ropewalk.model.spec import Spec
from ropewalk.plan.plan import Plan

from ..mesh import Mesh

DETERMINISTIC: tuple[Kernel, ...] = ("flash", "efficient")
ANY: tuple[Kernel, ...] = ("cudnn", *DETERMINISTIC)
ATTENTION = "attention"
IN_8_BITS = {"fp8": fp8.product, "fp8 by rows": fp8.product_by_rows}
TURNS, REPEATS = 3, 3
SETTLING, SETTLED = 0.05, 0.03
"""Seconds of warm-up for a kernel before it is timed, and of timing."""
FAR = 1.2
"""Multiple of the fastest time in a few calls: slower kernels skip the settled measurement. The power that a kernel
draws moves the clock of an H200 by about a tenth (docs/log.md)."""
CLOSE = 1.02
"""Multiple of the fastest settled time: kernels within it are timed a second time."""

Times = dict[str, float]
"""Milliseconds of equivalent kernels, fastest first."""
Timer = Callable[[Callable[[], object], torch.device, int], float]
"""Returns milliseconds per call on a device, over this many calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """Forward and backward milliseconds of equivalent kernels, fastest first."""

    what: str
    milliseconds: dict[str, float]

    @property
    def winner(self) -> str:
        return next(iter(self.milliseconds))


def decide(measure: Callable[[], dict[str, Times]], mesh: Mesh) -> dict[str, Times]:
    """Returns the result of `measure`, the same on every rank. All ranks must call.

    The first rank of each pipeline position measures, since all ranks there share its shapes. For shapes of several
    positions, the first position decides. If each rank measured, replicas would choose different kernels, whose results
    differ in the last bits.
    """
    leads = mesh.is_first("replicate", "shard", "context", "tensor")
    mine = measure() if leads else {}
    found: dict[str, Times] = {}
    # Pipeline is the outermost axis: ranks of one position are consecutive.
    for source in range(0, mesh.world.size, mesh.world.size // mesh.degrees["pipeline"]):
        found = mesh.control.broadcast_json(mine, source=source) | found
    return found


def compile_stage(stage: ModelStage) -> None:
    """Compiles a stage's blocks, which share one compilation, and the embedding, whose backward pass would otherwise
    sort all tokens.

    Compiling the whole model gains 2 % at 12 layers of width 768 and loses 16 % at 24 of width 2048, where it
    recomputes more in the backward pass than pays off (H200, torch 2.11).
    """
    keep_compiled()
    stage.compile_blocks(functools.partial(torch.compile, dynamic=False))


def measure_attention(
    spec: Spec, plan: Plan, device: torch.device, *, dtype: torch.dtype, timer: Timer
) -> dict[str, Times]:
    """Times the kernels for causal attention on a microbatch; empty where torch's own choice is the only one.

    Deterministic runs take the first that supports these shapes, since times vary between runs.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return {}
    heads, groups = spec.heads // plan.tensor, spec.kv_heads // plan.tensor
    rows, length = plan.microbatch_size, plan.sequence_length or spec.sequence_length
    shapes = [(rows, length, count, spec.head_size) for count in (heads, groups, groups)]
    heads_BHTD = [torch.randn(shape, dtype=dtype, device=device).transpose(1, 2).requires_grad_() for shape in shapes]
    tried = DETERMINISTIC if plan.deterministic else ANY
    runs = {kernel: _both_passes(CausalAttend((kernel,)), *heads_BHTD) for kernel in tried}
    able = [(kernel, run) for kernel, run in runs.items() if _works(run)]
    found = contest(ATTENTION, dict(able[:1] if plan.deterministic else able), device, timer=timer)
    return {ATTENTION: found.milliseconds}


def measure_8_bits(stage: ModelStage, plan: Plan, device: torch.device, *, timer: Timer) -> dict[str, Times]:
    """Times each linear of a stage in 8 bits and in bfloat16, if the plan asks for a measurement."""
    found: dict[str, Times] = {}
    if plan.device != "cuda" or plan.fp8 != "quicker" or plan.deterministic:
        return found
    for name, (outputs, inputs) in _linears_in_8_bits(stage, plan):
        key = _key_8_bits(stage, plan, outputs, inputs)
        if key not in found:
            found[key] = _matmul_contest(
                name, (outputs, inputs), tokens_of(stage, plan), device, compiled=plan.compile, timer=timer
            ).milliseconds
    if found:
        torch.cuda.empty_cache()  # a training step needs blocks of other sizes
    return found


def choose_8_bits(stage: ModelStage, plan: Plan, times: Mapping[str, Times]) -> Iterator[Contest]:
    """Sets 8-bit matmuls on a stage's linears: those faster by `times`, and unmeasured ones (the plan asks for all or
    for determinism, or a CPU emulates them)."""
    linears, told = stage.linears(), set()
    for name, (outputs, inputs) in _linears_in_8_bits(stage, plan):
        key = _key_8_bits(stage, plan, outputs, inputs)
        measured = times.get(key)
        if measured and key not in told:
            told.add(key)
            yield Contest(what=name.split(".", 2)[2], milliseconds=measured)
        if way := IN_8_BITS.get(next(iter(measured)) if measured else "fp8"):
            linears[name].product, linears[name].bare = way, False


def _linears_in_8_bits(stage: ModelStage, plan: Plan) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields names and shapes of linears whose sides are multiples of the tensor cores' tile."""
    if tokens_of(stage, plan) % 16:
        return
    for name, module in stage.linears().items():
        outputs, inputs = module.weight.shape
        if outputs % 16 == 0 and inputs % 16 == 0:
            yield name, (outputs, inputs)


def _key_8_bits(stage: ModelStage, plan: Plan, outputs: int, inputs: int) -> str:
    return f"8 bits: {tokens_of(stage, plan)} x {inputs} x {outputs}"


def tokens_of(stage: ModelStage, plan: Plan) -> int:
    """Returns this rank's tokens per microbatch."""
    return plan.microbatch_size * (plan.sequence_length or stage.spec.sequence_length) // plan.context


def _matmul_contest(
    name: str, shape: tuple[int, int], tokens: int, device: torch.device, *, compiled: bool, timer: Timer
) -> Contest:
    """Times one linear in bfloat16 and in 8 bits on random inputs: weights may not be on the device yet."""
    draw = functools.partial(torch.randn, dtype=torch.bfloat16, device=device, requires_grad=True)
    x, weight = draw(tokens, shape[1]), draw(*shape)
    # Outside a compiled block, reading operands for their maximum takes longer than inside (docs/log.md).
    scale = x.detach().abs().amax().float() / torch.finfo(fp8.E4M3).max if compiled else None
    runs = {"bf16": _both_passes(lambda x, w: products.product(x, w, None), x, weight)}
    for kind, way in IN_8_BITS.items():
        runs[kind] = _both_passes(lambda x, w, way=way: way(x, w, None, scale=scale), x, weight)
    return contest(name, runs, device, timer=timer)


def _both_passes(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    @functools.cache
    def gradient() -> Tensor:
        # Random: a GPU is faster on constant inputs.
        return torch.randn_like(function(*inputs))

    return lambda: torch.autograd.grad(function(*inputs), inputs, gradient())


def contest(
    what: str,
    runs: Mapping[Any, Callable[[], object]],
    device: torch.device,
    *,
    timer: Timer,
    turns: int = TURNS,
    repeats: int = REPEATS,
) -> Contest:
    """Times kernels round-robin, so that a warming GPU slows all of them alike."""
    found: dict[Any, list[float]] = {name: [] for name, run in runs.items() if _works(run)}
    assert found, f"{what}: no kernel of torch takes these shapes"
    for _ in range(turns):
        for name, times in found.items():
            times.append(timer(runs[name], device, repeats))
    return _ranking(what, {name: statistics.median(times) for name, times in found.items()})


def _works(run: Callable[[], object]) -> bool:
    """Whether a kernel supports these shapes. Hides torch's first-call warnings (skipped kernels, missing context)."""
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")
        run()
        return True
    return False


def settled_contest(
    what: str, runs: Mapping[Any, Callable[[], object]], device: torch.device, *, beside: str, timer: Timer
) -> Contest:
    """Times each kernel alone at the GPU's settled clock; those within `CLOSE` of the best, a second time. Excludes
    kernels slower than `FAR` in a few calls, except the baseline `beside`.

    Round-robin timing gives all kernels the same clock. Under a power limit, as in steps of large models, that hides a
    kernel's cost: there the kernel with the least energy is the fastest.
    """
    in_turns = contest(what, runs, device, timer=timer, turns=2, repeats=1).milliseconds
    least = min(in_turns.values())
    times: dict[str, list[float]] = {}

    def settle(names: Iterable[str]) -> None:
        for name in names:
            for seconds in SETTLING, SETTLED:
                time = timer(runs[name], device, math.ceil(1e3 * seconds / in_turns[name]))
            times.setdefault(name, []).append(time)

    settle(name for name, time in in_turns.items() if time <= FAR * least or name == beside)
    best = min(time for time, *_ in times.values())
    close = [name for name, (time, *_) in times.items() if time <= CLOSE * best]
    if len(close) > 1:
        settle(reversed(close))
    return _ranking(what, {name: statistics.mean(each) for name, each in times.items()})


def _ranking(what: str, times: Mapping[str, float]) -> Contest:
    return Contest(what=what, milliseconds=dict(sorted(times.items(), key=lambda item: item[1])))


def gpu_milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Returns milliseconds per call by CUDA events, after one warm-up call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        run()
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / repeats
