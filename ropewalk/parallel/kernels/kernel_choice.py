"""Which kernels a step uses: compiled blocks, the quickest attention, the quickest matmuls, in 8 bits where allowed.

What is quickest depends on shapes, the GPU and the versions of its libraries, so it is measured when a run begins, on
the shapes of the run. One rank measures for all that compute the same (`decide`).
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
"""Seconds for which a kernel runs alone before it is timed, and while it is."""
FAR = 1.2
"""Times the quickest of a few calls: a kernel that is slower than that is not settled. How much power a kernel draws
moves the clock of an H200 by about a tenth (docs/log.md)."""
CLOSE = 1.02
"""Times the quickest when settled: kernels within that are timed once more."""

Times = dict[str, float]
"""Milliseconds of kernels that compute the same, the quickest first."""
Timer = Callable[[Callable[[], object], torch.device, int], float]
"""Milliseconds of one of so many calls on a device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """Ways to do the same, and the milliseconds of each, forward and backward; the first is the quickest."""

    what: str
    milliseconds: dict[str, float]

    @property
    def winner(self) -> str:
        return next(iter(self.milliseconds))


def decide(measure: Callable[[], dict[str, Times]], mesh: Mesh) -> dict[str, Times]:
    """What `measure` finds, the same on every rank. All ranks must call.

    The first rank of each pipeline position measures: it has the shapes of all others there. Where several positions
    have the same shapes, the first position decides. Measured by each rank for itself, replicas would choose different
    kernels, whose results differ in the last bits.
    """
    leads = mesh.is_first("replicate", "shard", "context", "tensor")
    mine = measure() if leads else {}
    found: dict[str, Times] = {}
    # The pipeline is the outermost axis: ranks of one position are numbered one after the other.
    for source in range(0, mesh.world.size, mesh.world.size // mesh.degrees["pipeline"]):
        found = mesh.control.broadcast_json(mine, source=source) | found
    return found


def compile_stage(stage: ModelStage) -> None:
    """Compiles the blocks of a stage, which all share one result, and the embedding, whose backward pass sorts all
    tokens otherwise.

    Not the model as a whole: it gains 2 % at 12 layers of width 768 and loses 16 % at 24 of width 2048, where more is
    computed again in the backward pass than pays (H200, torch 2.11).
    """
    keep_compiled()
    stage.compile_blocks(functools.partial(torch.compile, dynamic=False))


def measure_attention(
    spec: Spec, plan: Plan, device: torch.device, *, dtype: torch.dtype, timer: Timer
) -> dict[str, Times]:
    """The kernels for causal attention of a microbatch; nothing where torch's own choice is all there is.

    Where the same bits are wanted every time, the first that takes these shapes: times differ from run to run.
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
    """Each linear of a stage in 8 bits and in bfloat16, where the plan leaves that to a measurement."""
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
        torch.cuda.empty_cache()  # what the measurements took: the step wants other sizes
    return found


def choose_8_bits(stage: ModelStage, plan: Plan, times: Mapping[str, Times]) -> Iterator[Contest]:
    """Gives linears of a stage matmuls in 8 bits: those that are quicker so by `times`, and those that were not
    measured, since the plan wants all, or the same bits every time, or a CPU only imitates them."""
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
    """Names and shapes of the linears whose sides are multiples of the tensor cores' smallest pieces."""
    if tokens_of(stage, plan) % 16:
        return
    for name, module in stage.linears().items():
        outputs, inputs = module.weight.shape
        if outputs % 16 == 0 and inputs % 16 == 0:
            yield name, (outputs, inputs)


def _key_8_bits(stage: ModelStage, plan: Plan, outputs: int, inputs: int) -> str:
    return f"8 bits: {tokens_of(stage, plan)} x {inputs} x {outputs}"


def tokens_of(stage: ModelStage, plan: Plan) -> int:
    """That this rank has of a microbatch."""
    return plan.microbatch_size * (plan.sequence_length or stage.spec.sequence_length) // plan.context


def _matmul_contest(
    name: str, shape: tuple[int, int], tokens: int, device: torch.device, *, compiled: bool, timer: Timer
) -> Contest:
    """On numbers drawn at random, since the weights may not be on the device yet."""
    draw = functools.partial(torch.randn, dtype=torch.bfloat16, device=device, requires_grad=True)
    x, weight = draw(tokens, shape[1]), draw(*shape)
    # Out of a compiled block, to read operands for their largest magnitudes takes longer than inside (docs/log.md).
    scale = x.detach().abs().amax().float() / torch.finfo(fp8.E4M3).max if compiled else None
    runs = {"bf16": _both_passes(lambda x, w: products.product(x, w, None), x, weight)}
    for kind, way in IN_8_BITS.items():
        runs[kind] = _both_passes(lambda x, w, way=way: way(x, w, None, scale=scale), x, weight)
    return contest(name, runs, device, timer=timer)


def _both_passes(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    @functools.cache
    def gradient() -> Tensor:
        # At random: with equal numbers a GPU would be quicker than it is.
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
    """In turns, so that a GPU that grows warm and slow does so for all."""
    found: dict[Any, list[float]] = {name: [] for name, run in runs.items() if _works(run)}
    assert found, f"{what}: no kernel of torch takes these shapes"
    for _ in range(turns):
        for name, times in found.items():
            times.append(timer(runs[name], device, repeats))
    return _ranking(what, {name: statistics.median(times) for name, times in found.items()})


def _works(run: Callable[[], object]) -> bool:
    """Whether a kernel knows these shapes. What torch remarks on first calls is not for users: that others were not
    tried, that a thread has no context yet."""
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")
        run()
        return True
    return False


def settled_contest(
    what: str, runs: Mapping[Any, Callable[[], object]], device: torch.device, *, beside: str, timer: Timer
) -> Contest:
    """Each kernel alone until the GPU has settled at the clock that its power allows; those within `CLOSE` of the best,
    once more. A kernel that is `FAR` behind in a few calls is left out, but for the one `beside` which they are shown.

    In turns all have the same clock, which says nothing of what a kernel costs where power is the limit, as in the
    steps of large models: there the kernel that needs least energy is the quickest.
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
    """By the GPU's own clock, after one call that does not count."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        run()
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / repeats
