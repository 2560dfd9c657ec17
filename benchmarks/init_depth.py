"""How weights start and where blocks normalise: what trains when a model is deep, without warm-up, without norms.

    make bench NAME=init_depth      all four tables, within ten minutes on two cores
    python benchmarks/init_depth.py --quick

Decoders of ropewalk's own modules on the bytes of Python's standard library, in four tables:

- `deep`: many layers of post-LN, which the papers of LRI and DS-Init are about.
- `bare`: many layers without any norm and without warm-up, which the paper of T-Fixup is about.
- `norms`: post-LN, pre-LN and pre-RMSNorm, with and without warm-up.
- `mlps`: the kinds of feed-forward part at equal parameters.

Every contender of a table sees the same rows in the same order and trains at the same three learning rates; its figure
is the best of them, so that none loses for want of tuning. Losses are held-out nats a byte. `unigram` is what a model
reaches that knows the frequency of bytes and nothing of the bytes before: one that stays there has not trained. The
contenders differ in settings of ropewalk alone, hence no other package is compared.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import finish
from torch import Tensor

from ropewalk.base.seeds import seed_for
from ropewalk.load.batch import Batch
from ropewalk.model.config import Model
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.spec import Spec, resolve
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import Executor
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer, Schedule
from ropewalk.train.lr_schedule import Extent, learning_rate
from ropewalk.train.optim.optimizers import make_optimizer

VOCABULARY, LENGTH, ROWS, HELD_OUT_ROWS = 256, 64, 4, 128
SMALL: dict[str, Any] = {"width": 48, "heads": 2, "position": "learned"}
"""Common to all models; learned positions because rotation takes a quarter of a step this small."""


UNIFORM = math.log(VOCABULARY)
"""Nats a byte of a guess; what a run that does worse, or not a number, counts as."""
WARMUP_SHARE, TIMED_STEPS = 0.1, 60


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What is trained, but for the learning rate."""

    model: Model
    warmup_share: float = 0.0
    """Part of the steps in which the rate rises."""
    glorot: bool = False
    """Whether blocks start as the papers' own baseline does; needs `init = "ds-init"`."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A comparison: every contender at every rate from every seed."""

    contenders: dict[str, Contender]
    rates: tuple[float, ...]
    steps: int
    seeds: int = 1


@dataclass(frozen=True)
class Outcome:
    """How one run ended."""

    loss: float
    """Held-out, in nats a byte; at most that of a guess."""
    diverged: bool
    """Whether it ended worse than a guess."""


@dataclass(frozen=True)
class Row:
    """What a table says of one contender."""

    losses: dict[float, float]
    """By learning rate, mean over seeds."""
    diverged: int
    """Runs that did."""
    seed_spread: float
    """Largest difference between seeds at the best rate."""
    step_ms: float

    @property
    def best(self) -> float:
        return min(self.losses.values())

    @property
    def sensitivity(self) -> float:
        """Worst less best over the rates."""
        return max(self.losses.values()) - self.best


def deep(layers: int, steps: int) -> Table:
    """Post-LN with the papers' warm-up. `gaussian` is the plain 0.02, which is Glorot's deviation at width 2,500 and a
    seventh of it at this one: branches start almost silent. `glorot` has that deviation at this width."""
    model = Model(**SMALL, layers=layers, mlp_width=96, mlp="gelu", norm="layer", norm_position="post", init="gaussian")
    return Table(contenders=starts(model, "lipschitz", "ds-init", warmup=True), rates=(5e-4, 1e-3, 2e-3), steps=steps)


def bare(layers: int, steps: int) -> Table:
    """No norm, no warm-up."""
    model = Model(**SMALL, layers=layers, mlp_width=96, mlp="gelu", norm="none", init="gaussian")
    return Table(contenders=starts(model, "t-fixup", warmup=False), rates=(1e-3, 2e-3, 4e-3), steps=steps)


def starts(model: Model, *inits: str, warmup: bool) -> dict[str, Contender]:
    """`model` from each of `inits`, then from the plain ones."""
    share = WARMUP_SHARE if warmup else 0.0
    named = {init: Contender(model=replace(model, init=init), warmup_share=share) for init in (*inits, "gaussian")}
    return named | {"glorot": glorot(model, warmup_share=share)}


def glorot(model: Model, *, warmup_share: float) -> Contender:
    return Contender(model=replace(model, init="ds-init"), warmup_share=warmup_share, glorot=True)


def norms(layers: int, steps: int) -> Table:
    """Blocks start by Glorot, as in Xiong et al. 2020, where warm-up is what post-LN needs and pre-LN does not."""
    placed = {
        "post-LN": Model(**SMALL, layers=layers, mlp_width=96, mlp="gelu", norm="layer", norm_position="post"),
        "pre-LN": Model(**SMALL, layers=layers, mlp_width=96, mlp="gelu", norm="layer", norm_position="pre"),
        "pre-RMSNorm": Model(**SMALL, layers=layers, mlp_width=96, mlp="gelu", norm="rms", norm_position="pre"),
    }
    contenders = {
        f"{name}, {'warm-up' if share else 'none'}": glorot(model, warmup_share=share)
        for name, model in placed.items()
        for share in (WARMUP_SHARE, 0.0)
    }
    return Table(contenders=contenders, rates=(1e-3, 3e-3, 1e-2), steps=steps)


def mlps(layers: int, steps: int, seeds: int) -> Table:
    """The default model but for its feed-forward part; a gated one has three matrices for two."""
    hidden: dict[str, int] = {"gelu": 192, "swiglu": 128, "geglu": 128, "relu2": 192}
    models = {mlp: Model(**SMALL, layers=layers, mlp_width=size, mlp=mlp) for mlp, size in hidden.items()}
    sizes = [spec_of(model).parameters() for model in models.values()]
    assert max(sizes) <= 1.01 * min(sizes), f"unequal parameters: {sizes}"
    contenders = {mlp: Contender(model=model, warmup_share=WARMUP_SHARE) for mlp, model in models.items()}
    return Table(contenders=contenders, rates=(1e-3, 3e-3, 1e-2), steps=steps, seeds=seeds)


def spec_of(model: Model) -> Spec:
    return resolve(model, vocabulary=VOCABULARY, sequence_length=LENGTH)


def started(contender: Contender, *, seed: int) -> Decoder:
    """The model before its first step."""
    model = build(spec_of(contender.model), seed=seed)
    if contender.glorot:
        assert contender.model.init == "ds-init"
        # DS-Init divides Glorot's matrices of layer l by sqrt(l) and does nothing else.
        with torch.no_grad():
            for layer, block in model.blocks.items():
                for parameter in block.parameters():
                    if parameter.dim() == 2:
                        parameter.mul_(math.sqrt(int(layer) + 1))
    return model


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes held out: every tenth module of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    held_out = b"".join(modules[::10])
    trained = b"".join(module for number, module in enumerate(modules) if number % 10)
    return _numbers(trained), _numbers(held_out)


def _numbers(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def rows_of(text: Tensor, rows: int, *, seed: int) -> Batch:
    """Rows from random places of a text."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH - 1, (rows, 1), generator=generator)
    return Batch.of_rows(text[starts + torch.arange(LENGTH + 1)].long())


def held_out() -> Batch:
    return rows_of(texts()[1], HELD_OUT_ROWS, seed=0)


def unigram_loss() -> float:
    """Held-out nats a byte when each byte is as likely as it is frequent in the text to train on."""
    counts = torch.bincount(texts()[0].int(), minlength=VOCABULARY).double() + 1
    return -(counts / counts.sum()).log()[held_out().targets].mean().item()


def executor_of(contender: Contender, *, seed: int) -> Executor:
    plan = Plan(device="cpu", precision="fp32", batch_size=ROWS, microbatch_size=ROWS)
    model = started(contender, seed=seed)
    return apply(plan, model, None, lambda parameters, _: make_optimizer(parameters, Optimizer()), clip_norm=1.0)


def train(contender: Contender, *, lr: float, steps: int, seed: int) -> Outcome:
    """Trains from scratch, with cosine decay to a tenth of `lr`."""
    executor = executor_of(contender, seed=seed)
    extent = Extent(steps=steps)
    schedule = Schedule(peak_lr=lr, warmup_steps=round(contender.warmup_share * steps))
    for step in range(steps):
        batch = rows_of(texts()[0], ROWS, seed=seed_for(seed, "rows", step))
        executor.step(batch, lr=learning_rate(step, extent=extent, schedule=schedule))
    loss = -executor.score(held_out()).log_probabilities.double().mean().item()
    diverged = not loss <= UNIFORM
    return Outcome(UNIFORM if diverged else loss, diverged)


def step_times(table: Table) -> dict[str, float]:
    """Median milliseconds of a step; contenders take turns, so that a busy machine slows all alike."""
    executors = {who: executor_of(contender, seed=0) for who, contender in table.contenders.items()}
    batch = rows_of(texts()[0], ROWS, seed=0)
    seconds: dict[str, list[float]] = {who: [] for who in executors}
    for _ in range(TIMED_STEPS):
        for who, executor in executors.items():
            start = time.perf_counter()
            executor.step(batch, lr=table.rates[0])
            seconds[who].append(time.perf_counter() - start)
    return {who: 1e3 * statistics.median(values) for who, values in seconds.items()}


def fill(name: str, table: Table) -> dict[str, Row]:
    """Runs a table, one line of progress a contender, and prints it."""
    rows = {}
    step_ms = step_times(table)
    for who, contender in table.contenders.items():
        runs = {
            lr: [train(contender, lr=lr, steps=table.steps, seed=seed) for seed in range(table.seeds)]
            for lr in table.rates
        }
        every = [run for of_rate in runs.values() for run in of_rate]
        losses = {lr: statistics.mean(run.loss for run in of_rate) for lr, of_rate in runs.items()}
        at_best = [run.loss for run in runs[min(losses, key=losses.__getitem__)]]
        rows[who] = Row(
            losses=losses,
            diverged=sum(run.diverged for run in every),
            seed_spread=max(at_best) - min(at_best),
            step_ms=step_ms[who],
        )
        print(f"{name}: {who} {rows[who].best:.3f}", file=sys.stderr)
    print(f"\n{name:<22}", *(f"{lr:>8.0e}" for lr in table.rates), "    best  spread  ms/step  diverged")
    for who, row in rows.items():
        figures = [*row.losses.values(), row.best, row.sensitivity]
        print(f"{who:<22}", *(f"{figure:8.3f}" for figure in figures), f"{row.step_ms:8.1f}  {row.diverged:8}")
    return rows


def as_json(rows: dict[str, Row]) -> dict[str, Any]:
    return {
        who: {
            "loss": {f"{lr:.0e}": round(loss, 4) for lr, loss in row.losses.items()},
            "best": round(row.best, 4),
            "sensitivity": round(row.sensitivity, 4),
            "diverged": row.diverged,
            "seed_spread": round(row.seed_spread, 4),
            "step_ms": round(row.step_ms, 2),
        }
        for who, row in rows.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer layers and steps: shows that it runs, no more")
    options = parser.parse_args()
    # Matrices of 48 gain nothing from a second thread.
    torch.set_num_threads(1)
    if options.quick:
        tables = {"deep": deep(8, 60), "bare": bare(8, 60), "norms": norms(2, 40), "mlps": mlps(2, 40, 1)}
    else:
        tables = {"deep": deep(24, 400), "bare": bare(24, 250), "norms": norms(8, 300), "mlps": mlps(6, 300, 2)}
    started_at = time.perf_counter()
    found = {name: fill(name, table) for name, table in tables.items()}
    print(f"\nunigram {unigram_loss():.3f}, a guess {UNIFORM:.3f}, {time.perf_counter() - started_at:.0f} s in all")

    best = {name: {who: row.best for who, row in rows.items()} for name, rows in found.items()}
    methods = {"deep": ("lipschitz", "ds-init"), "bare": ("t-fixup",)}
    plain = ("gaussian", "glorot")
    finish(
        "init_depth",
        ours={f"{name}.{who}": best[name][who] for name, inits in methods.items() for who in inits},
        peers={who: {name: best[name][who] for name in methods} for who in plain},
        ratios={
            f"{who}, {name}": min(best[name][who] / best[name][init] for init in inits)
            for name, inits in methods.items()
            for who in plain
        },
        quality={
            "tables": {name: as_json(rows) for name, rows in found.items()},
            "settings": {
                name: {"steps": table.steps, "layers": next(iter(table.contenders.values())).model.layers}
                for name, table in tables.items()
            },
            "unigram": round(unigram_loss(), 4),
            "guess": round(UNIFORM, 4),
        },
    )


if __name__ == "__main__":
    main()
