"""Which kernels a step uses: compiled blocks, the quickest attention, the quickest products, in 8 bits where allowed.

What is quickest depends on shapes, the GPU and the versions of its libraries, so it is measured when a run begins, on
the shapes of the run.
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
from ropewalk.model import fp8, products
from ropewalk.model.attend import CausalAttend, Kernel
from ropewalk.model.decoder import Decoder
from ropewalk.model.modules import Linear
from ropewalk.model.spec import Spec
from ropewalk.plan.plan import Plan

DETERMINISTIC: tuple[Kernel, ...] = ("flash", "efficient")
ANY: tuple[Kernel, ...] = ("cudnn", *DETERMINISTIC)
IN_8_BITS = {"fp8": fp8.product, "fp8 by rows": fp8.product_by_rows}
TURNS, REPEATS = 3, 3
FINALISTS = 3
"""Of a settled contest, which are timed three times instead of once."""
SETTLING, SETTLED = 0.05, 0.05
"""Seconds for which a way runs alone before it is timed, and while it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """Ways to do the same, and the milliseconds of each, forward and backward; the first is the quickest."""

    what: str
    milliseconds: dict[str, float]

    @property
    def winner(self) -> str:
        return next(iter(self.milliseconds))


def compile_stage(stage: Decoder) -> None:
    """Compiles the blocks of a stage, which all share one result, and the embedding, whose backward pass sorts all
    tokens otherwise.

    Not the model as a whole: it gains 2 % at 12 layers of width 768 and loses 16 % at 24 of width 2048, where more is
    computed again in the backward pass than pays (H200, torch 2.11).
    """
    keep_compiled()
    for block in stage.blocks.values():
        # The method rather than the module: hooks that gather weights or watch outputs stay outside.
        block.forward = torch.compile(block.forward, dynamic=False)
    if stage.embedding is not None and stage.embed is None:
        stage.lookup = torch.compile(stage.lookup, dynamic=False)  # type: ignore[method-assign]


def choose_attention(spec: Spec, plan: Plan, device: torch.device, *, dtype: torch.dtype) -> Contest | None:
    """The quickest kernel for causal attention of a microbatch; None where torch's own choice is all there is.

    Where the same bits are wanted every time, the first that takes these shapes: times differ from run to run.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    heads, groups = spec.heads // plan.tensor, spec.kv_heads // plan.tensor
    rows, length = plan.microbatch_rows, plan.sequence_length or spec.sequence_length
    shapes = [(rows, length, count, spec.head_size) for count in (heads, groups, groups)]
    heads_BHTD = [torch.randn(shape, dtype=dtype, device=device).transpose(1, 2).requires_grad_() for shape in shapes]
    tried = DETERMINISTIC if plan.deterministic else ANY
    runs = {kernel: _both_passes(CausalAttend((kernel,)), *heads_BHTD) for kernel in tried}
    able = [(kernel, run) for kernel, run in runs.items() if _works(run)]
    return contest("attention", dict(able[:1] if plan.deterministic else able), device)


def choose_8_bits(stage: Decoder, plan: Plan) -> Iterator[Contest]:
    """Gives those linear maps of a stage products in 8 bits that are quicker so, or all of them: where the plan says
    it, where the same bits are wanted every time, and on a CPU, which only imitates them."""
    tokens = tokens_of(stage, plan)
    measured = plan.device == "cuda" and plan.fp8 == "quicker" and not plan.deterministic
    found: dict[tuple[int, ...], str] = {}
    for name, module in maps_of(stage).items():
        outputs, inputs = shape = tuple(module.weight.shape)
        if outputs % 16 or inputs % 16 or tokens % 16:
            continue  # the tensor cores' smallest pieces
        if shape not in found and measured:
            result = _product_contest(name.partition(".")[2], module.weight, tokens, compiled=plan.compile)
            found[shape] = result.winner
            yield result
        if way := IN_8_BITS.get(found.get(shape, "fp8")):
            module.product, module.bare = way, False
    if found:
        torch.cuda.empty_cache()  # what the measurements took: the step wants other sizes


def maps_of(stage: Decoder) -> dict[str, Linear]:
    """The linear maps of all blocks."""
    return {name: module for name, module in stage.blocks.named_modules() if isinstance(module, Linear)}


def tokens_of(stage: Decoder, plan: Plan) -> int:
    """That this rank has of a microbatch."""
    return plan.microbatch_rows * (plan.sequence_length or stage.spec.sequence_length) // plan.context


def _product_contest(name: str, weight: Tensor, tokens: int, *, compiled: bool) -> Contest:
    x = torch.randn(tokens, weight.shape[1], dtype=torch.bfloat16, device=weight.device, requires_grad=True)
    # Drawn: the weight itself may be sharded, and not there.
    narrow = torch.randn_like(weight, dtype=torch.bfloat16, requires_grad=True)
    # Out of a compiled block, to read operands for their largest magnitudes takes longer than inside (docs/log.md).
    scale = x.detach().abs().amax().float() / torch.finfo(fp8.E4M3).max if compiled else None
    runs = {"bf16": _both_passes(lambda x, w: products.product(x, w, None), x, narrow)}
    for kind, way in IN_8_BITS.items():
        runs[kind] = _both_passes(lambda x, w, way=way: way(x, w, None, scale=scale), x, narrow)
    return contest(name, runs, weight.device)


def _both_passes(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    @functools.cache
    def gradient() -> Tensor:
        # At random: with equal numbers a GPU would be quicker than it is.
        return torch.randn_like(function(*inputs))

    return lambda: torch.autograd.grad(function(*inputs), inputs, gradient())


def contest(what: str, runs: Mapping[Any, Callable[[], object]], device: torch.device) -> Contest:
    """In turns, so that a GPU that grows warm and slow does so for all."""
    found: dict[Any, list[float]] = {name: [] for name, run in runs.items() if _works(run)}
    assert found, f"{what}: no kernel of torch takes these shapes"
    for _ in range(TURNS):
        for name, times in found.items():
            times.append(_milliseconds(runs[name], device))
    medians = {name: statistics.median(times) for name, times in found.items()}
    return Contest(what=what, milliseconds=dict(sorted(medians.items(), key=lambda item: item[1])))


def _works(run: Callable[[], object]) -> bool:
    """Whether a kernel knows these shapes. What torch remarks on first calls is not for users: that others were not
    tried, that a thread has no context yet."""
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")
        run()
        return True
    return False


def settled_contest(
    what: str, runs: Mapping[Any, Callable[[], object]], device: torch.device, *, beside: str
) -> Contest:
    """Each way alone until the GPU has settled at the clock that its power allows; then the best few, and the one
    `beside` which they are shown, twice more.

    In turns all have the same clock, which says nothing of what a way costs where power is the limit, as in the steps
    of large models: there the way that needs least energy is the quickest.
    """
    in_turns = contest(what, runs, device).milliseconds
    times: dict[str, list[float]] = {name: [] for name in in_turns}

    def settle(names: Iterable[str]) -> None:
        for name in names:
            for seconds in SETTLING, SETTLED:
                time = _milliseconds(runs[name], device, repeats=math.ceil(1e3 * seconds / in_turns[name]))
            times[name].append(time)

    settle(in_turns)
    finalists = dict.fromkeys((*sorted(times, key=lambda name: times[name])[:FINALISTS], beside))
    settle(finalists)
    settle(reversed(finalists))
    means = {name: statistics.mean(times[name]) for name in finalists}
    return Contest(what=what, milliseconds=dict(sorted(means.items(), key=lambda item: item[1])))


def _milliseconds(run: Callable[[], object], device: torch.device, *, repeats: int = REPEATS) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        run()
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / repeats
