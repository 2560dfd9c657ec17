"""A 7B model over eight NCCL ranks that share one GPU: trained, saved, killed, restored, continued, evaluated.

    python benchmarks/larger.py --folder /a/disk/with/100/GB
    python benchmarks/larger.py --size tiny --device cpu --ranks 2       the same path with gloo in a minute

The verbs a user types do all of it: `ropewalk prepare`, `train` and `evaluate`, started on every rank with the
environment that torchrun gives. Parameters, gradients and moments are sharded (ZeRO-3), the model computes in bfloat16
beside float32 masters (`bf16-pure`), moments have 8 bits (`adamw-8bit`). The corpus is Python's standard library.

Phases, which `--phases` may name one by one, over the same folder:

1. prepare: a tokenizer with the model's vocabulary, and the shards.
2. train: five steps, a checkpoint, and all ranks are killed when it is durable.
3. continue: new processes restore it and make the sixth and last step, with a checkpoint at its end. Where the disk has
   no room for two, the first is deleted as soon as it is restored.
4. evaluate: held-out text, under the same plan.

Told are seconds, losses, the checkpoint's bytes, the most memory that each rank's allocator held, and the most that the
whole GPU had in use (`nvidia-smi`, twice a second), which includes CUDA contexts and NCCL's buffers. Speed is that of
ranks that talk over sockets on one machine; a cluster has another.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import ROOT, finish
from ranks import SHARED, gpus, launch, sharing

PHASES = ("prepare", "train", "continue", "evaluate")
NAME, STEPS, SAVED = "larger", 6, 5
SIZES = {
    # Llama 2 7B (Touvron et al. 2023). Rows are short: weights and gradients are what travels.
    "7B": {"layers": 32, "width": 4096, "heads": 32, "mlp_width": 11008, "vocabulary": 32000, "length": 256},
    "tiny": {"layers": 2, "width": 64, "heads": 4, "mlp_width": 128, "vocabulary": 512, "length": 64},
}
RECIPE = """\
name = "{name}"
seed = 1

[[prepare.sources]]
name = "code"
domain = "code"
paths = ["python:stdlib"]

[prepare.deduplicate.near]
kind = "off"

[prepare.tokenizer]
vocab_size = {vocabulary}

[load]
sequence_length = {length}

[model]
layers = {layers}
width = {width}
heads = {heads}
mlp_width = {mlp_width}
tie_embeddings = false

[plan]
device = "{device}"
microbatch_size = 1
# Sockets are what a step waits for.
compile = "off"
tuning = "off"

[parallel]
shard = {ranks}
zero = 3

[train]
steps = {steps}
batch_size = {ranks}
precision = "bf16-pure"
log_every_steps = 1
validate_every_steps = 0
validation_sequences = {ranks}

[train.optimizer]
kind = "adamw-8bit"

[train.schedule]
peak_lr = 1e-4

[train.faults]
# --limit bounds a phase.
hang_s = 0

[checkpoint]
save_every_steps = {saved}
# One copy of the state in the host's memory instead of two.
write = "blocking"
keep_last = 1
keep_verified = 0

[evaluate]
max_bytes = {max_bytes}
# A drawn token would gather the whole model once more.
samples = 0
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--size", choices=SIZES, default="7B")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="where the run lies and stays; without it a temporary one")
    parser.add_argument("--limit", type=float, default=540, help="seconds for one phase")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        place = "processes on CPUs, gloo"
        if options.device == "cuda":
            place = SHARED if gpus() < options.ranks else "one rank per GPU"
        print(f"{options.ranks} ranks: {place}", flush=True)
        found = Run(folder, options).go(options.phases)
    ours = {f"{phase}_s": figures["seconds"] for phase, figures in found.items()}
    finish("larger", ours=ours, peers={}, ratios={}, quality={"place": place, "ranks": options.ranks, **found})


class Run:
    """A run in `folder`, taken through its phases."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._run, self._recipe = folder / "runs" / NAME, folder / f"{NAME}.toml"
        self._gpu_bytes, self._began = 0, 0.0

    def go(self, phases: list[str]) -> dict[str, dict[str, Any]]:
        work: dict[str, Callable[[], dict[str, Any]]] = {
            "prepare": self._prepare,
            "train": self._train,
            "continue": self._continue,
            "evaluate": self._evaluate,
        }
        found: dict[str, dict[str, Any]] = {}
        for phase in phases:
            self._gpu_bytes, self._began, begin = 0, time.time(), time.perf_counter()
            with sharing(self._options.ranks, self._options.device):
                figures = work[phase]()
            found[phase] = {"seconds": round(time.perf_counter() - begin, 1)} | figures
            found[phase] |= {"whole_gpu_gb": round(self._gpu_bytes / 1e9, 2)} if self._gpu_bytes else {}
            print(f"{phase:<9}", ", ".join(f"{key} {value}" for key, value in found[phase].items()), flush=True)
        return found

    def _prepare(self) -> dict[str, Any]:
        options = self._options
        text = RECIPE.format(
            **SIZES[options.size],
            name=NAME,
            device=options.device,
            ranks=options.ranks,
            steps=STEPS,
            saved=SAVED,
            max_bytes=8_000 if options.size == "7B" else 4_000,
        )
        shutil.rmtree(self._run, ignore_errors=True)
        self._recipe.write_text(text)
        self._launch("prepare", ranks=1)
        return self._planned()

    def _planned(self) -> dict[str, Any]:
        """What the plan expects of one rank, in GB."""
        sys.path.insert(0, str(ROOT))  # ours may not be installed
        from ropewalk import flow

        tree = flow.plan(self._recipe, nproc=self._options.ranks)
        memory = {key: value / 1e9 for key, value in tree["phases"][0]["memory"].items() if isinstance(value, int)}
        parameters = tree["derived"]["parameters"]
        forecast = {key: round(value, 2) for key, value in memory.items() if value >= 0.01}
        return {
            "parameters": parameters,
            "planned_gb_per_rank": forecast,
            # float32 masters, and two moments of a byte a number.
            "planned_checkpoint_gb": round(6 * parameters / 1e9, 2),
            "free_disk_gb": round(shutil.disk_usage(self._folder).free / 1e9, 1),
        }

    def _train(self) -> dict[str, Any]:
        """Ends with the ranks killed: nothing but the checkpoint is left of them."""
        self._launch("train", watch=lambda: bool(self._events("saved")))
        return self._trained(first=1, last=SAVED)

    def _continue(self) -> dict[str, Any]:
        self._launch("train", watch=self._make_room)
        restored = self._events("restored")
        if [event["step"] for event in restored] != [SAVED]:
            raise SystemExit(f"{self._run}: expected to continue from step {SAVED}, found {restored}")
        found = {"restored_step": SAVED, "restore_s": round(restored[0]["seconds"], 1)}
        return found | self._trained(first=SAVED + 1, last=STEPS)

    def _make_room(self) -> bool:
        """Deletes the checkpoint that was restored where the disk has no room for another."""
        restored = self._events("restored")
        old = self._folder / restored[-1]["path"] if restored else None
        if old and old.exists() and shutil.disk_usage(old).free < 1.1 * _size(old):
            print(f"{old.name}: deleted, the disk has no room for two", flush=True)
            shutil.rmtree(old)
        return False

    def _evaluate(self) -> dict[str, Any]:
        found: dict[str, Any] = {"ranks": self._options.ranks}
        try:
            self._launch("evaluate")
        except SystemExit as failure:
            why = str(failure).splitlines()[-1]
            print(f"`ropewalk evaluate` failed on {self._options.ranks} ranks ({why}); trying one", flush=True)
            found = {"ranks": 1}
            self._launch("evaluate", ranks=1)
        results = json.loads((self._run / "evaluation" / "results.json").read_text())
        metrics = results["tasks"]["held-out"]
        return found | {"step": results["step"]} | {name: metric["value"] for name, metric in metrics.items()}

    def _trained(self, *, first: int, last: int) -> dict[str, Any]:
        """What the events of this phase say of its steps."""
        ranks = [self._events("step", rank=rank) for rank in range(self._options.ranks)]
        steps = [event for event in ranks[0] if event["step"] <= last]
        if [event["step"] for event in steps] != list(range(first, last + 1)):
            raise SystemExit(f"{self._run}: expected steps {first} to {last}, found {[s['step'] for s in steps]}")
        saved, validation = self._events("saved")[0], self._events("validation")
        return {
            "step_s": [round(event["step_s"], 2) for event in steps],
            "losses": [round(event["loss"], 4) for event in steps],
            "checkpoint_gb": round(saved["bytes"] / 1e9, 3),
            "save_s": round(saved["copy_s"] + saved["persist_s"], 1),
            "peak_gb_by_rank": [round(max(e["memory_bytes"] for e in events) / 1e9, 2) for events in ranks],
        } | ({"validation_loss": round(validation[-1]["loss"], 4)} if validation else {})

    def _launch(self, verb: str, *, ranks: int | None = None, watch: Callable[[], bool] = lambda: False) -> None:
        command = [sys.executable, "-m", "ropewalk", verb, str(self._recipe), "--runs", str(self._folder / "runs")]
        ranks = ranks or self._options.ranks

        def look() -> bool:
            self._gpu_bytes = max(self._gpu_bytes, self._used_bytes())
            return watch()

        launch(
            command,
            ranks=ranks,
            device=self._options.device,
            logs=self._folder / "logs" / verb,
            timeout_s=self._options.limit,
            watch=look,
            folder=self._folder,
        )

    def _used_bytes(self) -> int:
        """Of all GPUs together."""
        if self._options.device == "cpu":
            return 0
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        told = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        return sum(int(line) << 20 for line in told if line.isdecimal())

    def _events(self, kind: str, *, rank: int = 0) -> list[dict[str, Any]]:
        """Of one rank, since the phase began."""
        path = self._run / (f"events-{rank}.jsonl" if rank else "events.jsonl")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if event["kind"] == kind and event["time"] >= self._began]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
