"""What is said of norms and activations, measured: differences with intervals, and where there is none to see.

    make bench NAME=norms               seven models, five seeds; within ten minutes on two cores of one's own
    python benchmarks/norms.py --quick  fewer layers, steps and seeds

The statements: pre-LN depends less on warm-up than post-LN, learns faster, and ends slightly worse (Xiong et al. 2020);
RMSNorm is faster than LayerNorm and no worse (Zhang and Sennrich 2019); SwiGLU and GeGLU are better than GeLU at equal
parameters (Shazeer 2020).

Models and text are those of benchmarks/init_depth.py: bytes of Python's standard library, held-out nats a byte. Seeds
change weights and rows; the models of a statement see the same rows, so that differences are taken seed by seed, at the
better of two learning rates of each model. Intervals are Student's at 95 %. A step is timed in CPU seconds, models in
turns. The contenders differ in settings of ropewalk alone, hence no other package is compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from harness import finish
from init_depth import SMALL, UNIFORM, Contender, executor_of, glorot, held_out, rows_of, texts

from ropewalk.base.seeds import seed_for
from ropewalk.model.config import Model
from ropewalk.train.config import Schedule
from ropewalk.train.lr_schedule import Extent, learning_rate

ROWS, RATES, WARMUP = 4, (1e-3, 3e-3), 0.1
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""97.5 % of Student's distribution by degrees of freedom."""
BLOCKS, STEPS_OF_BLOCK = 6, 10
"""Of the timing."""


@dataclass(frozen=True)
class Run:
    """Held-out losses of one training."""

    early: float
    """After a quarter of the steps."""
    end: float


@dataclass(frozen=True)
class Finding:
    """A difference or ratio that a statement says is above `least`."""

    statement: str
    mean: float
    half: float
    """Half of the interval's width."""
    least: float = 0.0

    @property
    def verdict(self) -> str:
        if self.mean - self.half > self.least:
            return "as stated"
        return "the contrary" if self.mean + self.half < self.least else "no difference to be seen"

    def __str__(self) -> str:
        return f"{self.statement:<58} {self.mean:+.4f} +- {self.half:.4f}  {self.verdict}"


def contenders(layers: int) -> dict[str, Contender]:
    layer = Model(**SMALL, layers=layers, mlp_width=96, mlp="gelu", norm="layer", norm_position="pre")
    post = replace(layer, norm_position="post")
    gated = {"gelu": 192, "swiglu": 128, "geglu": 128}
    found = {
        "post-LN": glorot(post, warmup_share=WARMUP),
        "post-LN, no warm-up": glorot(post, warmup_share=0.0),
        "pre-LN": glorot(layer, warmup_share=WARMUP),
        "pre-LN, no warm-up": glorot(layer, warmup_share=0.0),
        "pre-RMSNorm": glorot(replace(layer, norm="rms"), warmup_share=WARMUP),
    }
    return found | {
        mlp: Contender(model=Model(**SMALL, layers=layers, mlp_width=size, mlp=mlp), warmup_share=WARMUP)  # type: ignore[arg-type]
        for mlp, size in gated.items()
    }


def train(contender: Contender, *, lr: float, steps: int, seed: int) -> Run:
    """Trains from scratch, with cosine decay to a tenth of `lr`."""
    executor = executor_of(contender, seed=seed)
    schedule = Schedule(peak_lr=lr, warmup_steps=round(contender.warmup_share * steps))
    losses = []
    for step in range(steps):
        batch = rows_of(texts()[0], ROWS, seed=seed_for(seed, "rows", step))
        executor.step(batch, lr=learning_rate(step, extent=Extent(steps=steps), schedule=schedule))
        if step + 1 in (steps // 4, steps):
            loss = -executor.score(held_out()).log_probabilities.double().mean().item()
            losses.append(loss if loss <= UNIFORM else UNIFORM)
    return Run(*losses)


def trained(contender: Contender, *, steps: int, seeds: int) -> list[Run]:
    """The runs of all seeds at the rate whose mean loss is lower."""
    by_rate = [[train(contender, lr=lr, steps=steps, seed=seed) for seed in range(seeds)] for lr in RATES]
    return min(by_rate, key=lambda runs: statistics.mean(run.end for run in runs))


def step_seconds(models: dict[str, Contender]) -> dict[str, list[float]]:
    """CPU seconds of a step, the median of each block of steps; models take turns."""
    executors = {name: executor_of(contender, seed=0) for name, contender in models.items()}
    batch = rows_of(texts()[0], ROWS, seed=0)
    found: dict[str, list[float]] = {name: [] for name in models}
    for block in range(BLOCKS + 1):
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(STEPS_OF_BLOCK):
            for name, executor in executors.items():
                start = time.process_time()
                executor.step(batch, lr=1e-3)
                seconds[name].append(time.process_time() - start)
        for name, values in seconds.items():
            if block:  # the first one compiles and fills caches
                found[name].append(statistics.median(values))
    return found


def finding(statement: str, values: Sequence[float], *, least: float = 0.0) -> Finding:
    deviation = statistics.stdev(values) / len(values) ** 0.5
    return Finding(statement, statistics.mean(values), STUDENT[len(values) - 1] * deviation, least)


def findings(runs: dict[str, list[Run]], seconds: dict[str, list[float]]) -> list[Finding]:
    def ends(name: str) -> list[float]:
        return [run.end for run in runs[name]]

    def less(one: Sequence[float], two: Sequence[float]) -> list[float]:
        return [b - a for a, b in zip(one, two, strict=True)]

    without = {name: less(ends(name), ends(f"{name}, no warm-up")) for name in ("pre-LN", "post-LN")}
    early = {name: [run.early for run in runs[name]] for name in ("pre-LN", "post-LN")}
    ratios = [layer / rms for layer, rms in zip(seconds["pre-LN"], seconds["pre-RMSNorm"], strict=True)]
    return [
        finding("pre-LN loses less without warm-up (nats)", less(without["pre-LN"], without["post-LN"])),
        finding("pre-LN is ahead after a quarter of the steps (nats)", less(early["pre-LN"], early["post-LN"])),
        finding("pre-LN ends worse (nats)", less(ends("post-LN"), ends("pre-LN"))),
        finding("RMSNorm takes less time a step (LayerNorm / RMSNorm)", ratios, least=1.0),
        finding("RMSNorm ends better than LayerNorm (nats)", less(ends("pre-RMSNorm"), ends("pre-LN"))),
        finding("SwiGLU ends better than GeLU (nats)", less(ends("swiglu"), ends("gelu"))),
        finding("GeGLU ends better than GeLU (nats)", less(ends("geglu"), ends("gelu"))),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer layers, steps and seeds")
    options = parser.parse_args()
    torch.set_num_threads(1)  # matrices of 48 gain nothing from a second one
    layers, steps, seeds = (4, 100, 3) if options.quick else (8, 250, 5)
    begin = time.perf_counter()
    models = contenders(layers)
    seconds = step_seconds({name: models[name] for name in ("pre-LN", "pre-RMSNorm")})
    runs = {}
    for name, contender in models.items():
        runs[name] = trained(contender, steps=steps, seeds=seeds)
        print(f"{name}: {statistics.mean(run.end for run in runs[name]):.3f}", file=sys.stderr, flush=True)
    found = findings(runs, seconds)
    print(*found, f"{time.perf_counter() - begin:.0f} s in all", sep="\n")
    quality: dict[str, Any] = {
        "findings": [
            {"statement": each.statement, "mean": each.mean, "half": each.half, "verdict": each.verdict}
            for each in found
        ],
        "losses": {name: [round(run.end, 4) for run in of_model] for name, of_model in runs.items()},
        "settings": {"layers": layers, "steps": steps, "seeds": seeds},
    }
    means = {name: round(statistics.mean(run.end for run in of_model), 4) for name, of_model in runs.items()}
    finish("norms", ours=means, peers={}, ratios={}, quality=quality)


if __name__ == "__main__":
    main()
