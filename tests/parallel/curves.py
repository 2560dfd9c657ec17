"""Loss curves of twelve plans beside those of one device: 200 steps in `bf16-pure`, compiled where that is possible.

`python -m tests.parallel.curves` on a machine with a GPU. In bfloat16 no two ways to compute a step have the same bits,
and training amplifies the difference. How much is measured in two ways, both on one device: by microbatch sizes, and by
`--noise` runs whose first weights differ by a 4096th, an eighth of the distance between two bfloat16 numbers. A plan
must lie within three standard deviations of the mean of these runs.

`--plans ring pipeline` runs those plans alone, beside one device. `--backend gloo --steps 3 --width 64` tries it on a
CPU. Ends with a table, a line of JSON, and status 0 if all plans lie where they must.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ropewalk.load.batch import Batch
from ropewalk.model.decoder import build
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import apply
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.layout import compile_problems
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.parallel.pool import NCCL, POOL
from tests.tiny import small_spec

ROWS, LENGTH, LAST = 32, 128, 20
PLANS: dict[str, dict[str, Any]] = {
    "replicate 2": {"replicate": 2},
    "ZeRO-1 over 2": {"shard": 2, "zero": 1},
    "ZeRO-2 over 2": {"shard": 2, "zero": 2},
    "ZeRO-3 over 2": {"shard": 2, "zero": 3},
    "ZeRO-3 over 4": {"shard": 4, "zero": 3},
    "replicate 2 x ZeRO-3 over 2": {"replicate": 2, "shard": 2, "zero": 3},
    "tensor 2": {"tensor": 2},
    "tensor 2 with sequence": {"tensor": 2, "sequence": True},
    "ring 2": {"context": 2},
    "pipeline 2, 1F1B": {"pipeline": 2},
    "pipeline 2, zero-bubble": {"pipeline": 2, "schedule": "zero-bubble"},
    "pipeline 2 x ZeRO-1 over 2 x tensor 2": {"pipeline": 2, "shard": 2, "zero": 1, "tensor": 2, "sequence": True},
}
ALONE = {f"one device, microbatches of {rows}": {"microbatch_size": rows} for rows in (2, 4, 8, 16, 32)}
NOISE = 2.0**-12


def spec_of(width: int) -> Spec:
    return small_spec(vocabulary=256, sequence_length=LENGTH, layers=4, width=width, mlp_width=4 * width)


def plan_of(settings: dict[str, Any], *, device: str) -> Plan:
    plan = Plan(
        **{
            "device": device,
            "precision": "bf16-pure",
            "batch_size": ROWS,
            "microbatch_size": 4,
            "sequence_length": LENGTH,
            **settings,
        }
    )
    stages = plan.pipeline * plan.chunks
    if stages > 1:
        each = 4 // stages
        plan = dataclasses.replace(plan, stages=tuple(tuple(range(s * each, (s + 1) * each)) for s in range(stages)))
    return dataclasses.replace(plan, compile=device == "cuda" and not any(compile_problems(plan)))


def text() -> torch.Tensor:
    """Bytes of the standard library's modules."""
    found = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        found += path.read_bytes()
        if len(found) > 2 << 20:
            break
    return torch.frombuffer(found, dtype=torch.uint8).long()


def losses(rank: int, plan: Plan, width: int, steps: int, noise: int = 0) -> tuple[list[float], list[str]]:
    """A rank's job: the loss of every step, and the kernels that were chosen."""
    spec, mesh, tokens = spec_of(width), Mesh(plan, rank), text()
    model = build(spec, seed=1)
    if noise:
        draw = torch.Generator().manual_seed(noise)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + NOISE * torch.randn(parameter.shape, generator=draw)
    executor = apply(
        plan,
        model.to(plan.device),
        mesh,
        functools.partial(_optimizer, spec),
        clip_norm=1.0,
        seed=3,
    )
    found = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(0, len(tokens) - LENGTH - 1, (ROWS, 1), generator=draw)
        rows = tokens[starts + torch.arange(LENGTH + 1)]
        shape = (ROWS, LENGTH)
        batch = Batch(
            tokens=rows[:, :-1],
            targets=rows[:, 1:],
            weight=torch.ones(shape),
            positions=torch.arange(LENGTH).expand(shape),
            documents=torch.zeros(shape, dtype=torch.int32),
        )
        rate = 1e-3 * min(1.0, (step + 1) / 20)
        found.append(executor.step(batch.strided(mesh.data.rank, mesh.data.size), lr=rate).loss)
    return torch.stack(found).tolist(), [f"{contest.what}: {contest.winner}" for contest in executor.contests]


def _optimizer(spec: Spec, parameters: dict[str, nn.Parameter], placements: Any) -> torch.optim.Optimizer:
    return make_optimizer(parameters, Optimizer(kind="adamw"), spec=spec, placements=placements)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--noise", type=int, default=8, help="Runs of one device whose first weights differ.")
    parser.add_argument("--plans", nargs="*", help="Only plans whose names contain one of these.")
    parser.add_argument("--plans-only", action="store_true", help="Leave out the runs of one device, and the verdict.")
    parser.add_argument("--limit", type=float, default=480, help="Seconds for one run, compilation included.")
    parser.add_argument("--kernels", action="store_true", help="Print the kernels that each plan chose.")
    asked = parser.parse_args()
    for part in asked.plans or ():
        if not any(part in name for name in PLANS):
            parser.error(f"no plan is named {part!r}; there are: {'; '.join(PLANS)}")
    pool, device = (NCCL, "cuda") if asked.backend == "nccl" else (POOL, "cpu")
    plans = {name: s for name, s in PLANS.items() if not asked.plans or any(part in name for part in asked.plans)}
    alone = {} if asked.plans_only else ALONE
    noisy = {f"one device, noise {seed}": {"microbatch_size": 4} for seed in range(1, asked.noise + 1) if alone}
    ends: dict[str, float] = {}
    compiled: dict[str, bool] = {}
    for name, settings in (alone | noisy | plans).items():
        plan, began = plan_of(settings, device=device), time.monotonic()
        noise = int(name.rpartition(" ")[2]) if name in noisy else 0
        try:
            job = (losses, plan, asked.width, asked.steps, noise)
            curve, chosen = pool.run(*job, world=plan.world, timeout_s=asked.limit)[0]
        except AssertionError as error:
            print(f"{name}: FAILED: {error}", file=sys.stderr, flush=True)
            curve, chosen = [float("nan")], []
        ends[name], compiled[name] = statistics.fmean(curve[-LAST:]), plan.compile
        at = curve[min(len(curve), 20) - 1]
        seconds = time.monotonic() - began
        print(f"{name}: {ends[name]:.4f} (step 20: {at:.4f}, {seconds:.0f} s)", file=sys.stderr, flush=True)
        if asked.kernels:
            print(f"    {'; '.join(chosen)}", file=sys.stderr, flush=True)
    if not alone:
        return
    one_device = [ends[name] for name in (*alone, *noisy)]
    assert not any(math.isnan(end) for end in one_device), "one device failed"
    mean, deviation = statistics.fmean(one_device), statistics.stdev(one_device)
    print(
        f"| run | ranks | compiled | mean loss of the last {LAST} of {asked.steps} steps | standard deviations away |"
    )
    print("|---|---|---|---|---|")
    away = {name: (ends[name] - mean) / deviation if deviation else 0.0 for name in ends}
    for name, settings in (alone | noisy | plans).items():
        world = plan_of(settings, device=device).world
        print(f"| {name} | {world} | {'yes' if compiled[name] else 'no'} | {ends[name]:.4f} | {away[name]:+.1f} |")
    within = all(abs(away[name]) <= 3 for name in plans)
    print(json.dumps({"mean": mean, "deviation": deviation, "ends": ends, "away": away, "within": within}))
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
