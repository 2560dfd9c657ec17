"""Likelihood tasks beside lm-evaluation-harness: equal log-likelihoods sample by sample, equal metrics, and speed.

    python benchmarks/evaluate.py [DATA] [--items N]

Both read the same Hugging Face directories (exports of random weights, a Llama and a GPT-2), the same YAML tasks and
the same seeded subsets of DATA (default ../shared/data; see SUBSETS for the files). lm-evaluation-harness runs in an
environment of its own, at the best of several batch sizes; its processor time is that of `loglikelihood` alone, ours
that of the whole evaluation: requests, answers on disk, metrics and intervals.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["torch==2.13.0", "transformers accelerate", "lm-eval==0.4.13"]
BATCHES = (1, 16)
THREADS = 1
"""Processor time then does not depend on what else the machine does."""
Rows = list[dict[str, Any]]


def rows_of(path: Path) -> Rows:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def choice_rows(name: str) -> Callable[[Path], Rows]:
    return lambda data: rows_of(data / "multiple-choice" / f"{name}.jsonl.gz")


def blimp_rows(field: str) -> Callable[[Path], Rows]:
    return lambda data: [row for row in rows_of(data / "blimp/blimp.jsonl.gz") if row["field"] == field]


def crows_rows(data: Path) -> Rows:
    with open(data / "crows-pairs/crows_pairs_anonymized.csv", encoding="utf-8") as file:
        return [{"more": row["sent_more"], "less": row["sent_less"]} for row in csv.DictReader(file)]


def winobias_rows(data: Path) -> Rows:
    def lines(kind: str) -> list[str]:
        text = (data / f"winobias/{kind}_stereotyped_type1.txt.dev").read_text(encoding="utf-8")
        return [line.partition(" ")[2].replace("[", "").replace("]", "") for line in text.splitlines()]

    return [{"pro": pro, "anti": anti} for pro, anti in zip(lines("pro"), lines("anti"), strict=True)]


def pair_task(good: str, bad: str) -> dict[str, Any]:
    """Which of two sentences is likelier: an empty context."""
    return {"doc_to_text": "", "doc_to_choice": f"{{{{[{good}, {bad}]}}}}", "doc_to_target": 0}


SUBSETS: dict[str, tuple[Callable[[Path], Rows], dict[str, Any]]] = {
    "arc_easy": (
        choice_rows("arc_easy.validation"),
        {
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_choice": "{{choices.text}}",
            "doc_to_target": "{{choices.label.index(answerKey)}}",
        },
    ),
    "piqa": (
        choice_rows("piqa.validation"),
        {
            "doc_to_text": "Question: {{goal}}\nAnswer:",
            "doc_to_choice": "{{[sol1, sol2]}}",
            "doc_to_target": "label",
        },
    ),
    "boolq": (
        choice_rows("boolq.validation"),
        {
            "doc_to_text": "{{passage}}\nQuestion: {{question}}?\nAnswer:",
            "doc_to_choice": ["no", "yes"],
            "doc_to_target": "{{answer|int}}",
        },
    ),
    "hellaswag": (
        choice_rows("hellaswag.validation-2000"),
        {
            "doc_to_text": "{{activity_label}}: {{ctx}}",
            "doc_to_choice": "{{endings}}",
            "doc_to_target": "{{label|int}}",
        },
    ),
    "copa": (
        choice_rows("copa.validation"),
        {
            "doc_to_text": "{{premise[:-1] + (' because' if question == 'cause' else ' therefore')}}",
            "doc_to_choice": "{{[choice1, choice2]}}",
            "doc_to_target": "label",
        },
    ),
    "lambada": (
        choice_rows("lambada.test"),
        {"output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": " {{word}}"},
    ),
    "blimp_syntax": (blimp_rows("syntax"), pair_task("sentence_good", "sentence_bad")),
    "blimp_morphology": (blimp_rows("morphology"), pair_task("sentence_good", "sentence_bad")),
    "crows_pairs": (crows_rows, pair_task("more", "less")),
    "winobias": (winobias_rows, pair_task("pro", "anti")),
}


def write_tasks(data: Path, folder: Path, *, items: int) -> list[str]:
    """Subsets as JSON lines, and tasks that name them as YAML (JSON is YAML)."""
    for name, (rows, task) in SUBSETS.items():
        found = rows(data)
        chosen = sorted(random.Random(name).sample(range(len(found)), min(items, len(found))))
        text = "".join(json.dumps(found[index]) + "\n" for index in chosen)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        kind = task.get("output_type", "multiple_choice")
        metrics = ["acc", "acc_norm"] if kind == "multiple_choice" else ["perplexity", "acc"]
        tree = {
            "task": f"bench_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
            "test_split": "test",
            "output_type": kind,
            "metric_list": [{"metric": metric} for metric in metrics],
            **task,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(tree, indent=1), encoding="utf-8")
    return list(SUBSETS)


# Models.


def write_models(folder: Path, data: Path) -> dict[str, Path]:
    """Random weights in the layouts of a Llama and of GPT-2, which transformers loads as such."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from ropewalk.model.config import Model
    from ropewalk.model.decoder import build
    from ropewalk.model.hugging_face.directory import write_directory
    from ropewalk.model.spec import resolve

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([row["context"] for row in SUBSETS["lambada"][0](data)], trainer)
    made = {}
    for name, layout, settings in (
        ("llama", "llama", {}),
        ("export", "gpt2", {"norm": "layer", "position": "learned", "mlp": "gelu", "bias": True}),
    ):
        shape = {"layers": 6, "width": 256, "heads": 8, "mlp_width": 1024}
        spec = resolve(Model(**{**shape, **settings}), vocabulary=8192, sequence_length=1024)
        torch.manual_seed(1)
        # Three times the usual weights: predictions then depend strongly on the text.
        weights = {
            key: 3 * value if value.dim() == 2 else value for key, value in build(spec, seed=1).state_dict().items()
        }
        write_directory(folder / name, spec=spec, weights=weights, tokenizer=tokenizer.to_str().encode(), layout=layout)
        made[name] = folder / name
    return made


# The peer, in its own environment.


def peer(model: str, tasks: str, batch: str) -> None:
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    torch.set_num_threads(THREADS)
    spent = 0.0

    class Timed(HFLM):
        def loglikelihood(self, *arguments: Any, **named: Any) -> Any:
            nonlocal spent
            begin = time.process_time()
            found = super().loglikelihood(*arguments, **named)
            spent += time.process_time() - begin
            return found

    results = lm_eval.simple_evaluate(
        model=Timed(pretrained=model, device="cpu", batch_size=int(batch), dtype="float32"),
        tasks=[f"bench_{name}" for name in SUBSETS],
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = {
        name.removeprefix("bench_"): [
            [response[0][0] for response in sample["resps"]]
            for sample in sorted(found, key=lambda each: each["doc_id"])
        ]
        for name, found in results["samples"].items()
    }
    metrics = {
        name.removeprefix("bench_"): {key.split(",")[0]: value for key, value in found.items() if ",none" in key}
        for name, found in results["results"].items()
    }
    print(json.dumps({"seconds": spent, "samples": samples, "metrics": metrics}))


# Ours.


def ours(model: str, tasks: str) -> None:
    sys.path.insert(1, str(ROOT))
    import evaluate_tasks
    import torch

    from ropewalk.evaluate.answers import Answers, request_key
    from ropewalk.evaluate.config import Evaluate
    from ropewalk.evaluate.evaluation import evaluate, open_tasks
    from ropewalk.evaluate.model_folder import open_model

    torch.set_num_threads(THREADS)
    evaluate_tasks.folder = Path(tasks)
    settings = Evaluate(tasks=tuple(f"evaluate_tasks:{name}" for name in SUBSETS))
    opened, held_out = open_model(Path(model), settings=settings)
    opened.loglikelihood([([1], [2])])  # loads the weights, as the peer's constructor does
    answers = Answers(Path(tempfile.mkdtemp()), {})
    begin = time.process_time()
    found = evaluate(opened, held_out, answers=answers)
    seconds = time.process_time() - begin
    samples = {
        task.name: [
            [answers[request_key(request)].log_probability for request in task.requests_of(question)]
            for question in task.questions
        ]
        for task in open_tasks(held_out)
    }
    metrics = {name: {each.name: each.value for each in each_task} for name, each_task in found.tasks.items()}
    print(json.dumps({"seconds": seconds, "samples": samples, "metrics": metrics}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("--items", type=int, default=50, help="questions per task")
    settings = parser.parse_args()
    from harness import call, environment, finish

    python = environment("lm-eval", PACKAGES)
    speeds: dict[str, dict[str, float]] = {"ropewalk": {}, "lm-eval": {}}
    quality: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks = write_tasks(settings.data, folder, items=settings.items)
        for model, path in write_models(folder / "models", settings.data).items():
            mine = call(sys.executable, __file__, "ours", str(path), name)
            theirs = [call(python, __file__, "peer", str(path), name, str(batch)) for batch in BATCHES]
            again = call(sys.executable, __file__, "ours", str(path), name)
            fastest = min(theirs, key=lambda each: each["seconds"])
            requests = sum(len(lls) for found in fastest["samples"].values() for lls in found)
            speeds["ropewalk"][f"{model}_requests_per_s"] = requests / min(mine["seconds"], again["seconds"])
            speeds["lm-eval"][f"{model}_requests_per_s"] = requests / fastest["seconds"]
            quality[model] = {"tasks": len(tasks), "requests": requests, **compared(mine, fastest)}
    ratios = [speeds["ropewalk"][key] / speeds["lm-eval"][key] for key in speeds["ropewalk"]]
    finish(
        "evaluate",
        ours=speeds["ropewalk"],
        peers={"lm-eval": speeds["lm-eval"]},
        ratios={"lm-eval": min(ratios)},
        quality=quality,
    )


def compared(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """The largest differences, and the metrics that differ."""
    assert mine["samples"].keys() == theirs["samples"].keys()
    apart = [
        (abs(one - other), task)
        for task, found in theirs["samples"].items()
        for ours_of, theirs_of in zip(mine["samples"][task], found, strict=True)
        for one, other in zip(ours_of, theirs_of, strict=True)
    ]
    wrong = [
        f"{task} {metric}: {mine['metrics'][task][metric]} and {value}"
        for task, found in theirs["metrics"].items()
        for metric, value in found.items()
        if metric in mine["metrics"][task] and abs(mine["metrics"][task][metric] - value) > 1e-4 * max(1, abs(value))
    ]
    return {"largest_difference": max(apart)[0], "in": max(apart)[1], "metrics_that_differ": wrong}


if __name__ == "__main__":
    if sys.argv[1:2] == ["peer"]:
        peer(*sys.argv[2:])
    elif sys.argv[1:2] == ["ours"]:
        ours(*sys.argv[2:])
    else:
        main()
