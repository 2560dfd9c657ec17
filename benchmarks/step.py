"""One training step on this machine: ours, a plain PyTorch loop and Hugging Face transformers, same shapes and tokens.

    make bench NAME=step            all cases, a few minutes
    python benchmarks/step.py --quick

Each contender trains a decoder of the same layers, width, heads and feed-forward size with AdamW, clipping and bfloat16
matrix products, and reports tokens a second (median of the steps) and its last loss on the same random tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

CASES = {"4m": (4, 256, 4, 704, 16, 256), "20m": (6, 512, 8, 1408, 8, 512)}
"""layers, width, heads, hidden, rows, tokens a row."""
VOCABULARY = 4096


def tokens(case: str) -> torch.Tensor:
    rows, length = CASES[case][4:]
    return torch.randint(0, VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(0))


def measure(step: Callable[[], float], case: str, steps: int) -> dict[str, float]:
    rows, length = CASES[case][4:]
    seconds = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
    return {"tokens_per_s": rows * length / statistics.median(seconds[2:]), "loss": loss}


def ours(case: str) -> Callable[[], float]:
    from ropewalk.load.batch import Batch
    from ropewalk.model.config import Model
    from ropewalk.model.decoder import build
    from ropewalk.model.spec import resolve
    from ropewalk.parallel.apply import apply
    from ropewalk.plan.plan import Plan
    from ropewalk.train.config import Optimizer
    from ropewalk.train.optim.optimizers import make_optimizer

    layers, width, heads, hidden, rows, length = CASES[case]
    settings = Model(layers=layers, width=width, heads=heads, mlp_width=hidden)
    model = build(resolve(settings, vocabulary=VOCABULARY, sequence_length=length), seed=0)
    plan = Plan(device="cpu", precision="bf16", batch_size=rows, microbatch_size=rows)
    executor = apply(plan, model, None, lambda parameters, _: make_optimizer(parameters, Optimizer()), clip_norm=1.0)
    batch = Batch.of_rows(tokens(case))
    return lambda: executor.step(batch, lr=1e-3).loss.item()


def plain(case: str) -> Callable[[], float]:
    """What one writes by hand: torch's own encoder layers with a causal mask, learned positions, tied head."""
    layers, width, heads, hidden, _, length = CASES[case]
    # Two matrices of 1.5 x hidden hold as many numbers as the three of a gated feed-forward part.
    block = torch.nn.TransformerEncoderLayer(
        width, heads, hidden * 3 // 2, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, bias=False
    )
    body = torch.nn.TransformerEncoder(block, layers, norm=torch.nn.LayerNorm(width), enable_nested_tensor=False)
    embedding = torch.nn.Embedding(VOCABULARY, width)
    position = torch.nn.Embedding(length, width)
    torch.nn.init.normal_(embedding.weight, std=0.02)
    parameters = [*body.parameters(), *embedding.parameters(), *position.parameters()]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(length)

    def logits(inputs: torch.Tensor) -> torch.Tensor:
        hidden_states = body(embedding(inputs) + position.weight, mask=mask, is_causal=True)
        return F.linear(hidden_states, embedding.weight)

    return loop(logits, parameters, tokens(case))


def transformers(case: str) -> Callable[[], float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, heads, hidden, _, length = CASES[case]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.train()
    return loop(lambda inputs: model(input_ids=inputs).logits, list(model.parameters()), tokens(case))


def loop(
    logits: Callable[[torch.Tensor], torch.Tensor], parameters: list[torch.nn.Parameter], data: torch.Tensor
) -> Callable[[], float]:
    """Steps on rows of `data` as one writes them by hand."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            scores = logits(data[:, :-1])
        loss = F.cross_entropy(scores.float().flatten(0, 1), data[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


CONTENDERS = {"ropewalk": ours, "plain-pytorch": plain, "transformers": transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    cases = ["4m"] if options.quick else list(CASES)
    if options.contender:
        make = CONTENDERS[options.contender]
        print(json.dumps({case: measure(make(case), case, options.steps) for case in cases}))
        return

    from harness import call, environment, finish

    flags = ["--quick"] * options.quick + ["--steps", "3" if options.quick else str(options.steps)]
    pythons = {
        "ropewalk": sys.executable,
        "plain-pytorch": sys.executable,
        "transformers": environment("transformers", ["torch==2.13.0", "transformers"]),
    }
    found = {who: call(python, __file__, "--contender", who, *flags) for who, python in pythons.items()}
    speed = {who: {case: figures[case]["tokens_per_s"] for case in cases} for who, figures in found.items()}
    mine = speed.pop("ropewalk")
    ratios = {who: min(mine[case] / figures[case] for case in cases) for who, figures in speed.items()}
    quality = {who: {case: round(figures[case]["loss"], 4) for case in cases} for who, figures in found.items()}
    finish("step", ours=mine, peers=speed, ratios=ratios, quality={"loss_after_same_steps": quality})


if __name__ == "__main__":
    main()
