"""Greedy generation for many uneven prompts: ours and transformers, eager, with a static cache, and compiled.

    make bench NAME=generate            on a GPU: 1.36B, 64 prompts x 256 new tokens; on a CPU: 30M, 64 x 64
    python benchmarks/generate.py --quick

All have the same weights, which ours exports to a Hugging Face directory, and the same device: bfloat16 on a GPU,
float32 on a CPU. transformers gets all prompts as one batch, padded on the left. Figures are new tokens per second,
prefill included, of the best of several runs after one that is not timed; on a CPU per second of its time with one
thread, which other programs disturb least. The limit is that of memory: in a decode step the weights and all keys and
values so far are read once.

`few_shot` has prompts that differ in their last 8 tokens, and 16 new tokens: ours computes what they share once.

Quality: in float32, tokens are equal until the two best logits differ by less than 1e-4, judged at the first token that
differs by logits of the whole text without a cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Tokens = list[list[int]]
Generate = Callable[[Tokens, int], Tokens]
WAYS = ("eager", "static", "compiled")
PEAK_BYTES = {"cuda": 4.2e12, "cpu": None}
"""Bytes per second; an H200 copies that many. A CPU is measured."""
CLOSE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is generated, with random weights."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    length: int
    prompts: int
    longest: int
    """Tokens of a prompt; the shortest has 8."""
    new: int
    runs: int
    ways: tuple[str, ...] = WAYS


CASES = {
    "1.36B": Case(
        layers=24, width=2048, heads=16, hidden=5632, vocabulary=32000, length=2048, prompts=64, longest=512,
        new=256, runs=3,
    ),
    "30M": Case(
        layers=8, width=512, heads=8, hidden=1408, vocabulary=8192, length=1024, prompts=64, longest=128, new=64,
        runs=1,
    ),
    "quick": Case(
        layers=4, width=256, heads=4, hidden=704, vocabulary=4096, length=512, prompts=32, longest=64, new=48, runs=2,
    ),
}  # fmt: skip


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def clock() -> float:
    """Seconds."""
    return time.perf_counter() if device() == "cuda" else time.process_time()


def prompts_of(case: Case) -> Tokens:
    numbers = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, case.longest + 1, (case.prompts,), generator=numbers).tolist()
    return [torch.randint(1, case.vocabulary, (length,), generator=numbers).tolist() for length in lengths]


def own_model(case: Case) -> Any:
    from ropewalk.model.config import Model
    from ropewalk.model.decoder import build
    from ropewalk.model.spec import resolve

    settings = Model(
        layers=case.layers, width=case.width, heads=case.heads, mlp_width=case.hidden, tie_embeddings=False
    )
    model = build(resolve(settings, vocabulary=case.vocabulary, sequence_length=case.length), seed=0)
    with torch.no_grad():
        # Initial weights would repeat one token.
        for name, parameter in model.named_parameters():
            parameter.mul_(3.0 if parameter.dim() == 2 and "blocks" in name else 1.0)
    return model


def export(case: Case, folder: Path) -> None:
    """Writes a directory for transformers."""
    from safetensors.torch import save_file

    from ropewalk.model.hugging_face.configs import config_of
    from ropewalk.model.hugging_face.convert import to_hugging_face

    model = own_model(case)
    weights = to_hugging_face(model.state_dict(), model.spec, "llama")
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    config = config_of(model.spec, "llama", end_of_text=0, dtype="float32")
    (folder / "config.json").write_text(json.dumps(config))


def ours(case: Case, dtype: torch.dtype) -> Generate:
    from ropewalk.evaluate.generate import generate
    from ropewalk.evaluate.task import Sampling

    model = own_model(case).to(device(), dtype)
    return lambda prompts, new: generate(model, prompts, Sampling(new), seeds=range(len(prompts)), end=None)


def theirs(folder: Path, way: str, dtype: torch.dtype) -> Generate:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device()).eval()
    model.generation_config.eos_token_id = None
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    if way != "eager":
        settings |= {"cache_implementation": "static", "disable_compile": way == "static" or device() == "cpu"}
    if way == "compiled" and device() == "cpu":  # transformers compiles by itself on a GPU
        model.forward = torch.compile(model.forward)

    def run(prompts: Tokens, new: int) -> Tokens:
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device())
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device())
        with torch.no_grad():
            found = model.generate(input_ids=padded, attention_mask=mask, max_new_tokens=new, **settings)
        return found[:, width:].tolist()

    return run


def measured(generate: Generate, prompts: Tokens, new: int, *, runs: int) -> tuple[float, Tokens]:
    """New tokens per second, and the tokens."""
    # Compiles, captures, and loads kernels; an eager model on a CPU does without.
    generate(prompts, new if runs > 1 else 2)
    seconds = []
    for _ in range(runs):
        begin = clock()
        found = generate(prompts, new)
        seconds.append(clock() - begin)
    return len(prompts) * new / min(seconds), found


def differences(case: Case, folder: Path, own: Tokens, other: Tokens) -> dict[str, float]:
    """Prompts whose tokens differ, and the largest gap of the two best logits where they first do."""
    from transformers import AutoModelForCausalLM

    model, gaps = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device()).eval(), []
    for prompt, one, two in zip(prompts_of(case), own, other, strict=True):
        place = next((place for place in range(case.new) if one[place] != two[place]), None)
        if place is not None:
            with torch.no_grad():
                text = torch.tensor([prompt + one[:place]], device=device())
                best = model(input_ids=text).logits[0, -1].topk(2).values
            gaps.append(float(best[0] - best[1]))
    distinct = len({token for row in own for token in row})
    return {"differing_prompts": len(gaps), "largest_gap": max(gaps, default=0.0), "distinct_tokens": distinct}


def bandwidth() -> float:
    """Bytes per second that this device reads."""
    if peak := PEAK_BYTES[device()]:
        return peak
    numbers, seconds = torch.ones(1 << 27), []
    for _ in range(5):
        begin = clock()
        numbers.sum()
        seconds.append(clock() - begin)
    return numbers.nbytes / min(seconds)


def limit(case: Case, *, size: int) -> float:
    """New tokens per second if decode steps only read the weights, and the keys and values so far."""
    weights = case.layers * (4 * case.width**2 + 3 * case.width * case.hidden) + case.width * case.vocabulary
    before = sum(map(len, prompts_of(case)))
    cached = [2 * case.layers * case.width * (before + step * case.prompts) for step in range(case.new)]
    read = size * (case.new * weights + sum(cached))
    return case.prompts * case.new / (read / bandwidth())


def contend(who: str, case: Case, folder: Path) -> dict[str, Any]:
    """A contender's figures."""

    def opened(dtype: torch.dtype) -> Generate:
        return ours(case, dtype) if who == "ropewalk" else theirs(folder, who, dtype)

    generate, prompts, kept = opened(precision()), prompts_of(case), folder / "ropewalk-tokens.json"
    speed, tokens = measured(generate, prompts, case.new, runs=case.runs + (who == "compiled"))
    found: dict[str, Any] = {"tokens_per_s": speed}
    if who in ("ropewalk", "eager"):
        few_shot = [prompts_of(case)[0] * 2 + prompt for prompt in (each[:8] for each in prompts)]
        found["few_shot_tokens_per_s"] = measured(generate, few_shot, 16, runs=case.runs)[0]
        if precision() != torch.float32:
            tokens = opened(torch.float32)(prompts, case.new)
    if who == "ropewalk":
        kept.write_text(json.dumps(tokens))
    if who == "eager":
        found |= differences(case, folder, json.loads(kept.read_text()), tokens)
    return found


def precision() -> torch.dtype:
    return torch.bfloat16 if device() == "cuda" else torch.float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--contender", choices=("ropewalk", *WAYS))
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if device() == "cpu":
        torch.set_num_threads(1)
    if options.contender:
        print(json.dumps(contend(options.contender, CASES[options.case], options.folder)))
        return

    from harness import call, environment, finish

    python = environment("generate", [f"torch=={torch.__version__.split('+')[0]}", "transformers", "numpy"])
    name = "quick" if options.quick else "1.36B" if device() == "cuda" else "30M"
    case = CASES[name]
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        export(case, folder)
        for who in ("ropewalk", *case.ways):
            start = sys.executable if who == "ropewalk" else python
            results[who] = call(start, __file__, "--contender", who, "--case", name, "--folder", str(folder))
            print(who, results[who], file=sys.stderr)
    bound = limit(case, size=precision().itemsize)
    speed = {who: {key: each[key] for key in each if key.endswith("per_s")} for who, each in results.items()}
    own = speed.pop("ropewalk")
    quality = {key: value for key, value in results["eager"].items() if not key.endswith("per_s")}
    quality["equal_but_for_ties"] = quality["largest_gap"] < CLOSE
    finish(
        "generate",
        ours={**own, "limit_tokens_per_s": bound, "share_of_limit": own["tokens_per_s"] / bound},
        peers={f"transformers {way}": figures for way, figures in speed.items()},
        ratios={
            "transformers": own["tokens_per_s"] / max(each["tokens_per_s"] for each in speed.values()),
            "few-shot": own["few_shot_tokens_per_s"] / speed["eager"]["few_shot_tokens_per_s"],
        },
        quality={"case": name, "dtype": str(precision()).removeprefix("torch."), **quality},
    )


if __name__ == "__main__":
    main()
