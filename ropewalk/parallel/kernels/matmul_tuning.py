"""Matmul autotuning: finds the fastest algorithm for each matmul, once per kind of GPU.

A library has several algorithms per matmul and a heuristic that torch trusts (model/kernels/cublas.py). The fastest
depends on shapes, the GPU and the library version, so all are timed on the run's shapes, and results are stored in the
user's cache folder. A run measures only as long as it saves time, matmuls with the largest share of a step first; the
rest keeps torch's choice until later runs.
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
from ropewalk.model.protocol import LanguageModel, ModelStage
from ropewalk.plan.forecast import PURE
from ropewalk.plan.plan import Plan
from ropewalk.store.sealed import append_seal, read_content

from .kernel_choice import Contest, Timer, Times, settled_contest, tokens_of

TORCH = "torch"
TUNED = (torch.bfloat16, torch.float16)
_log = logging.getLogger(__name__)

MEASURED = "settled-in-parts"
"""Measurement method, part of the cache file's name: other methods' results are not reused."""
LEAST_FLOPS = 2e10
"""Minimum FLOPs of tuned matmuls. Smaller ones take less than 30 microseconds on an H200, about our operator's extra
host overhead over torch's."""
IN_TWO = "in two parts"
TILE = 128, 256
"""Rows and columns of the output tile per streaming multiprocessor (SM), in the algorithms that win most contests.
Parts of this many rows meet the library's alignment (`products.ALIGNMENT`)."""
LEAST_IDLE = 0.05
"""Minimum share of SM time lost to a partial last wave for which a matmul is tried in two parts."""
GAIN = 0.02
"""Share of step time saved: 951 ms instead of 978 at 1.36B, about 0.7 % for parts alone (docs/log.md)."""
SHARE_OF_GAIN = 0.5
"""Maximum share of the gain to spend on measuring."""
LEAST_S, MOST_S = 1.0, 10.0
"""Seconds of measuring: less barely loads the kernels; more delays the start of every new run. At 0.3 to 0.8 s per
matmul, those that dominate a step are measured by then."""


class Known:
    """Cached timings for this kind of GPU and library version: a file in the user's cache folder."""

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
        """Returns milliseconds of the fastest kernel and of torch's, fastest first."""
        return self._found.get(str(problem))

    def put(self, problem: Problem, milliseconds: dict[str, float]) -> None:
        """Stores timings; if the disk refuses, for this run only. Ranks of a machine may write concurrently."""
        self._found[str(problem)] = milliseconds
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            partial.write_text(json.dumps(self._found, indent=1), encoding="utf-8")
            append_seal(partial, self._path.name)
            os.replace(partial, self._path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Outcome of tuning: counts of the matmuls worth measuring."""

    known: int
    """Measured by an earlier run on this kind of GPU."""
    measured: int
    left_out: int
    """Not measured in the time budget: torch's choice."""
    seconds: float
    budget_s: float

    def reason(self) -> str:
        """Explains why matmuls were left out."""
        of = f"{self.left_out} of {self.known + self.measured + self.left_out} matmuls keep torch's kernels: "
        if self.budget_s >= MOST_S:
            return f"{of}measuring stopped after {self.seconds:.0f} s; the next run on such a GPU measures the others"
        return (
            f"{of}a run this short gains less than measuring them takes ({self.budget_s:.2g} s allowed); "
            '`plan.tuning = "on"` measures all'
        )


def budget_s(plan: Plan, run_s: float) -> float:
    """Returns the seconds for measuring in a run whose steps take `run_s`."""
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
    """Times kernels for the matmuls of linears and heads, forward and backward, in `dtype`.

    Known timings are reused. The rest is measured, largest share of a step first, within `budget` seconds; `before` are
    called before the first measurement, `after` if any matmul was measured or left out.
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
        torch.cuda.empty_cache()  # a training step needs blocks of other sizes
    if done.measured or done.left_out:
        for callback in after:
            callback(done)
    return tuner.found


def tune_products(
    stage: ModelStage, plan: Plan, *, device: torch.device, dtype: torch.dtype, times: Mapping[str, Times]
) -> Iterator[Contest]:
    """Sets the fastest kernels by `times` (`measure_products`) on a stage's matmuls. Linears for which torch's kernels
    are always fastest are unchanged."""
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
            # In `bf16` a sharded weight may be as narrow as matmuls, but the residual they add to is float32.
            pure = plan.precision in PURE and module.weight.dtype == dtype
            module.bare = pure and plan.tensor == 1 and module.lora_a is None


def _is_tuned(plan: Plan, device: torch.device, dtype: torch.dtype) -> bool:
    return plan.tuning != "off" and dtype in TUNED and not plan.deterministic and _has_ways(device)


def _has_ways(device: torch.device) -> bool:
    """Whether there are kernels to choose from."""
    return device.type == "cuda" and library() is not None


def _uses(stage: ModelStage, plan: Plan, dtype: torch.dtype) -> Iterator[tuple[str, Problem, Linear | None]]:
    """Yields the matmuls of a stage with the first linear of each shape, or without one for the head."""
    tokens, seen = tokens_of(stage, plan), set()
    for name, module in stage.linears().items():
        if module.weight.shape not in seen:
            seen.add(module.weight.shape)
            for what, problem in _of_map(name.split(".", 2)[2], module, tokens, dtype).items():
                yield what, problem, module
    if plan.tensor == 1 and stage.last and isinstance(stage, LanguageModel):
        for what, problem in _of_head(stage.head_weight, tokens, dtype).items():
            yield what, problem, None


def _problems(stage: ModelStage, plan: Plan, dtype: torch.dtype) -> Iterator[tuple[str, Problem, int]]:
    """Yields the matmuls of a stage, and how many of its linears use each."""
    shapes = Counter(module.weight.shape for module in stage.linears().values())
    for what, problem, linear in _uses(stage, plan, dtype):
        yield what, problem, 1 if linear is None else shapes[linear.weight.shape]


def _of_map(name: str, module: Linear, tokens: int, dtype: torch.dtype) -> dict[str, Problem]:
    """Returns the matmuls of a linear (model/matmul.py)."""
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
    if name in ("attention.out", "mlp.down"):  # ends of residual branches
        found[f"{name}, forward with residual"] = dataclasses.replace(forward, biased=biased, adds=True)
    return found


def _of_head(head_VC: Tensor, tokens: int, dtype: torch.dtype) -> dict[str, Problem]:
    """Returns the matmuls of the loss (model/loss.py)."""
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
    """Measures matmuls on one GPU within a time budget."""

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
        """Adds a matmul's timings to `found`, if cached or if there is time to measure."""
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
            # The other kernels' times are not needed later.
            times = {way: time for way, time in measured.milliseconds.items() if way in (measured.winner, TORCH)}
            self._known.put(problem, times)
            self._counts["measured"] += whole
        else:
            self._counts["known"] += whole
        self.found[str(problem)] = times

    def summary(self) -> Tuning:
        """Returns the counts so far."""
        counts = {name: self._counts[name] for name in ("known", "measured", "left_out")}
        return Tuning(**counts, seconds=self._elapsed(), budget_s=self._budget)

    def _has_time(self) -> bool:
        """Whether there is time for another measurement; runs the `before` callbacks ahead of the first."""
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
    """Returns all kernels that compute a matmul in one launch."""
    own = Product(problem)
    with torch.cuda.device(device):
        proposals = own.proposals()
    ways = {TORCH: products.plain(a_transposed=problem.a_transposed, b_transposed=problem.b_transposed)}
    for number, algorithm in enumerate(proposals, start=1):
        ways[f"cuBLASLt {number}"] = functools.partial(own.run, algorithm)
    return ways


def _kernel(problem: Problem, times: Mapping[str, Times], device: torch.device, *, whole: bool = True) -> products.Run:
    """Returns the fastest kernel by `times`; torch's if not measured, or if this GPU lacks the winner."""
    ways, found = _ways(problem, device), times.get(str(problem), {TORCH: 0.0})
    winner, parts = next(iter(found)), _parts(problem, device) if whole else None
    if winner == IN_TWO and parts:
        return _in_two(problem, parts, times, device)
    return ways.get(winner, ways[TORCH])


def _parts(problem: Problem, device: torch.device) -> tuple[Problem, Problem] | None:
    """Splits a matmul in two if that may be faster; parts are not split further."""
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
    """Returns the output rows that fill whole waves of tiles; 0 if the last wave is nearly full, or the only one.

    SMs process tiles in waves. The rest, which leaves SMs idle, is faster as a matmul of its own, with algorithms that
    split a tile over several SMs (split-K).
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
    """Binds kernels to random operands: a GPU is faster on zeros."""
    it, draw = problem, functools.partial(torch.randn, dtype=problem.dtype, device=device)
    a = draw(it.k, it.a_stride or it.n)[:, : it.n] if it.a_transposed else draw(it.n, it.k)
    b = draw(it.m, it.k) if it.b_transposed else draw(it.k, it.m)
    out = torch.zeros(it.n, it.m, dtype=it.out_dtype, device=device)
    bias, added = draw(it.m) if it.biased else None, torch.zeros_like(out) if it.adds else None
    return {way: functools.partial(run, a, b, out, bias, added) for way, run in ways.items()}
