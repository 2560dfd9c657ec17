"""What narrower optimizer state and narrower activations save and cost: bytes, time, and the loss after training.

State: one update of a model's parameters by each AdamW. Activations: one forward and backward pass by each way to keep
them. Loss: text of a Markov chain, three seeds; the largest difference from the wide run of the same seed beside the
spread of the wide runs over seeds.

    make bench NAME=memory
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import finish
from torch import Tensor

from ropewalk.load.batch import Batch
from ropewalk.model.config import Model
from ropewalk.model.decoder import build
from ropewalk.model.spec import Spec, resolve
from ropewalk.parallel.apply import apply
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from ropewalk.train.optim.table import OPTIMIZERS

SEEDS = (0, 1, 2)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "packed": {"saved_activations": "packed"},
    "8-bit": {"saved_activations": "8-bit"},
    "again": {"recompute": "full"},
}
CURVES: dict[str, tuple[str, dict[str, Any]]] = {
    "wide": ("adamw", {}),
    "8-bit state": ("adamw-8bit", {}),
    "8-bit activations": ("adamw", {"saved_activations": "8-bit"}),
    "both": ("adamw-8bit", {"saved_activations": "8-bit"}),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    large = Model(layers=12, width=768, heads=12, dropout=0.1) if on_gpu else Model(layers=4, width=192, heads=4)
    spec = resolve(large, vocabulary=50304 if on_gpu else 4096, sequence_length=1024 if on_gpu else 256)
    rows, rounds = (16 if on_gpu else 4), 3 if quick else 9
    ours: dict[str, float] = {}
    for kind in ("adamw", "adamw-8bit"):
        ours |= state(kind, spec, device, rounds=rounds)
    for name, way in WAYS.items():
        ours |= activations(name, way, spec, device, rows=rows, rounds=rounds)
    small = Model(layers=4, width=256, heads=4) if on_gpu else Model(layers=2, width=64, heads=4)
    steps = 60 if quick else 1000 if on_gpu else 300
    losses = {
        name: [final_loss(small, *how, seed=s, steps=steps, device=device) for s in SEEDS]
        for name, how in CURVES.items()
    }
    wide = losses.pop("wide")
    quality = {
        "seeds_spread_nats": max(wide) - min(wide),
        "most_nats_from_wide": {
            name: max(abs(a - b) for a, b in zip(found, wide, strict=True)) for name, found in losses.items()
        },
        "losses": {"wide": wide, **losses},
        "sizes": f"{device}, {rows} rows of {spec.sequence_length}, {large}; losses: {small}, {steps} steps",
    }
    finish("memory", ours=ours, peers={}, ratios={}, quality=quality)


def state(kind: str, spec: Spec, device: torch.device, *, rounds: int) -> dict[str, float]:
    """Megabytes of moments and milliseconds of an update."""
    model = build(spec, seed=0, device=device)
    named = dict(model.named_parameters())
    optimizer = make_optimizer(named, Optimizer(kind=kind), spec=spec)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    vars(optimizer).update(found_inf=torch.zeros((), device=device), grad_scale=None)
    milliseconds = timed(optimizer.step, device, rounds=rounds)
    kept = sum(t.nbytes for each in optimizer.state.values() for name, t in each.items() if name != "step")
    assert kept == spec.optimizer_bytes(OPTIMIZERS[kind].state_bytes), "the forecast is wrong"
    return {f"{kind}_mb": kept / 1e6, f"{kind}_ms": milliseconds}


def activations(
    name: str, way: dict[str, Any], spec: Spec, device: torch.device, *, rows: int, rounds: int
) -> dict[str, float]:
    """Megabytes that autograd keeps (on a GPU: the peak above weights and gradients) and milliseconds of a step."""
    plan = Plan(device=device.type, precision="bf16", batch_size=rows, microbatch_size=rows, **way)
    model = build(spec, seed=0, device=device)
    executor = apply(plan, model, None, lambda named, _: make_optimizer(named, Optimizer()), clip_norm=1.0)
    batch = random_rows(spec, rows, device)
    executor.step(batch, lr=1e-4)
    found = {f"activations_{name}_ms": timed(lambda: executor.step(batch, lr=1e-4), device, rounds=rounds)}
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        gradients = sum(parameter.nbytes for parameter in model.parameters())
        before = torch.cuda.memory_allocated()
        executor.step(batch, lr=1e-4)
        torch.cuda.synchronize()
        found[f"activations_{name}_peak_mb"] = (torch.cuda.max_memory_allocated() - before - gradients) / 1e6
    packing = getattr(model.run_block, "packing", None)
    if packing is not None and packing.packed_bytes:
        found[f"activations_{name}_share"] = packing.packed_bytes / packing.whole_bytes
    return found


def final_loss(
    settings: Model, kind: str, way: dict[str, Any], *, seed: int, steps: int, device: torch.device
) -> float:
    """The mean loss of the last tenth of the steps."""
    rows, length = 16, 64
    spec = resolve(settings, vocabulary=64, sequence_length=length)
    plan = Plan(device=device.type, precision="bf16", batch_size=rows, microbatch_size=rows, **way)
    model = build(spec, seed=seed, device=device)
    make = lambda named, placements: make_optimizer(named, Optimizer(kind=kind), spec=spec, placements=placements)  # noqa: E731
    executor = apply(plan, model, None, make, clip_norm=1.0)
    draw = torch.Generator().manual_seed(seed)
    likely = chain(64)
    losses = []
    for step in range(steps):
        tokens = walk(likely, rows, length + 1, draw).to(device)
        rate = 3e-3 * min(1, (step + 1) / 20) * (1 - 0.9 * step / steps)
        losses.append(executor.step(of_rows(tokens), lr=rate).loss)
    return float(torch.stack(losses[-steps // 10 :]).mean())


def chain(vocabulary: int) -> Tensor:
    """How likely each token follows each: a few often, most hardly ever."""
    draw = torch.Generator().manual_seed(7)
    return torch.softmax(3 * torch.randn(vocabulary, vocabulary, generator=draw), 1)


def walk(likely: Tensor, rows: int, length: int, draw: torch.Generator) -> Tensor:
    """Rows of the Markov chain."""
    tokens = [torch.randint(len(likely), (rows,), generator=draw)]
    for _ in range(length - 1):
        tokens.append(torch.multinomial(likely[tokens[-1]], 1, generator=draw).squeeze(1))
    return torch.stack(tokens, 1)


def random_rows(spec: Spec, rows: int, device: torch.device) -> Batch:
    return of_rows(torch.randint(spec.vocabulary, (rows, spec.sequence_length + 1), device=device))


def of_rows(tokens: Tensor) -> Batch:
    """Whole rows of one document each."""
    inputs = tokens[:, :-1]
    return Batch(
        tokens=inputs,
        targets=tokens[:, 1:],
        weight=torch.ones(inputs.shape, device=tokens.device),
        positions=torch.arange(inputs.shape[1], device=tokens.device).expand(inputs.shape),
        documents=torch.zeros(inputs.shape, dtype=torch.int32, device=tokens.device),
    )


def timed(work: Callable[[], object], device: torch.device, *, rounds: int) -> float:
    """The median milliseconds; on a CPU, which may be shared, of the work of all threads."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    times = []
    for _ in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - begin)
    return 1000 * statistics.median(times[2:])


if __name__ == "__main__":
    main()
