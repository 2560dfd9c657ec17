"""The quickest algorithm for each matmul, measured once for each kind of GPU.

A library has several for a matmul and guesses which is best; torch takes the guess (model/kernels/cublas.py). Which is
quickest depends on shapes, the GPU and the version of the library, so all are tried on the shapes of the run. What was
found stays in the user's cache folder. A run measures for as long as pays off in its own time: what takes most of a
step comes first, the rest is left to torch, and to later runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.base.errors import DamagedFile
from ropewalk.config.cache import cache_folder
from ropewalk.model import matmul as products
from ropewalk.model.kernels.cublas import Problem, Product, library, version
from ropewalk.model.loss import chunk_rows
from ropewalk.model.modules import Linear
from ropewalk.model.protocol import ModelStage
from ropewalk.plan.forecast import PURE
from ropewalk.plan.plan import Plan
from ropewalk.store.sealed import append_seal, read_content

from .kernel_choice import Contest, Timer, Times, settled_contest, tokens_of

TORCH = "torch"
TUNED = (torch.bfloat16, torch.float16)
_log = logging.getLogger(__name__)

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
GAIN = 0.02
"""Of the time of a step: 951 ms instead of 978 at 1.36B, about 0.7 % for parts alone (docs/log.md)."""
SHARE_OF_GAIN = 0.5
"""That measuring may cost, at most."""
LEAST_S, MOST_S = 1.0, 10.0
"""Seconds of measuring: with less, kernels are hardly loaded; more would be waited for at the start of every new run.
With 0.3 to 0.8 s for a matmul, those that take most of the step are measured by then."""


class Known:
    """What was measured on GPUs of this kind with this library: a file in the user's cache folder."""

    def __init__(self, name: str, library_version: int, folder: Path) -> None:
        words = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
        self._path = folder / "products" / f"{words}-{library_version}-{MEASURED}.json"
        self._found: dict[str, dict[str, float]] = {}
        try:
            self._found = dict(json.loads(read_content(self._path, self._path.name)))
        except OSError:
            return
        except DamagedFile as error:
            if self._path.exists():
                _log.warning("%s; these matmuls are measured again", error)

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
            append_seal(partial, self._path.name)
            os.replace(partial, self._path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What became of the matmuls of a run that are worth a measurement."""

    known: int
    """Measured by an earlier run on a GPU of this kind."""
    measured: int
    left_out: int
    """Not measured, since the time for that was over: torch's choice."""
    seconds: float
    budget_s: float

    def reason(self) -> str:
        """Why some were left out, for people."""
        of = f"{self.left_out} of {self.known + self.measured + self.left_out} matmuls keep torch's kernels: "
        if self.budget_s >= MOST_S:
            return f"{of}measuring stopped after {self.seconds:.0f} s; the next run on such a GPU measures the others"
        return (
            f"{of}a run this short gains less than measuring them takes ({self.budget_s:.2g} s allowed); "
            '`plan.tuning = "on"` measures all'
        )


def budget_s(plan: Plan, run_s: float) -> float:
    """Seconds that measuring may take in a run whose steps take `run_s`."""
    if plan.tuning != "auto":
        return math.inf if plan.tuning == "on" else 0.0
    allowed = min(MOST_S, SHARE_OF_GAIN * GAIN * run_s)
    return allowed if allowed >= LEAST_S else 0.0


def measure_products(
    stages: Iterable[ModelStage],
    plan: Plan,
    *,
    device: torch.device,
    dtype: torch.dtype,
    budget: float,
    timer: Timer,
    before: Iterable[Callable[[], None]] = (),
    after: Iterable[Callable[[Tuning], None]] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """The quickest kernels for the matmuls of stages in `dtype`, forward and backward, of their linears and heads.

    What was measured on such a GPU before is known. The rest is measured, what takes most of a step first, until
    `budget` seconds are over; all of `before` are called before the first measurement, all of `after` when something
    was measured or left out.
    """
    if not _is_tuned(plan, device, dtype):
        return {}
    calls: dict[Problem, tuple[str, float]] = {}
    for stage in stages:
        for what, problem, count in _problems(stage, plan, dtype):
            flops = 2.0 * problem.n * problem.k * problem.m
            if flops >= LEAST_FLOPS:
                calls[problem] = what, calls.get(problem, ("", 0.0))[1] + count * flops
    tuner = Tuner(device, budget=budget, timer=timer, before=before, clock=clock)
    for problem, (what, _) in sorted(calls.items(), key=lambda item: -item[1][1]):
        tuner.measure(what, problem)
    done = tuner.summary()
    if done.measured:
        torch.cuda.empty_cache()  # what the measurements took: the step wants other sizes
    if done.measured or done.left_out:
        for callback in after:
            callback(done)
    return tuner.found


def tune_products(
    stage: ModelStage, plan: Plan, *, device: torch.device, dtype: torch.dtype, times: Mapping[str, Times]
) -> Iterator[Contest]:
    """Gives the matmuls of a stage the quickest kernels by `times` (`measure_products`). Linears all of whose matmuls
    torch makes as quickly stay as they are."""
    if not _is_tuned(plan, device, dtype):
        return
    gains: set[torch.Size] = set()
    told: set[Problem] = set()
    for what, problem, linear in _uses(stage, plan, dtype):
        found = times.get(str(problem))
        if found is None:
            continue
        result = Contest(what=what, milliseconds=found)
        if problem not in told:
            told.add(problem)
            products.QUICKEST[problem] = _kernel(problem, times, device)
            yield result
        if linear is not None and result.winner != TORCH:
            gains.add(linear.weight.shape)
    for module in stage.linears().values():
        if module.weight.shape in gains and module.product is F.linear:
            module.product = products.product
            # In `bf16` a sharded weight may be as narrow as products, but what they are added to is float32.
            pure = plan.precision in PURE and module.weight.dtype == dtype
            module.bare = pure and plan.tensor == 1 and module.lora_a is None


def _is_tuned(plan: Plan, device: torch.device, dtype: torch.dtype) -> bool:
    return plan.tuning != "off" and dtype in TUNED and not plan.deterministic and _has_ways(device)


def _has_ways(device: torch.device) -> bool:
    """Whether there is something to choose from."""
    return device.type == "cuda" and library() is not None


def _uses(stage: ModelStage, plan: Plan, dtype: torch.dtype) -> Iterator[tuple[str, Problem, Linear | None]]:
    """The matmuls of a stage with the first linear of each shape, or of its head."""
    tokens, seen = tokens_of(stage, plan), set()
    for name, module in stage.linears().items():
        if module.weight.shape not in seen:
            seen.add(module.weight.shape)
            for what, problem in _of_map(name.split(".", 2)[2], module, tokens, dtype).items():
                yield what, problem, module
    if plan.tensor == 1 and stage.last:
        for what, problem in _of_head(stage.head_weight, tokens, dtype).items():
            yield what, problem, None


def _problems(stage: ModelStage, plan: Plan, dtype: torch.dtype) -> Iterator[tuple[str, Problem, int]]:
    """The matmuls of a stage, and how many of its linears make each."""
    shapes = Counter(module.weight.shape for module in stage.linears().values())
    for what, problem, linear in _uses(stage, plan, dtype):
        yield what, problem, 1 if linear is None else shapes[linear.weight.shape]


def _of_map(name: str, module: Linear, tokens: int, dtype: torch.dtype) -> dict[str, Problem]:
    """The products of a linear map (model/matmul.py)."""
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
    """Measures matmuls on one GPU, for so many seconds."""

    def __init__(
        self,
        device: torch.device,
        *,
        budget: float,
        timer: Timer,
        before: Iterable[Callable[[], None]] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device, self._budget, self._timer, self._before, self._clock = device, budget, timer, before, clock
        self._known = Known(torch.cuda.get_device_name(device), version(), cache_folder())
        self._began: float | None = None
        self._counts: Counter[str] = Counter()
        self.found: dict[str, Times] = {}

    def measure(self, what: str, problem: Problem, *, whole: bool = True) -> None:
        """Adds the times of a matmul to those found, where they are known or there is time to measure them."""
        times, ways = self._known.get(problem), _ways(problem, self._device)
        parts = _parts(problem, self._device) if whole else None
        if times is None or next(iter(times)) not in (*ways, *([IN_TWO] if parts else [])):
            times = None
            if not self._has_time():
                self._counts["left_out"] += whole
                return
        if times is None or next(iter(times)) == IN_TWO:
            for part in parts or ():
                self.measure(what, part, whole=False)
        if times is None:
            if parts:
                ways[IN_TWO] = _in_two(problem, parts, self.found, self._device)
            runs = _runs(problem, ways, self._device)
            measured = settled_contest(what, runs, self._device, beside=TORCH, timer=self._timer)
            # The others only tell how much there was to choose from.
            times = {way: time for way, time in measured.milliseconds.items() if way in (measured.winner, TORCH)}
            self._known.put(problem, times)
            self._counts["measured"] += whole
        else:
            self._counts["known"] += whole
        self.found[str(problem)] = times

    def summary(self) -> Tuning:
        """What was done so far."""
        counts = {name: self._counts[name] for name in ("known", "measured", "left_out")}
        return Tuning(**counts, seconds=self._elapsed(), budget_s=self._budget)

    def _has_time(self) -> bool:
        """Whether another measurement may begin; the first one is announced."""
        if self._elapsed() >= self._budget:
            return False
        if self._began is None:
            self._began = self._clock()
            for callback in self._before:
                callback()
        return True

    def _elapsed(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began


def _ways(problem: Problem, device: torch.device) -> dict[str, products.Run]:
    """All that can make a matmul in one."""
    own = Product(problem)
    with torch.cuda.device(device):
        proposals = own.proposals()
    ways = {TORCH: products.plain(a_transposed=problem.a_transposed, b_transposed=problem.b_transposed)}
    for number, algorithm in enumerate(proposals, start=1):
        ways[f"cuBLASLt {number}"] = functools.partial(own.run, algorithm)
    return ways


def _kernel(problem: Problem, times: Mapping[str, Times], device: torch.device, *, whole: bool = True) -> products.Run:
    """The quickest by `times`; torch's where it was not measured, or where this GPU does not have the winner."""
    ways, found = _ways(problem, device), times.get(str(problem), {TORCH: 0.0})
    winner, parts = next(iter(found)), _parts(problem, device) if whole else None
    if winner == IN_TWO and parts:
        return _in_two(problem, parts, times, device)
    return ways.get(winner, ways[TORCH])


def _parts(problem: Problem, device: torch.device) -> tuple[Problem, Problem] | None:
    """A matmul as two, where that may be quicker; these are not cut again."""
    if not (rows := whole_waves(problem, _processors(device))):
        return None
    stride = problem.n if problem.a_transposed else 0
    first, rest = (dataclasses.replace(problem, n=n, a_stride=stride) for n in (rows, problem.n - rows))
    return first, rest


def _in_two(
    problem: Problem, parts: tuple[Problem, Problem], times: Mapping[str, Times], device: torch.device
) -> products.Run:
    first, rest = (_kernel(part, times, device, whole=False) for part in parts)
    return products.in_two(first, rest, rows=parts[0].n, a_transposed=problem.a_transposed)


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
