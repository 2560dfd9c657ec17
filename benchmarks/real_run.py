"""A real run: text from this machine, prepared, trained on for so many tokens and evaluated on what was held out.

    make bench NAME=real_run ARGS="--text ../books"                             124M on 252 M tokens, on a GPU
    make bench NAME=real_run ARGS="--size 350M --tokens 50.4 --precision fp8"

The text is the Python code of the standard library and of what is installed, up to `--code` megabytes, and the files of
the folders given by `--text`, which is prose for the curve to be worth something. `gather` collects it into one folder,
where another machine may train on it. Told: the loss and the bits per byte of held-out rows by step, those of held-out
documents at the end beside what xz makes of them, tokens a second, and the share of the time that steps wait for data.

Two runs that differ in `--precision`, `--optimizer` or `--activations` alone read the same rows in the same order:
their curves show what the choice costs. How far two curves differ by chance, a run with another `--seed` tells: other
weights at the start and another order of the same text, with the same text held out.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import statistics
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import ROOT, finish

sys.path.insert(0, str(ROOT))

from ropewalk import flow
from ropewalk.checkpoint.config import Checkpoints
from ropewalk.cli.progress_lines import Console
from ropewalk.evaluate.config import Evaluate
from ropewalk.flow.recipe import Recipe
from ropewalk.flow.verbs import recipe_from
from ropewalk.load.config import Load
from ropewalk.model.sizes import size_of
from ropewalk.plan.config import Layout, Parallel
from ropewalk.prepare.config import Prepare, Source, Tokenizer
from ropewalk.train.config import Optimizer, Schedule, Train

RATES = {"124M": 8e-4, "350M": 3e-4}
"""The highest learning rate by size; about those of Brown et al. 2020."""
TEXTS = (".txt", ".md", ".jsonl", ".gz")


def gather(folder: Path, texts: list[Path], *, megabytes: float) -> None:
    """The text, as files of JSON lines; nothing where they are already."""
    folder.mkdir(parents=True, exist_ok=True)
    code = folder / "python.jsonl.gz"
    if not code.exists():
        with gzip.open(code, "wt", compresslevel=1, encoding="utf-8") as out:
            for path, text in sources(megabytes * 1e6):
                out.write(json.dumps({"text": text, "file": path.name}) + "\n")
    for place in texts:
        for path in sorted(place.rglob("*") if place.is_dir() else [place]):
            if path.suffix in TEXTS:
                (folder / "prose").mkdir(exist_ok=True)
                (folder / "prose" / path.name).write_bytes(path.read_bytes())


def sources(most: float) -> Iterator[tuple[Path, str]]:
    """Python files in an order that depends on their content alone, up to so many bytes."""
    places = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    found: dict[str, tuple[Path, str]] = {}
    for path in (path for place in places for path in Path(place).rglob("*.py")):
        data = path.read_bytes()
        if 500 < len(data) < 400_000:
            found[hashlib.sha256(data).hexdigest()] = path, data.decode("utf-8", errors="replace")
    for _, (path, text) in sorted(found.items()):
        most -= len(text)
        if most < 0:
            return
        yield path, text


def recipe_of(options: argparse.Namespace) -> Recipe:
    size, data = size_of(options.size), options.folder / "data"
    rows = options.rows or 2 * size.batch_size
    tokens = rows * size.sequence_length
    steps = round(options.tokens * 1e6 / tokens)
    kinds = [Source(name="python", domain="code", paths=(str(data / "python.jsonl.gz"),))]
    if (data / "prose").exists():
        kinds.append(Source(name="prose", domain="prose", paths=(str(data / "prose"),)))
    choices = [
        options.precision,
        options.optimizer,
        options.activations,
        options.fp8,
        f"seed-{options.seed}" * (options.seed != 1),
    ]
    return Recipe(
        name="-".join([options.size.lower(), *(choice for choice in choices if choice)]),
        seed=1,
        prepare=Prepare(
            sources=tuple(kinds),
            validation_share=0.01,
            tokenizer=Tokenizer(vocab_size=size.vocabulary, train_bytes=60_000_000),
        ),
        load=Load(sequence_length=size.sequence_length),
        model=size.model,
        plan=Layout(device=options.device, microbatch_size=rows, fp8=options.fp8 or "quicker"),
        parallel=Parallel(saved_activations=options.activations or "whole"),
        train=Train(
            seed=options.seed,
            steps=steps,
            batch_size=rows,
            precision=options.precision,
            validate_every_steps=max(1, steps // 12),
            validation_sequences=max(1, 131072 // size.sequence_length),
            log_every_steps=max(1, steps // 100),
            optimizer=Optimizer(kind=options.optimizer, beta2=0.95, weight_decay=0.1),
            schedule=Schedule(
                peak_lr=options.lr or RATES.get(options.size, 2e-4), warmup_steps=max(1, round(steps * options.warmup))
            ),
        ),
        checkpoint=Checkpoints(save_every_steps=max(1, steps // 2)),
        evaluate=Evaluate(max_bytes=options.evaluate_bytes, samples=2),
    )


def curve(run: Path) -> dict[str, Any]:
    """What the events of a run tell."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    # The first ones compile.
    steady = steps[len(steps) // 10 :]
    return {
        "training": [[event["step"], round(event["loss"], 4)] for event in steps],
        "validation": [
            [event["step"], round(event["loss"], 4), round(event["bits_per_byte"], 4)]
            for event in events
            if event["kind"] == "validation"
        ],
        "tokens": steps[-1]["tokens"],
        "tokens_s": statistics.median(event["tokens_per_s"] for event in steady),
        "data_wait_percent": 100 * sum(e["data_wait_s"] for e in steady) / sum(e["step_s"] for e in steady),
        "mfu": statistics.median(event["mfu"] or 0.0 for event in steady),
        "memory_gb": steps[-1]["memory_bytes"] / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["gather", "train"], default="train")
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench" / "real")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files or folders with prose")
    parser.add_argument("--code", type=float, default=58, help="megabytes of Python code")
    parser.add_argument("--size", default="124M")
    parser.add_argument("--tokens", type=float, default=251.7, help="millions to train on")
    parser.add_argument("--rows", type=int, default=0, help="of a step; twice the size's")
    parser.add_argument("--lr", type=float, default=0.0, help="the highest; that of the size")
    parser.add_argument("--warmup", type=float, default=0.05, help="share of the steps until it is reached")
    parser.add_argument("--precision", default="bf16-pure")
    parser.add_argument("--fp8", choices=["quicker", "all"], help="which products are in 8 bits")
    parser.add_argument("--seed", type=int, default=1, help="of weights and of the order of the text")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--activations", default="", help="how activations are kept: `8-bit`, say")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--evaluate-bytes", type=int, default=4_000_000)
    options = parser.parse_args()
    if missing := [str(place) for place in options.text if not place.exists()]:
        parser.error(f"no such file or folder: {', '.join(missing)}")
    import torch  # not above: workers of `prepare` import this file

    if options.what == "train" and options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; say --device cpu, and --size, --tokens and --rows that a CPU can train")
    gather(options.folder / "data", options.text, megabytes=options.code)
    if options.what == "gather":
        return
    recipe, runs = recipe_of(options), options.folder / "runs"
    summary = flow.run(recipe_from(recipe), runs=runs, new=True, progress=Console())
    told = curve(runs / recipe.name)
    prepared = json.loads((runs / recipe.name / "stages" / "prepare.json").read_text())["result"]
    quality = {key: value for key, value in told.items() if isinstance(value, list)}
    finish(
        "real_run",
        ours={key: value for key, value in told.items() if not isinstance(value, list)}
        | {"epochs": told["tokens"] / prepared["train_tokens"]}
        | {"bits_per_byte": summary["bits_per_byte"], "xz_bits_per_byte": summary["xz_bits_per_byte"]},
        peers={},
        ratios={"xz": summary["xz_bits_per_byte"] / summary["bits_per_byte"]},
        quality=quality | {"run": recipe.name, "prepared": prepared},
    )


if __name__ == "__main__":
    main()
