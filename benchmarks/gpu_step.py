"""Steps on one GPU by ours, by nanoGPT and by compiled transformers, in turns in one run; every turn a process.

    make bench NAME=gpu_step ARGS="--nanogpt ../nanoGPT"

Contenders train the same shapes on random rows, with AdamW and clipping, and do not wait for the GPU between steps.
Rows are as many for all, or as many as are best for each: `1.3B, best rows` has 33 for ours, whose tiles keep the 132
processors of an H100 or H200 busy to the end, and the better of 16 and 28 for the peer, which has no memory for 32.
`packed` are ours with several documents a row that do not see each other, to be compared with ours without. nanoGPT is
a script rather than a package: give the folder of a clone; without it its cases are left out. Ours computes with
bfloat16 weights beside float32 ones for the optimizer (`bf16-pure`), or in 8 bits; the peers with float32 weights under
autocast, as their users do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, call, finish

PEAK_FLOPS = 989.4e12
"""Of an H100 and an H200 in bfloat16 without sparsity."""
WARMUP = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes, and who trains them."""

    size: str
    peer: str | None
    """`nanogpt`, `transformers`, or None for ours alone."""
    bias: bool | None = None
    """Whether linear maps have one; None: as the size has it."""
    rows: int | None = None
    """Of ours, where they are not the size's."""
    peer_rows: tuple[int | None, ...] = (None,)
    """Of the peer; the quickest counts."""
    precision: str = "bf16-pure"
    optimizer: str = "adamw"
    recompute: str = "none"
    documents: str = "ignore"
    """`separate`: a token sees its own document alone, some 500 tokens of a row."""
    steps: int = 12


CASES = {
    "124M": Case(size="124M", peer="nanogpt"),
    "124M without biases": Case(size="124M", peer="nanogpt", bias=False),
    "1.3B": Case(size="1.3B", peer="transformers"),
    "1.3B, best rows": Case(size="1.3B", peer="transformers", rows=33, peer_rows=(None, 28)),
    "1.3B fp8": Case(size="1.3B", peer="transformers", rows=33, peer_rows=(None, 28), precision="fp8"),
    "7B": Case(size="7B", peer=None, rows=4, optimizer="adamw-8bit", steps=8),
    "124M packed": Case(size="124M", peer=None, documents="separate"),
    "1.3B packed": Case(size="1.3B", peer=None, documents="separate"),
}
AIMED_AT = "124M", "1.3B", "1.3B, best rows", "1.3B fp8", "7B"
"""About ten minutes on an H200."""
Step = Callable[[], torch.Tensor]


def shapes(case: Case) -> tuple[Any, Any]:
    from ropewalk.model.sizes import size_of
    from ropewalk.model.spec import resolve

    size = size_of(case.size)
    model = dataclasses.replace(size.model, documents=case.documents)
    model = model if case.bias is None else dataclasses.replace(model, bias=case.bias)
    return size, resolve(model, vocabulary=size.vocabulary, sequence_length=size.sequence_length)


def ropewalk(case: Case, rows: int) -> Step:
    from ropewalk.plan.plan import Plan
    from ropewalk.train.config import Optimizer
    from ropewalk.train.measure.step_benchmark import own_step

    plan = Plan(
        device="cuda",
        precision=case.precision,  # type: ignore[arg-type]
        batch_size=rows,
        microbatch_size=rows,
        recompute=case.recompute,  # type: ignore[arg-type]
        compile=True,
    )
    optimizer = Optimizer(kind=case.optimizer)  # type: ignore[arg-type]
    return own_step(shapes(case)[1], plan, device=torch.device("cuda", 0), optimizer=optimizer, clip_norm=1.0)


def nanogpt(case: Case, rows: int) -> Step:
    from model import GPT, GPTConfig

    _, spec = shapes(case)
    torch.backends.cuda.matmul.allow_tf32 = True  # as its train.py
    torch.backends.cudnn.allow_tf32 = True
    config = GPTConfig(
        block_size=spec.sequence_length,
        vocab_size=spec.vocabulary,
        n_layer=spec.layers,
        n_head=spec.heads,
        n_embd=spec.width,
        dropout=0.0,
        bias=spec.bias,
    )
    model = GPT(config).cuda()
    optimizer = model.configure_optimizers(weight_decay=0.1, learning_rate=1e-4, betas=(0.9, 0.95), device_type="cuda")
    compiled = torch.compile(model)
    inputs, targets = (torch.randint(spec.vocabulary, (rows, spec.sequence_length), device="cuda") for _ in range(2))

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            _, loss = compiled(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def transformers(case: Case, rows: int) -> Step:
    from ropewalk.plan.plan import Plan
    from ropewalk.train.config import Optimizer
    from ropewalk.train.measure.hf_baseline import transformers_step

    plan = Plan(device="cuda", precision="bf16", batch_size=rows, microbatch_size=rows)
    spec, device = shapes(case)[1], torch.device("cuda", 0)
    return transformers_step(spec, plan, device=device, optimizer=Optimizer(), clip_norm=1.0, compiled=True)


MAKERS = {"ropewalk": ropewalk, "nanogpt": nanogpt, "transformers": transformers}


def measure(case: Case, who: str, rows: int | None) -> dict[str, float]:
    """Tokens a second, by the GPU's clock over all steps, and the most memory."""
    size, spec = shapes(case)
    rows = rows or size.batch_size
    step = MAKERS[who](case, rows)
    for _ in range(WARMUP):
        step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(case.steps):
        loss = step()
    end.record()
    torch.cuda.synchronize()
    speed = 1e3 * case.steps * rows * spec.sequence_length / start.elapsed_time(end)
    return {
        "rows": rows,
        "tokens_s": speed,
        "mfu": speed * spec.flops_per_token() / PEAK_FLOPS,
        "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
        "loss": loss.item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nanogpt", type=Path, default=ROOT / ".bench" / "nanogpt", help="folder of its model.py")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(AIMED_AT), help="without it those with aims")
    parser.add_argument("--turns", type=int, default=1, help="of each contender; the median counts")
    parser.add_argument("--contender", choices=MAKERS)
    parser.add_argument("--rows", type=int, help="of the contender")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_step wants a CUDA GPU; cpu_step is its sibling for CPUs")
    if options.contender:
        sys.path[:0] = [str(ROOT), str(options.nanogpt)]  # ours may not be installed
        case, rows = CASES[options.cases[0]], options.rows
        try:
            print(json.dumps(measure(case, options.contender, rows)))
        except torch.OutOfMemoryError:
            print(json.dumps({"rows": rows, "tokens_s": 0.0, "memory": "more than this GPU has"}))
        return
    ours: dict[str, float] = {}
    peers: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}
    quality: dict[str, object] = {}
    known: dict[tuple[object, ...], dict[str, float]] = {}  # of peers, by what they train and their turn
    for name in options.cases:
        case = CASES[name]
        if case.peer == "nanogpt" and not (options.nanogpt / "model.py").exists():
            print(f"{name}: left out, no model.py of nanoGPT in {options.nanogpt} (--nanogpt)", file=sys.stderr)
            continue
        contenders = [("ropewalk", case.rows), *((case.peer, rows) for rows in case.peer_rows if case.peer)]
        found: dict[tuple[str, int | None], list[dict[str, float]]] = {each: [] for each in contenders}
        for turn in range(options.turns):
            for who, rows in contenders:
                flags = ["--contender", who, "--cases", name, "--nanogpt", str(options.nanogpt)]
                flags += ["--rows", str(rows)] if rows else []
                same = (who, name) if who == "ropewalk" else (who, case.size, case.bias, rows)
                if (*same, turn) not in known:
                    known[*same, turn] = call(sys.executable, __file__, *flags)
                found[who, rows].append(known[*same, turn])
                print(name, who, found[who, rows][-1], file=sys.stderr, flush=True)
        speeds = [statistics.median(turn["tokens_s"] for turn in turns) for turns in found.values()]
        ours[name] = speeds[0]
        quality[name] = [{"who": who} | turn for (who, _), turns in found.items() for turn in turns]
        best = max(speeds[1:], default=0.0)  # 0: no peer, or none that had the memory
        if case.peer and best:
            peers.setdefault(case.peer, {})[name] = best
            ratios[f"{case.peer}, {name}"] = speeds[0] / best
    finish("gpu_step", ours=ours, peers=peers, ratios=ratios, quality=quality)


if __name__ == "__main__":
    main()
