"""The quickest algorithm for each matrix product, measured once for each kind of GPU.

A library has several for a product and guesses which is best; torch takes the guess (model/kernels/cublas.py). Which is
quickest depends on shapes, the GPU and the version of the library, so all are tried on the shapes of the run. What was
found stays in the user's cache folder: to load and try them takes up to a minute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.config.cache import cache_folder
from ropewalk.model import products
from ropewalk.model.decoder import Decoder
from ropewalk.model.kernels.cublas import Problem, Product, library, version
from ropewalk.model.loss import chunk_rows
from ropewalk.model.modules import Linear
from ropewalk.plan.forecast import PURE
from ropewalk.plan.plan import Plan

from .kernels import Contest, maps_of, settled_contest, tokens_of

TORCH = "torch"
TUNED = (torch.bfloat16, torch.float16)
MEASURED = "settled-in-parts"
"""How: what was found otherwise lies in files of another name."""
LEAST_FLOPS = 2e10
"""Of products that are tuned. Smaller ones take less than 30 microseconds on an H200, about what our operator costs the
host more than torch's."""
IN_TWO = "in two parts"
TILE = 128, 256
"""Rows and columns of a result that a processor of a GPU makes at a time, in the algorithms that win most contests.
Parts of so many rows begin where the library wants a matrix to begin (`products.ALIGNMENT`)."""
LEAST_IDLE = 0.05
"""Of the time of all processors, which is lost where the last tiles are too few for all, for a product to be tried in
two parts."""


class Known:
    """What was measured on GPUs of this kind with this library: a file in the user's cache folder."""

    def __init__(self, name: str, library_version: int, folder: Path) -> None:
        words = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
        self._path = folder / "products" / f"{words}-{library_version}-{MEASURED}.json"
        self._found: dict[str, dict[str, float]] = {}
        with contextlib.suppress(OSError, ValueError, TypeError):  # or damaged
            self._found = dict(json.loads(self._path.read_text(encoding="utf-8")))

    def get(self, problem: Problem) -> dict[str, float] | None:
        """The milliseconds of the quickest way and of torch's, the quickest first."""
        return self._found.get(str(problem))

    def put(self, problem: Problem, milliseconds: dict[str, float]) -> None:
        """Keeps them; where the disk does not take them, for this run. Ranks of a machine may all write."""
        self._found[str(problem)] = milliseconds
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            partial.write_text(json.dumps(self._found, indent=1), encoding="utf-8")
            os.replace(partial, self._path)


def tune_products(
    stage: Decoder,
    plan: Plan,
    *,
    dtype: torch.dtype,
    measures: bool = True,
    before: list[Callable[[], None]] | None = None,
) -> Iterator[Contest]:
    """Finds the quickest way to make each product of a stage in `dtype`, forward and backward, of its linear maps and
    of its head. Maps all of whose products torch makes as quickly stay as they are.

    What was not measured on such a GPU yet is measured, after all of `before` were called and taken from the list; or
    is torch's.
    """
    device = next(stage.parameters()).device
    if dtype not in TUNED or plan.deterministic or not _has_ways(device):
        return
    tuner, tokens = Tuner(device, measures=measures, before=[] if before is None else before), tokens_of(stage, plan)
    gains: dict[torch.Size, bool] = {}
    for name, module in maps_of(stage).items():
        shape = module.weight.shape
        if shape not in gains:
            gains[shape] = False
            for result in tuner.tune(_of_map(name.partition(".")[2], module, tokens, dtype)):
                gains[shape] |= result.winner != TORCH
                yield result
        if gains[shape] and module.product is F.linear:
            module.product = products.product
            # In `bf16` a sharded weight may be as narrow as products, but what they are added to is float32.
            pure = plan.precision in PURE and module.weight.dtype == dtype
            module.bare = pure and plan.tensor == 1 and module.lora_a is None
    if plan.tensor == 1 and (stage.head is not None or (stage.embedding is not None and plan.pipeline == 1)):
        yield from tuner.tune(_of_head(stage.head_weight, tokens, dtype))
    torch.cuda.empty_cache()  # what the measurements took: the step wants other sizes


def _has_ways(device: torch.device) -> bool:
    """Whether there is something to choose from."""
    return device.type == "cuda" and library() is not None


def _of_map(name: str, module: Linear, tokens: int, dtype: torch.dtype) -> dict[str, Problem]:
    """The products of a linear map (model/products.py)."""
    outputs, inputs = module.weight.shape
    forward = Problem(n=tokens, k=inputs, m=outputs, b_transposed=True, dtype=dtype)
    found = {
        f"{name}, forward": forward,
        f"{name}, to its input": Problem(n=tokens, k=outputs, m=inputs, dtype=dtype),
        f"{name}, to its weight": Problem(n=outputs, k=tokens, m=inputs, a_transposed=True, dtype=dtype),
    }
    biased = module.bias is not None
    if biased:
        found[f"{name}, forward with bias"] = dataclasses.replace(forward, biased=True)
    if name in ("attention.out", "mlp.down"):  # which end residual branches
        found[f"{name}, forward with residual"] = dataclasses.replace(forward, biased=biased, adds=True)
    return found


def _of_head(head_VC: Tensor, tokens: int, dtype: torch.dtype) -> dict[str, Problem]:
    """The products of the loss (model/loss.py)."""
    vocabulary, width = head_VC.shape
    rows = chunk_rows(tokens, head_VC)
    to_weight = Problem(n=vocabulary, k=rows, m=width, a_transposed=True, dtype=dtype, wide=True)
    found = {
        "head, forward": Problem(n=rows, k=width, m=vocabulary, b_transposed=True, dtype=dtype),
        "head, to its input": Problem(n=rows, k=vocabulary, m=width, dtype=dtype),
        "head, to its weight": to_weight,
    }
    if rows < tokens:
        found["head, to its weight, added"] = dataclasses.replace(to_weight, adds=True)
    return found


class Tuner:
    """Gives products their quickest ways on one GPU."""

    def __init__(self, device: torch.device, *, measures: bool, before: list[Callable[[], None]]) -> None:
        self._device, self._measures, self._before = device, measures, before
        self._known = Known(torch.cuda.get_device_name(device), version(), cache_folder())

    def tune(self, problems: Mapping[str, Problem]) -> Iterator[Contest]:
        """Those that are worth it."""
        for what, problem in problems.items():
            worth = 2 * problem.n * problem.k * problem.m >= LEAST_FLOPS
            if worth and (self._measures or self._known.get(problem)):
                result, products.QUICKEST[problem] = self._quickest(what, problem)
                yield result

    def _quickest(self, what: str, problem: Problem, *, whole: bool = True) -> tuple[Contest, products.Run]:
        ways, times = self._ways(problem), self._known.get(problem)
        if whole and (rows := whole_waves(problem, _processors(self._device))):
            stride = problem.n if problem.a_transposed else 0
            parts = (dataclasses.replace(problem, n=n, a_stride=stride) for n in (rows, problem.n - rows))
            first, rest = (self._quickest(what, part, whole=False)[1] for part in parts)
            ways[IN_TWO] = products.in_two(first, rest, rows=rows, a_transposed=problem.a_transposed)
        if times is None or next(iter(times)) not in ways:
            while self._before:
                self._before.pop()()
            measured = settled_contest(what, _runs(problem, ways, self._device), self._device, beside=TORCH)
            # The others only tell how much there was to choose from.
            times = {way: time for way, time in measured.milliseconds.items() if way in (measured.winner, TORCH)}
            self._known.put(problem, times)
        result = Contest(what=what, milliseconds=times)
        return result, ways[result.winner]

    def _ways(self, problem: Problem) -> dict[str, products.Run]:
        """All that can make a product in one."""
        own = Product(problem)
        with torch.cuda.device(self._device):
            proposals = own.proposals()
        ways = {TORCH: products.plain(a_transposed=problem.a_transposed, b_transposed=problem.b_transposed)}
        for number, algorithm in enumerate(proposals, start=1):
            ways[f"cuBLASLt {number}"] = functools.partial(own.run, algorithm)
        return ways


def whole_waves(problem: Problem, processors: int) -> int:
    """Rows of a result that all processors work on to the end; 0 where that is so for nearly all of them, or none.

    Processors take tiles in waves. The rest, which does not keep all of them busy, is better made as a product of its
    own, for which the library has algorithms that share a tile among several processors.
    """
    beside = math.ceil(problem.m / TILE[1])
    waves = math.ceil(problem.n / TILE[0]) * beside / processors
    if waves < 1 or 1 - waves / math.ceil(waves) < LEAST_IDLE:
        return 0
    return math.floor(waves) * processors // beside * TILE[0]


def _processors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _runs(problem: Problem, ways: Mapping[str, products.Run], device: torch.device) -> dict[str, Callable[[], object]]:
    """The ways on operands drawn at random: with zeros a GPU would be quicker than it is."""
    it, draw = problem, functools.partial(torch.randn, dtype=problem.dtype, device=device)
    a = draw(it.k, it.a_stride or it.n)[:, : it.n] if it.a_transposed else draw(it.n, it.k)
    b = draw(it.m, it.k) if it.b_transposed else draw(it.k, it.m)
    out = torch.zeros(it.n, it.m, dtype=it.out_dtype, device=device)
    bias, added = draw(it.m) if it.biased else None, torch.zeros_like(out) if it.adds else None
    return {way: functools.partial(run, a, b, out, bias, added) for way, run in ways.items()}
