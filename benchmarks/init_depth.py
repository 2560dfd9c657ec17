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
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from harness import finish
from torch import Tensor

from ropewalk.base.seeds import seed_for
from ropewalk.load.batch import Batch
from ropewalk.model.config import Mlp, Model
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.spec import Spec, resolve
from ropewalk.parallel.apply import apply
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer, Schedule
from ropewalk.train.optimizer import make_optimizer
from ropewalk.train.schedule import Extent, learning_rate

VOCABULARY, LENGTH, ROWS, HELD_OUT_ROWS = 256, 64, 4, 128


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What is trained, but for the learning rate."""

    model: Model
    warmup_share: float = 0.0
    """Part of the steps in which the rate rises."""
    glorot: bool = False
    """Whether blocks start as the papers' own baseline does; needs `init = "ds-init"`."""


@dataclass(frozen=True)
class Outcome:
    """How one run ended."""

    loss: float
    """Held-out, in nats a byte; NaN or infinite where the run diverged."""
    step_s: float
    """Median."""


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
    drawn = text[starts + torch.arange(LENGTH + 1)].long()
    return Batch(
        tokens=drawn[:, :-1],
        targets=drawn[:, 1:],
        weight=torch.ones(rows, LENGTH),
        positions=torch.arange(LENGTH).expand(rows, -1),
        documents=torch.zeros(rows, LENGTH, dtype=torch.int32),
    )


def held_out() -> Batch:
    return rows_of(texts()[1], HELD_OUT_ROWS, seed=0)


def unigram_loss() -> float:
    """Held-out nats a byte when each byte is as likely as it is frequent in the text to train on."""
    counts = torch.bincount(texts()[0].int(), minlength=VOCABULARY).double() + 1
    return -(counts / counts.sum()).log()[held_out().targets].mean().item()


def train(contender: Contender, *, lr: float, steps: int, seed: int) -> Outcome:
    """Trains from scratch, with cosine decay to a tenth of `lr`."""
    plan = Plan(device="cpu", precision="fp32", batch_rows=ROWS, microbatch_rows=ROWS)
    model = started(contender, seed=seed)
    executor = apply(plan, model, lambda parameters: make_optimizer(parameters, Optimizer()), clip_norm=1.0)
    extent = Extent(steps=steps)
    schedule = Schedule(peak_lr=lr, warmup_steps=round(contender.warmup_share * steps))
    seconds = []
    for step in range(steps):
        batch = rows_of(texts()[0], ROWS, seed=seed_for(seed, "rows", step))
        start = time.perf_counter()
        executor.step(batch, lr=learning_rate(step, extent=extent, schedule=schedule))
        seconds.append(time.perf_counter() - start)
    loss = -executor.score(held_out()).log_probabilities.double().mean().item()
    return Outcome(loss, statistics.median(seconds))
