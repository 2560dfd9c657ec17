"""Tokens to equal loss: a model grown from a smaller trained one against the same model from scratch.

    make bench NAME=growth          every way to grow, at most 1,900 steps; on a GPU where there is one
    python benchmarks/growth.py --quick
    python benchmarks/growth.py --steps 2000 --seeds 2 --data FOLDER     longer, on prepared data

One large model on the Python of this machine, constant learning rate after warm-up. From scratch it trains for a number
of steps; its least held-out loss is the target. Each smaller model trains for half as many steps, grows into the large
one and goes on with the data after that, with a fresh optimizer and the same warm-up, until it meets the target or has
spent as many steps as the one from scratch. Tokens count from the first step of the smaller model; FLOPs too, so that
its cheaper steps show. The peers differ from ours in nothing but the start, hence no other package is compared.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from harness import ROOT, finish

from ropewalk.load.loader import Loader, held_out_rows
from ropewalk.model.config import Model
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.growth.growth import NewBlocks, grow
from ropewalk.model.growth.larger import Sizes, larger
from ropewalk.model.spec import Spec, resolve
from ropewalk.parallel.apply import apply
from ropewalk.plan.plan import Plan
from ropewalk.store.manifest import read_manifest
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer

VOCABULARY, LENGTH, ROWS = 2048, 128, 16
PEAK_LR, WARMUP_STEPS, VALIDATE_ROWS = 2e-3, 30, 64
LARGE = {"layers": 6, "width": 128, "heads": 4, "mlp_width": 384}
DEVICE: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Way:
    """How the large model comes about."""

    small: dict[str, int]
    """Sizes of the smaller model, where they differ."""
    new_blocks: NewBlocks = "identity"
    noise: float = 0.0


WAYS = {
    "depth-identity": Way({"layers": 3}),
    "depth-stack": Way({"layers": 3}, new_blocks="stack"),
    "mlp_width": Way({"mlp_width": 192}, noise=0.1),
    "width": Way({"width": 64, "heads": 2, "mlp_width": 192}, noise=0.1),
}


@dataclass(frozen=True)
class Trained:
    """A stretch of training."""

    losses: dict[int, float]
    """Held-out loss by steps done in this stretch."""
    model: Decoder

    def steps_to(self, target: float) -> int | None:
        """Steps after which the held-out loss first met the target."""
        return next((step for step, loss in self.losses.items() if loss <= target), None)


def spec_of(sizes: dict[str, int], vocabulary: int) -> Spec:
    return resolve(Model(**{**LARGE, **sizes}), vocabulary=vocabulary, sequence_length=LENGTH)


def train(
    model: Decoder, data: Path, *, first: int, steps: int, every: int, seed: int, target: float | None = None
) -> Trained:
    """Trains from step `first` of the data on, for `steps` steps or until the held-out loss meets `target`."""
    plan = Plan(device=DEVICE, precision="fp32", batch_size=ROWS, microbatch_size=ROWS)
    executor = apply(plan, model, None, lambda parameters, _: make_optimizer(parameters, Optimizer()), clip_norm=1.0)
    held_out = held_out_rows(data, sequence_length=LENGTH, rows=VALIDATE_ROWS)
    loader = Loader(data, sequence_length=LENGTH, batch_size=ROWS, seed=seed)
    loader.seek({"row": first * ROWS})

    def held_out_loss() -> float:
        return -executor.score(held_out).log_probabilities.double().mean().item()

    losses = {0: held_out_loss()}
    for step in range(steps):
        executor.step(loader.next(), lr=PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS))
        if (step + 1) % every == 0 or step + 1 == steps:
            losses[step + 1] = held_out_loss()
            if target is not None and losses[step + 1] <= target:
                break
    loader.close()
    return Trained(losses, model)


def grown_from(small: Decoder, way: Way, *, seed: int) -> Decoder:
    """The large model that `way` makes of a small one."""
    spec = larger(small.spec, Sizes(**LARGE))
    weights = {name: weight.cpu() for name, weight in small.state_dict().items()}
    grown = grow(weights, small.spec, spec, new_blocks=way.new_blocks, noise=way.noise, seed=seed)
    model = Decoder(spec).to(DEVICE)
    model.load_state_dict(grown.weights)
    return model


def compare(data: Path, vocabulary: int, *, ways: list[str], steps: int, every: int, seed: int) -> dict[str, dict]:
    """For each way: tokens and FLOPs to the target, beside those from scratch, and the losses on the way."""
    scratch = train(
        build(spec_of({}, vocabulary), seed=seed, device=DEVICE), data, first=0, steps=steps, every=every, seed=seed
    )
    target = min(scratch.losses.values())
    reached = scratch.steps_to(target)
    assert reached is not None
    flops = spec_of({}, vocabulary).flops_per_token("causal")
    before = steps // 2
    trained: dict[Spec, Trained] = {}
    found: dict[str, dict] = {}
    for name in ways:
        way = WAYS[name]
        small_spec = spec_of(way.small, vocabulary)
        if small_spec not in trained:
            model = build(small_spec, seed=seed, device=DEVICE)
            trained[small_spec] = train(model, data, first=0, steps=before, every=every, seed=seed)
        small = trained[small_spec]
        model = grown_from(small.model, way, seed=seed)
        after = train(model, data, first=before, steps=steps, every=every, seed=seed, target=target)
        needed = after.steps_to(target)
        spent = max(after.losses) if needed is None else needed
        found[name] = {
            "tokens": (before + spent) * ROWS * LENGTH,
            "tokens_after_growth": spent * ROWS * LENGTH,
            "scratch_tokens": reached * ROWS * LENGTH,
            "flops": (before * small_spec.flops_per_token("causal") + spent * flops) * ROWS * LENGTH,
            "scratch_flops": reached * flops * ROWS * LENGTH,
            "reached": needed is not None,
            "target_loss": round(target, 4),
            "small_loss": round(small.losses[before], 4),
            "loss_after_growth": round(after.losses[0], 4),
            "last_loss": round(list(after.losses.values())[-1], 4),
        }
        print(name, found[name], file=sys.stderr)
    return found


def _prepared() -> Path:
    from ropewalk.flow import prepare  # not needed with --data
    from ropewalk.flow.verbs import quickstart_recipe

    folder = ROOT / ".bench" / "growth"
    overrides = [f"prepare.tokenizer.vocab_size={VOCABULARY}", f'prepare.folder="{folder / "prepared"}"']
    return Path(prepare(quickstart_recipe(overrides), runs=folder / "runs")["folder"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=300, help="of the model from scratch")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data", type=Path, help="prepared data; without it the Python of this machine is prepared")
    options = parser.parse_args()
    steps, every, seeds = (40, 5, 1) if options.quick else (options.steps, 10, options.seeds)

    data = options.data or _prepared()
    vocabulary = read_manifest(data).tokenizer.vocabulary
    torch.manual_seed(0)

    runs = [compare(data, vocabulary, ways=list(WAYS), steps=steps, every=every, seed=seed) for seed in range(seeds)]

    def mean(way: str, figure: str) -> float:
        """Geometric, since ratios are read from it."""
        return math.exp(sum(math.log(run[way][figure]) for run in runs) / len(runs))

    ours = {way: mean(way, "tokens") for way in WAYS}
    scratch = {way: mean(way, "scratch_tokens") for way in WAYS}
    finish(
        "growth",
        ours=ours,
        peers={"from-scratch": scratch},
        ratios={"from-scratch": min(scratch[way] / ours[way] for way in WAYS)},
        quality={
            "tokens_saved": {way: round(scratch[way] / ours[way], 3) for way in WAYS},
            "tokens_saved_if_the_small_model_exists": {
                way: round(scratch[way] / mean(way, "tokens_after_growth"), 3) for way in WAYS
            },
            "flops_saved": {way: round(mean(way, "scratch_flops") / mean(way, "flops"), 3) for way in WAYS},
            "runs": runs,
            "steps_from_scratch": steps,
        },
    )


if __name__ == "__main__":
    main()
