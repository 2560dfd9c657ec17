"""Sequences drawn by their loss (iCache) against each once an epoch: hit rate and loss at equal steps.

    make bench NAME=importance
    python benchmarks/importance.py --quick
    python benchmarks/importance.py --steps 2000 --seeds 5

The same recipe on a part of the Python library of this machine, once as it is and once with `[load.importance]`, whose
memory holds a tenth of the sequences and packages of a fiftieth. The hit rate of importance is counted by the run: the
sequences for which nothing was read. Those of uniform reading are those of its own order in a cache of the same size
that keeps what came first (MinIO of CoorDL), or by LRU. Reads are counted too, of single sequences and of packages.
No other package draws by importance in training of language models; the peer is ropewalk's own uniform order.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import finish

from ropewalk import flow
from ropewalk.base.events import events_path, read_events
from ropewalk.load.cache.simulate import hits
from ropewalk.load.loader import Loader

LENGTH, BATCH, VALIDATE = 64, 16, 64
HELD, PACKED, PACKAGE = 0.1, 0.02, 0.005
"""Memory for sequences and for packages, and the size of a package, as shares of the data."""
RECIPE = """\
name = "importance"
[[prepare.sources]]
name = "python"
paths = ["corpus/*.py"]
[prepare]
validation_share = 0.1
tokenizer.vocab_size = 1024
[load]
sequence_length = 64
[model]
layers = 2
width = 96
heads = 4
[train]
batch_size = 16
log_every_steps = 10
validation_sequences = 128
threads = 1
schedule = { peak_lr = 3e-3, warmup_steps = 20, shape = "cosine" }
[checkpoint]
save_every_steps = 100000
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    steps, seeds = (120, 1) if given.quick else (given.steps, given.seeds)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        prepared = prepare(Path(folder))
        uniform = [train("uniform", seed, steps, ()) for seed in range(seeds)]
        sequences, row_bytes = sizes(prepared)
        settings = memory(sequences * row_bytes)
        drawn = [train("importance", seed, steps, settings) for seed in range(seeds)]
        cached = uniform_hits(prepared, steps, share=HELD + PACKED)
    compare(uniform, drawn, cached, sequences=sequences, steps=steps)


def prepare(folder: Path) -> Path:
    """Half a megabyte of the standard library, as tokens."""
    (folder / "corpus").mkdir()
    library = Path(os.__file__).parent
    for package in ("asyncio", "json"):
        for path in sorted((library / package).glob("*.py")):
            (folder / "corpus" / f"{package}-{path.name}").write_bytes(path.read_bytes())
    (folder / "importance.toml").write_text(RECIPE)
    return Path(flow.prepare("importance.toml")["folder"])


def memory(data_bytes: int) -> tuple[str, ...]:
    shares = {"memory_bytes": HELD, "package_memory_bytes": PACKED, "package_bytes": PACKAGE}
    return tuple(f"load.importance.{key}={int(share * data_bytes)}" for key, share in shares.items())


def train(name: str, seed: int, steps: int, settings: tuple[str, ...]) -> dict[str, Any]:
    """The curve of the validation loss of a run, and what its cache did."""
    run = f"{name}-{seed}"
    often = max(1, steps // 16)
    words = (f"name={run}", f"train.seed={seed}", f"train.steps={steps}", f"train.validate_every_steps={often}")
    flow.train("importance.toml", (*words, *settings))
    events = list(read_events(events_path(Path("runs") / run)))
    curve = {event["step"]: event["loss"] for event in events if event["kind"] == "validation"}
    counts = [event["importance"] for event in events if event["kind"] == "load_cached"]
    print(run, "validation loss", f"{[*curve.values()][-1]:.4f}", counts[-1] if counts else "", flush=True)
    return {"curve": curve, "counts": counts[-1] if counts else {}}


def loader_of(prepared: Path) -> Loader:
    return Loader(prepared, sequence_length=LENGTH, batch_size=BATCH, seed=0)


def sizes(prepared: Path) -> tuple[int, int]:
    """How many sequences there are, and the bytes of one."""
    loader = loader_of(prepared)
    found = sum(loader.order.source_rows.values()), loader._form.row_bytes
    loader.close()
    return found


def uniform_hits(prepared: Path, steps: int, *, share: float) -> dict[str, float]:
    """Hits of caches of `share` of the sequences in the order that the uniform runs read."""
    loader = loader_of(prepared)
    order = loader.order
    read = order.rows(0, steps * BATCH).begin // LENGTH
    capacity = round(share * sum(order.source_rows.values()))
    loader.close()
    accesses = read.astype(np.int64)
    return {rule: float(hits(accesses, capacity=capacity, rule=rule).mean()) for rule in ("keep", "lru")}


def compare(
    uniform: list[dict[str, Any]],
    drawn: list[dict[str, Any]],
    cached: dict[str, float],
    *,
    sequences: int,
    steps: int,
) -> None:
    """Prints the curves and the closing line."""
    epochs = steps * BATCH / sequences
    print(f"{sequences:,} sequences of {LENGTH} tokens, {steps} steps of {BATCH}: {epochs:.1f} epochs; "
          f"mean and half range of {len(uniform)} seeds")  # fmt: skip
    print(f"{'step':>6} {'uniform':>16} {'importance':>16}")
    for step in uniform[0]["curve"]:
        both = [[run["curve"][step] for run in runs] for runs in (uniform, drawn)]
        print(f"{step:>6}", *(f"{statistics.mean(v):>9.4f} ±{(max(v) - min(v)) / 2:.4f}" for v in both))
    final = {name: statistics.mean([*run["curve"].values()][-1] for run in runs) for name, runs in
             (("uniform", uniform), ("importance", drawn))}  # fmt: skip
    counts = {key: statistics.mean(run["counts"][key] for run in drawn) for key in drawn[0]["counts"]}
    ours = {"hit_rate": counts["hit_rate"], "loss": final["importance"], "random_reads": counts["random_reads"]}
    asked = float(steps * BATCH)
    peers = {
        f"uniform, {rule}": {"hit_rate": rate, "loss": final["uniform"], "random_reads": (1 - rate) * asked}
        for rule, rate in cached.items()
    }
    best = max(1e-9, *cached.values())
    ratios = {"hit rate": counts["hit_rate"] / best, "loss": final["uniform"] / final["importance"]}
    finish("importance", ours=ours, peers=peers, ratios=ratios, quality={"counts": counts, "epochs": epochs})


if __name__ == "__main__":
    main()
