"""How each technique of docs/survey.md is shown: a command and what it says, or a run with and without the setting.

A row that names a setting in its `use` column is shown by a tiny run with that setting and one without (the tables of
tests/wiring say what differs). Rows in `COMMANDS` are shown by a command of the command line, those in `GPU` by tests
that need a GPU, those in `BENCHMARKS` by figures of docs/benchmarks.md; all others by the tests that they name.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Literal

from tests.wiring.rows import Row, keys_of
from tests.wiring.table import ROWS

Kind = Literal["command", "run", "GPU run", "test", "benchmark"]


@dataclass(frozen=True)
class Show:
    """A command in a folder with `tiny.toml` and its finished run `runs/tiny`, and a pattern of what it prints."""

    command: str
    sign: str


EQUAL = r"equal: 2 processes compute what one device does"
GPT3 = "model.layers=96 model.heads=96 model.width=12288 model.norm=layer model.mlp=gelu model.position=learned"


def _verified(name: str, settings: str) -> Show:
    """A plan beside one device: loss, gradients and weights of some steps in float64."""
    return Show(f"ropewalk train tiny.toml name={name} {settings} --verify", EQUAL)


def _measured(suite: str, sign: str) -> Show:
    """A run that is evaluated on a suite; its sequences must hold the longest choice."""
    return Show(
        f"ropewalk run tiny.toml name={suite} load.sequence_length=64 'evaluate.tasks=[\"suite:{suite}\"]'", sign
    )


COMMANDS: dict[str, Show] = {
    "Benchmarks of logical reasoning": _measured("reasoning", r"logic_en acc \(10 items\), chance 25\.0 %"),
    "Benchmarks of translation": _measured("translation", r"translation_en_zh chrf \(10 segments\)"),
    "Benchmarks of natural language inference": _measured("nli", r"nli_zh acc"),
    "Benchmarks of question answering": _measured("qa", r"qa_en exact match"),
    "BLEU": Show(
        "ropewalk score --metrics bleu,chrf,ter --references tiny.toml --predictions tiny.toml",
        r"bleu 100\.00 .*tok:13a.*chrf 100\.00.*ter 0\.000",
    ),
    "ROUGE": Show(
        "ropewalk score --metrics rouge1,rouge2,rougeL --references tiny.toml --predictions tiny.toml",
        r"rouge1 0\.\d+ .*rouge2 0\.\d+ .*rougeL 0\.\d+ .*tok:unicode",
    ),
    "METEOR": Show(
        "ropewalk score --metrics meteor,meteor_1.5 --references tiny.toml --predictions tiny.toml",
        r"meteor 0\.\d+ .*nltk\|.*meteor_1\.5 .*para:no",
    ),
    "Understanding a dataset in numbers and in kind": Show(
        "ropewalk prepare explain tiny.toml notes:corpus/0.txt", r"kept, 375 bytes, source notes.*112 tokens in"
    ),
    "A systematic path from collection to processed data": Show(
        "ropewalk run tiny.toml name=whole", r"768 tokens in 6 steps.*held-out bits per byte.*runs/whole/report\.html"
    ),
    "The page cache does not help random epochs: page cache, LRU and keep-all compared": Show(
        "ropewalk doctor data tiny.toml --data-bytes 800000000000 --memory-bytes 400000000000",
        r"page cache serves 36%, LRU 15%, a cache that never evicts 50%",
    ),
    "Data stalls, measured": Show("ropewalk monitor runs/tiny", r"tokens/s, \d+\.\d % data wait"),
    "Choice of medium, cache size and number of loading threads": Show(
        "ropewalk doctor data tiny.toml", r"cores, as many threads .*data on hdd, none in memory .*remedy"
    ),
    "DS-Analyzer [22]": Show(
        "ropewalk doctor data tiny.toml", r"step .*alone.*prepare .*from memory.*fetch .*hand over .*forecast"
    ),
    "Prediction of stalls": Show(
        "ropewalk doctor data tiny.toml", r"a step 10 times as fast.*data on object, none in memory .*%.*fetch"
    ),
    "Human evaluation": Show(
        "ropewalk human export runs/tiny --out study", r"texts by +human, tiny.*sheet-r1\.html.*study/key\.json"
    ),
    "Compute of a decoder-only model, C = τT = 6PD": Show(
        "ropewalk plan tiny.toml", r"tokens +768 in 6 steps.*FLOPs +205 M \(267 k per token.*time +training takes"
    ),
    "KoLA: knowledge creation (KC) [36]": Show(
        """ropewalk run tiny.toml name=creation 'evaluate.tasks=["held-out", "knowledge-creation"]'""",
        r"knowledge-creation self contrast \(10 questions\)",
    ),
    "Several machines, several devices": Show(
        "ropewalk launch slurm tiny.toml --nodes 2 --gpus-per-node 8", r"processes +16.*sbatch tiny\.sbatch"
    ),
    "Hybrid parallelism": Show(
        "ropewalk train tiny.toml name=hybrid --nproc 4 parallel.tensor=2 parallel.shard=2 --verify",
        r"equal: 4 processes compute what one device does",
    ),
    "Distributed data parallelism (DDP)": _verified("ddp", "--nproc 2"),
    "Fully sharded data parallelism (FSDP)": _verified("fsdp", "parallel.shard=2"),
    "One-dimensional, Megatron-LM [41]": _verified("tensor", "parallel.tensor=2"),
    "Layers on different devices": _verified("stages", "parallel.pipeline=2 plan.microbatch_size=1"),
    "Share of idle time (bubble)": Show(
        "ropewalk plan draw tiny.toml model.layers=8 --ranks 4 --microbatches 8",
        r"bubble .*27\.3% in closed form.*holds +4 \| 3 \| 2 \| 1",
    ),
    "Microbatches, GPipe [43]": _verified(
        "gpipe", "parallel.pipeline=2 plan.microbatch_size=1 parallel.schedule=gpipe"
    ),
    "PipeDream-Flush [45]": _verified("flush", "parallel.pipeline=2 plan.microbatch_size=1 parallel.schedule=1f1b"),
    "Ring self-attention (Li S.) [46]": _verified("ring", "parallel.context=2 parallel.context_method=ring"),
    "LayerNorm and dropout split by length, Megatron-LM [41]": _verified(
        "sequence", "parallel.tensor=2 parallel.sequence=true"
    ),
    "Selective recomputation of activations [41]": _verified(
        "selective", "parallel.tensor=2 parallel.recompute=attention"
    ),
    "Optimizer state partitioned [47]": _verified("zero-1", "parallel.shard=2 parallel.zero=1"),
    "Gradients partitioned [47]": _verified("zero-2", "parallel.shard=2 parallel.zero=2"),
    "Parameters partitioned [47]": _verified("zero-3", "parallel.shard=2 parallel.zero=3"),
    "Recovery from the last checkpoint, verified before use": Show(
        "ropewalk checkpoint verify runs/tiny", r"step-00000004: whole.*step-00000006: whole"
    ),
    "Analysis of speed and memory": Show(
        "ropewalk monitor runs/tiny --to csv=curves.csv", r"runs/tiny: 5 points in csv=curves\.csv"
    ),
    "A small model trained first, then grown": Show(
        "ropewalk model grow runs/tiny grown model.layers=4", r"layers +2 -> 4.*preserved: the same logits as before"
    ),
    "Shape: 175 billion parameters, 96 layers, 96 heads, width 12,288": Show(
        f"ropewalk model describe tiny.toml {GPT3} load.sequence_length=2048 prepare.tokenizer.vocab_size=50257",
        r"parameters +174,593,642,496",
    ),
}
"""By technique."""

GPU = ("NCCL",)
"""Techniques that a machine without GPUs cannot show."""

BY_TESTS = (
    "Rows of more than 114,000 tokens [46]",
    "State per rank falls in proportion to the number of ranks [47]",
    "Stage 3 sends half as much again, measured on the wire [47]",
    "Step decay",
    "pass@k of generated code [35]",
)
"""Techniques whose setting needs more than the tiny run has: files of a format, several machines, a longer run."""


BENCHMARKS = (
    "RefinedWeb: removal rate beside that of other methods [12]",
    "Pre-LN: less sensitive to warm-up, faster, slightly worse, measured",
    "RMSNorm: faster, measured",
    "SwiGLU and GeGLU: better, measured",
)
"""Techniques that are a statement about how well others do: what was measured is in docs/benchmarks.md."""


def runs_of(technique: str, use: str) -> list[Row]:
    """The runs that show a technique which is used like this."""
    if technique in (*BY_TESTS, *BENCHMARKS):
        return []
    found = []
    for token in re.findall(r"`([^`]+)`", use):
        key, _, value = token.partition(" = ")
        for row in ROWS:
            if row.name == _numbered(key) or row.name.startswith(f"{_numbered(key)}."):
                found.append(_with_value(row, value) if value else row)
                break
    return found


def _with_value(row: Row, value: str) -> Row:
    """The row with the value that the page names, unless that is the default."""
    default = dict(keys_of())[row.name].default
    return row if json.loads(value) == default else dataclasses.replace(row, value=value)


def _numbered(key: str) -> str:
    """A key of the page as the reference has it: `prepare.sources.paths` is a key of each source."""
    for table in ("prepare.sources", "load.corpus", "load.remote.mirrors", "train.phases", "train.mixture"):
        if key.startswith(f"{table}.") and not key.startswith(f"{table}.N"):
            return key.replace(table, f"{table}.N", 1)
    return key


def kind_of(technique: str, use: str) -> Kind:
    """How a technique in place is shown."""
    if technique in COMMANDS:
        return "command"
    if technique in GPU:
        return "GPU run"
    if technique in BENCHMARKS:
        return "benchmark"
    return "run" if runs_of(technique, use) else "test"
