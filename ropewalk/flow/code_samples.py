"""Runs given samples of generated code against the tests of their problems, without a model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.files import committed_file, storage
from ropewalk.base.metric import metrics_tree
from ropewalk.base.progress import Progress
from ropewalk.config.cache import cache_folder
from ropewalk.evaluate.code_problems import CodeProblem, read_code_problems
from ropewalk.evaluate.harness.table_files import read_json_lines
from ropewalk.evaluate.metrics.pass_at_k import PassAtK, VerdictShare
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.question_task import Item, Question
from ropewalk.evaluate.sandbox.escapes import ESCAPES
from ropewalk.evaluate.sandbox.isolation import SandboxChoice
from ropewalk.evaluate.sandbox.judging import Judge, working_isolation
from ropewalk.evaluate.sandbox.program import VERDICTS, Limits, Verdict


def run_code(
    problems: Path,
    samples: Path | None = None,
    *,
    k: Sequence[int] = (1, 10, 100),
    sandbox: SandboxChoice = "auto",
    limits: Limits | None = None,
    partial: bool = False,
    fresh: bool = False,
    results: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Runs samples (lines with `task_id` and `completion`) against the tests of `problems`, a file in the format of
    HumanEval or MBPP; without samples, the problems' own solutions.

    Returns pass@k with intervals for each k that all problems have samples for, and counts of verdicts. `partial`
    allows problems without samples; `fresh` also runs what has run before; `results` is a file for the
    verdict on each sample.
    """
    by_id = {problem.task_id: problem for problem in read_code_problems(problems)}
    rows = _read_samples(samples, by_id) if samples else _own_solutions(by_id, problems)
    unsampled = by_id.keys() - {row["task_id"] for row in rows}
    if unsampled and not partial:
        first = sorted(unsampled)[0]
        raise UserError(
            f"{samples}: {len(unsampled)} of {len(by_id)} problems have no sample, such as {first}; add samples, or "
            "allow it with --partial"
        )
    memory = None if fresh else cache_folder() / "verdicts.jsonl"
    judge = Judge(sandbox=sandbox, limits=limits or Limits(), memory=memory)
    begin = time.monotonic()
    verdicts = judge.verdicts([by_id[row["task_id"]].program(row["completion"]) for row in rows], progress)
    seconds = time.monotonic() - begin
    if results:
        _write_results(results, rows, verdicts)
    kinds = [verdict.kind for verdict in verdicts]
    items = _items(rows, verdicts)
    enough = min(len(item.verdicts) for item in items)
    metrics = [PassAtK(each) for each in sorted({*k}) if each <= enough]
    shares = [VerdictShare("timeout", "timeouts"), VerdictShare("fault", "sandbox_failures")]
    return {
        "problems": len(items),
        "samples": len(rows),
        "verdicts": {kind: kinds.count(kind) for kind in VERDICTS},
        "metrics": metrics_tree(found for metric in [*metrics, *shares] for found in measured(metric, items)),
        "sandbox": working_isolation(sandbox).name,
        "seconds": seconds,
        "failed": [
            {"task_id": row["task_id"], "verdict": verdict.kind, "detail": verdict.detail}
            for row, verdict in zip(rows, verdicts, strict=True)
            if verdict.kind != "pass"
        ],
    }


def check_sandbox(sandbox: SandboxChoice = "auto", *, progress: Progress | None = None) -> dict[str, Any]:
    """Tries to escape from this machine's sandbox in every way of sandbox/escapes.py; `escaped` names the attempts that
    the sandbox did not contain."""
    if sandbox == "none":
        raise UserError("without a sandbox the attempts would do harm; check auto, bubblewrap or namespaces")
    limits = Limits(cpu_s=1, wall_s=4.0, memory_bytes=256 << 20)
    verdicts = Judge(sandbox=sandbox, limits=limits, workers=8).verdicts([each.program for each in ESCAPES], progress)
    wrong = {
        attempt.name: verdict.detail or verdict.kind
        for attempt, verdict in zip(ESCAPES, verdicts, strict=True)
        if verdict.kind not in attempt.verdicts
    }
    return {"sandbox": working_isolation(sandbox).name, "attempts": len(ESCAPES), "escaped": wrong}


def _read_samples(path: Path, problems: Mapping[str, CodeProblem]) -> list[dict[str, str]]:
    rows = []
    for number, row in read_json_lines(path):
        task = str(row.get("task_id"))
        if task not in problems:
            raise DataError(f"{path}:{number}: no problem has the task_id {task!r}; compare the two files")
        if not isinstance(row.get("completion"), str):
            raise DataError(f"{path}:{number}: a sample needs its `completion` as text")
        rows.append({"task_id": task, "completion": row["completion"]})
    if not rows:
        raise DataError(f"{path}: there is no sample in it; give one JSON object per line")
    return rows


def _own_solutions(problems: Mapping[str, CodeProblem], path: Path) -> list[dict[str, str]]:
    without = [task for task, problem in problems.items() if not problem.solution]
    if without:
        raise DataError(f"{path}: {without[0]} has no solution to run; give a file of samples")
    return [{"task_id": task, "completion": problem.solution} for task, problem in problems.items()]


def _items(rows: Sequence[Mapping[str, str]], verdicts: Sequence[Verdict]) -> list[Item]:
    by_task: dict[str, list[str]] = {}
    for row, verdict in zip(rows, verdicts, strict=True):
        by_task.setdefault(row["task_id"], []).append(verdict.kind)
    return [Item(question=Question(prompt=task), verdicts=tuple(kinds)) for task, kinds in by_task.items()]


def _write_results(path: Path, rows: Sequence[Mapping[str, str]], verdicts: Sequence[Verdict]) -> None:
    with storage(f"writing {path}"), committed_file(path) as file:
        for row, verdict in zip(rows, verdicts, strict=True):
            told = {**row, "passed": verdict.kind == "pass", "verdict": verdict.kind, "result": verdict.detail}
            file.write(orjson.dumps(told) + b"\n")
