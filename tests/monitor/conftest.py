"""A run directory as training leaves it: 300 steps, killed at 183, restored at 150, two sources."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

STEPS = 300
EVERY = 3
KILLED, RESTORED = 183, 150
START = 1_760_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run."""
    return write_run(tmp_path)


@pytest.fixture
def half_run(tmp_path: Path) -> Path:
    """A run killed in the middle of a line, before anything was evaluated."""
    return write_run(tmp_path, finished=False)


def write_run(root: Path, *, finished: bool = True) -> Path:
    """Writes prepared data and a run under `root`, by docs/formats.md."""
    run = root / "runs" / "stdlib-tiny"
    prepared = root / "prepared" / "5f0c9a41d27be083"
    run.mkdir(parents=True)
    prepared.mkdir(parents=True)
    _json(prepared / "manifest.json", manifest())
    (run / "config.toml").write_text(CONFIG)
    _json(run / "plan.json", {"format": 1, "parameters": 2_134_272, "flops_per_token": 15_900_000})
    _json(run / "stages/prepare.json", _stage("prepare", 21.4, {"folder": str(prepared)}))
    _json(run / "stages/plan.json", _stage("plan", 0.2, {}))
    lines = [json.dumps(event) for event in events(finished=finished)]
    if finished:
        _json(run / "stages/train.json", _stage("train", 171.9, {"step": STEPS}))
        _json(run / "stages/evaluate.json", _stage("evaluate", 14.6, {}))
        _json(run / "evaluation/results.json", RESULTS)
        _json(run / "summary.json", SUMMARY)
        (run / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    else:
        lines.append('{"format": 1, "time": 1760000123.4, "rank": 0, "kind": "st')
    (run / "events.jsonl").write_text("\n".join(lines) + ("\n" if finished else ""))
    return run


def events(*, finished: bool) -> list[dict[str, Any]]:
    """The diary of rank 0: a first start up to the kill; when finished, a second one from the checkpoint."""
    log = Diary()
    log.write(
        "run_started",
        version="0.1.0",
        python="3.11.9",
        platform="Linux-6.1-x86_64",
        command="ropewalk run tiny.toml",
    )
    for name, seconds in (("prepare", 21.4), ("plan", 0.2)):
        log.write("stage_started", stage=name)
        log.time += seconds
        log.write("stage_finished", stage=name, seconds=seconds, result={})
    log.write("stage_started", stage="train")
    log.write("train_started", step=0, **TRAINING)
    log.train(0, KILLED)
    if not finished:
        return log.events
    log.time += 40
    log.write(
        "run_started",
        version="0.1.0",
        python="3.11.9",
        platform="Linux-6.1-x86_64",
        command="ropewalk run tiny.toml",
    )
    log.write("config_changed", key="train.log_every_steps", before=5, after=3)
    log.write("stage_skipped", stage="prepare")
    log.write("stage_started", stage="train")
    log.write("restored", step=RESTORED, path="checkpoints/step-00000150", seconds=0.31)
    log.write("train_started", step=RESTORED, **TRAINING)
    log.write("warning", message="the validation text is shorter than `train.validation_sequences`: 41 rows of 64")
    log.train(RESTORED, STEPS)
    log.write("train_finished", step=STEPS, seconds=88.2)
    log.write("stage_finished", stage="train", seconds=171.9, result={"step": STEPS})
    log.write("stage_started", stage="evaluate")
    log.time += 14.6
    log.write("stage_finished", stage="evaluate", seconds=14.6, result={})
    log.write("run_finished", seconds=104.5)
    return log.events


class Diary:
    """Collects events with a clock of its own."""

    def __init__(self) -> None:
        self.time = START
        self.events: list[dict[str, Any]] = []
        self._noise = random.Random(7)

    def write(self, kind: str, **fields: Any) -> None:
        self.events.append({"format": 1, "time": round(self.time, 3), "rank": 0, "kind": kind, **fields})

    def train(self, first: int, last: int) -> None:
        for step in range(first + EVERY, last + 1, EVERY):
            self.time += EVERY * 0.58
            self.write("step", **self._step(step))
            if step % 30 == 0:
                loss = _loss(step) + 0.12
                self.write("validation", step=step, loss=loss, bits_per_byte=loss / math.log(2) / 3.1, seconds=0.8)
            if step % 150 == 0:
                self.write("saved", step=step, path=f"checkpoints/step-{step:08d}", seconds=0.2, bytes=25_600_000)

    def _step(self, step: int) -> dict[str, Any]:
        draw = self._noise.gauss
        pace = 14_100 * (0.72 if step <= 6 else 1) + draw(0, 260)
        warm = min(1.0, step / 30)
        decay = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * max(0, step - 30) / (STEPS - 30)))
        return {
            "step": step,
            "tokens": step * 8192,
            "loss": _loss(step) + draw(0, 0.035),
            "lr": 3e-3 * warm * decay,
            "grad_norm": abs(0.45 + 2.6 * math.exp(-step / 18) + draw(0, 0.05)),
            "step_s": 8192 / pace,
            "data_wait_s": abs(0.004 + draw(0, 0.002)) + (0.08 if step == 96 else 0),
            "tokens_per_s": pace,
            "flops_per_s": pace * 15_900_000,
            "mfu": None,
            "memory_bytes": 1_310_000_000,
        }


def manifest() -> dict[str, Any]:
    """Two sources through read, filter, deduplicate; what is kept lies in shards of two splits."""
    return {
        "format": 1,
        "recipe_hash": "5f0c9a41d27be083",
        "dtype": "uint16",
        "tokenizer": {"file": "tokenizer.json", "checksum": "00aa", "vocabulary": 4096, "end_of_text": 0},
        "sources": [
            _source("stdlib", "code", [
                ("read", 1890, 24_100_000, 23_900_000, {"not_utf8": 4, "empty": 31}),
                ("filter", 1855, 23_900_000, 21_300_000, {
                    "min_characters": 142, "max_mean_line_length": 9, "min_letter_share": 17,
                    "max_duplicate_line_share": 58,
                }),
                ("deduplicate", 1629, 21_300_000, 20_950_000, {"exact": 36}),
            ]),
            _source("topics", "prose", [
                ("read", 804, 3_000_000, 3_000_000, {}),
                ("filter", 804, 3_000_000, 2_800_000, {"min_characters": 96, "min_letter_share": 3}),
                ("deduplicate", 705, 2_800_000, 2_640_000, {"exact": 61}),
            ]),
        ],
        "shards": [
            _shard("stdlib", "train", 1560, 5_610_000),
            _shard("stdlib", "validation", 33, 118_000),
            _shard("topics", "train", 630, 702_000),
            _shard("topics", "validation", 14, 15_400),
        ],
    }  # fmt: skip


def _source(name: str, domain: str, steps: list[tuple[str, int, int, int, dict[str, int]]]) -> dict[str, Any]:
    rows = [
        {
            "step": step,
            "documents_in": documents,
            "documents_out": documents - sum(removed.values()),
            "bytes_in": bytes_in,
            "bytes_out": bytes_out,
            "removed": removed,
            "edited": {},
        }
        for step, documents, bytes_in, bytes_out, removed in steps
    ]
    return {"name": name, "domain": domain, "weight": 1.0, "steps": rows}


def _shard(source: str, split: str, documents: int, tokens: int) -> dict[str, Any]:
    file = f"{source}-{split}-00000.tokens"
    size = {"text_bytes": tokens * 3, "file_bytes": tokens * 2 + 900}
    return {
        "file": file,
        "source": source,
        "split": split,
        "documents": documents,
        "tokens": tokens,
        **size,
        "checksum": "1f",
    }


def _loss(step: int) -> float:
    return 2.55 + 5.8 * math.exp(-step / 22) + 1.1 * math.exp(-step / 130)


def _stage(name: str, seconds: float, result: dict[str, Any]) -> dict[str, Any]:
    return {"format": 1, "stage": name, "input": "c0ffee", "seconds": seconds, "result": result}


def _json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


TRAINING = {
    "device": "cpu (2 threads)",
    "world": 1,
    "torch": "2.11.0",
    "parameters": 2_134_272,
    "flops_per_token": 15_900_000,
    "peak_flops": None,
}
RESULTS: dict[str, Any] = {
    "format": 1,
    "step": STEPS,
    "tokens": 131_072,
    "bytes": 398_211,
    "loss": 2.7731,
    "bits_per_byte": 1.3168,
    "zlib_bits_per_byte": 2.3512,
    "xz_bits_per_byte": 2.0137,
    "accuracy": 0.4627,
    "perplexity": 16.008,
    "parse_rate": 0.25,
    "domains": {
        "code": {
            "bits_per_byte": 1.2711,
            "accuracy": 0.4813,
            "bytes": 342_100,
            "zlib_bits_per_byte": 2.2604,
            "xz_bits_per_byte": 1.9322,
        },
        "prose": {
            "bits_per_byte": 1.5954,
            "accuracy": 0.3491,
            "bytes": 56_111,
            "zlib_bits_per_byte": 2.9048,
            "xz_bits_per_byte": 2.8106,
        },
    },
}
SUMMARY = {
    "format": 1,
    "name": "stdlib-tiny",
    "version": "0.1.0",
    "seed": 0,
    "device": "cpu",
    "machine": {"cpu": "x86_64, 2 cores", "memory": "8 GB"},
    "parameters": 2_134_272,
    "tokens": STEPS * 8192,
    "steps": STEPS,
    "seconds": {"prepare": 21.4, "plan": 0.2, "train": 171.9, "evaluate": 14.6, "total": 208.1},
    "train_loss": 2.66,
    "validation_loss": 2.7731,
    "tokens_per_s": 14_087.0,
    **{key: value for key, value in RESULTS.items() if key not in ("format", "step", "tokens", "bytes", "loss")},
}
HOSTILE = "</pre><script>alert('x')</script><img src=x onerror=alert(1)> & \ud800 \x00"
SAMPLES = [
    {
        "prompt": 'def normalize(path):\n    """Normalize a path: A//B, A/./B and A/foo/../B become A/B.',
        "completion": '"""\n    path = os.fspath(path)\n    if path:\n        return path\n    return sep\n',
        "domain": "code",
        "source": "stdlib",
        "parses": True,
    },
    {
        "prompt": "class Timer(Thread):\n    def __init__(self, args=None):\n        Thread.__init__(self)\n",
        "completion": "        self.args = args or [\n    def cancel(self):\n",
        "domain": "code",
        "source": "stdlib",
        "parses": False,
    },
    {
        "prompt": "Comparisons\n***********\n\nUnlike C, all comparisons in Python have the same priority,",
        "completion": " which is the same as the value of the object. The operators are called in order.\n",
        "domain": "prose",
        "source": "topics",
        "parses": None,
    },
    {"prompt": "x = 1\n", "completion": HOSTILE, "domain": "<b>code</b>", "source": 'a"b', "parses": False},
]
CONFIG = """\
# Every value of this run and where it came from.
format = 1
name = "stdlib-tiny"
seed = 0

[prepare]
deduplicate = "exact"
validation_share = 0.02

[[prepare.sources]]
name = "stdlib"
paths = ["python:stdlib"]
format = "auto"
domain = "code"

[[prepare.sources]]
name = "topics"
paths = ["python:prose"]
format = "auto"
domain = "prose"

[prepare.filter]
min_characters = 200
max_mean_line_length = 200.0

[prepare.tokenizer]
vocab_size = 4096

[load]
sequence_length = 256

[model]
layers = 4
width = 192
heads = 6
tie_embeddings = true

[train]
steps = 300
batch_size = 32
clip_norm = 1.0
precision = "fp32"
log_every_steps = 3

[train.schedule]
peak_lr = 0.003
warmup_steps = 30

[origins]
"name" = "recipes/tiny.toml:1"
"prepare.sources.0.name" = "recipes/tiny.toml:4"
"prepare.sources.0.paths" = "recipes/tiny.toml:5"
"prepare.sources.1.name" = "recipes/tiny.toml:9"
"model.width" = "recipes/tiny.toml:14"
"train.steps" = "command line: train.steps=300"
"train.log_every_steps" = "command line: train.log_every_steps=3"
"""
