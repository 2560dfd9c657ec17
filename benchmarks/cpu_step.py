"""One training step on a CPU: ours and Hugging Face transformers, each at its best of eager and compiled.

    make bench NAME=cpu_step            both cases, about eight minutes
    python benchmarks/cpu_step.py --quick

The same Llama-like model, numbers, rows and threads: layers, width, heads and feed-forward size, tied head, AdamW,
clipping, bfloat16 products where the CPU has them. Contenders take turns, so that a slow minute of the machine hits all
of them; a figure is the median over all steps of its turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from step import loop

CASES = {"quickstart": (3, 128, 4, 384, 8, 256, 2048), "20m": (6, 512, 8, 1408, 8, 512, 4096)}
"""layers, width, heads, hidden, rows, tokens a row, vocabulary."""
STEPS = {"quickstart": 60, "20m": 8}
"""That are timed in a turn."""
ROUNDS = {"quickstart": 3, "20m": 2}


def tokens(case: str) -> torch.Tensor:
    rows, length, vocabulary = CASES[case][4:]
    return torch.randint(0, vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(0))


def ours(case: str, *, compiled: bool) -> Callable[[], float]:
    from ropewalk.load.batch import Batch
    from ropewalk.model.config import Model
    from ropewalk.model.decoder import build
    from ropewalk.model.spec import resolve
    from ropewalk.parallel.apply import apply
    from ropewalk.plan.plan import Plan
    from ropewalk.train.config import Optimizer
    from ropewalk.train.optim.optimizers import make_optimizer

    layers, width, heads, hidden, rows, length, vocabulary = CASES[case]
    settings = Model(layers=layers, width=width, heads=heads, mlp_width=hidden, tie_embeddings=True)
    model = build(resolve(settings, vocabulary=vocabulary, sequence_length=length), seed=0)
    plan = Plan(device="cpu", precision="bf16", batch_size=rows, microbatch_size=rows, compile=compiled)
    executor = apply(plan, model, None, lambda parameters, _: make_optimizer(parameters, Optimizer()), clip_norm=1.0)
    batch = Batch.of_rows(tokens(case))
    return lambda: executor.step(batch, lr=1e-3).loss.item()


def transformers(case: str, *, compiled: bool) -> Callable[[], float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, heads, hidden, _, length, vocabulary = CASES[case]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=length,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    model.train()
    forward = torch.compile(model) if compiled else model
    return loop(lambda inputs: forward(input_ids=inputs).logits, list(model.parameters()), tokens(case))


MAKERS = {"ropewalk": ours, "transformers": transformers}


def measure(step: Callable[[], float], steps: int) -> dict[str, object]:
    for _ in range(2):
        loss = step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--contender", choices=MAKERS)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--case", choices=CASES)
    options = parser.parse_args()
    if options.contender:
        step = MAKERS[options.contender](options.case, compiled=options.compiled)
        print(json.dumps(measure(step, STEPS[options.case])))
        return

    from harness import call, environment, finish

    pythons = {
        "ropewalk": sys.executable,
        "transformers": environment("transformers", ["torch==2.13.0", "transformers"]),
    }
    cases = ["quickstart"] if options.quick else list(CASES)
    ways = [(who, compiled) for compiled in (False, True) for who in MAKERS]
    found: dict[str, dict[str, float]] = {who: {} for who in MAKERS}
    losses: dict[str, float] = {}
    for case in cases:
        seconds: dict[tuple[str, bool], list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS[case]):
            for who, compiled in ways:
                flags = ["--contender", who, "--case", case] + ["--compiled"] * compiled
                turn = call(pythons[who], __file__, *flags)
                seconds[who, compiled] += turn["seconds"]
                losses[f"{case} {who}"] = turn["loss"]
        rows, length = CASES[case][4:6]
        for (who, compiled), times in seconds.items():
            figure = rows * length / statistics.median(times)
            found[who][f"{case}_{'compiled' if compiled else 'eager'}_tokens_per_s"] = figure
        for who in MAKERS:
            best = max(value for name, value in found[who].items() if name.startswith(f"{case}_"))
            found[who][f"{case}_tokens_per_s"] = best
    ratios = [found["ropewalk"][f"{c}_tokens_per_s"] / found["transformers"][f"{c}_tokens_per_s"] for c in cases]
    finish(
        "cpu_step",
        ours=found["ropewalk"],
        peers={"transformers": found["transformers"]},
        ratios={"transformers": min(ratios)},
        quality={"last_loss": losses, "ratios": dict(zip(cases, ratios, strict=True))},
    )


if __name__ == "__main__":
    main()
