"""Figures of a run: `summary.json`, and results passed between run stages and to the console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ropewalk import __version__
from ropewalk.base.events import events_path, read_events, steps
from ropewalk.base.metric import flat_results
from ropewalk.evaluate.results import BESIDE, read_results
from ropewalk.plan.machine import this_machine
from ropewalk.prepare.pipeline import Prepared
from ropewalk.store.manifest import Manifest, read_manifest
from ropewalk.train.settings import training_seed

from .recipe import Recipe
from .run_stages import Result, read_record

BEFORE_REPORT = ("prepare", "plan", "train", "evaluate")


def summarize(folder: Path, recipe: Recipe) -> Result:
    """`summary.json`: the run in one object (docs/formats.md)."""
    records = {stage: read_record(folder, stage) for stage in BEFORE_REPORT}
    seconds = {stage: record.seconds for stage, record in records.items() if record}
    trained = (records["train"] and records["train"].result) or {}
    planned = (records["plan"] and records["plan"].result) or {}
    results = flat_results(read_results(folder))
    events = list(read_events(events_path(folder)))
    paces = sorted(event["tokens_per_s"] for event in steps(events))
    started = [event for event in events if event["kind"] == "train_started"]
    cached = [event["importance"] for event in events if event["kind"] == "load_cached" and "importance" in event]
    return {
        "format": 2,
        "name": recipe.name,
        "version": __version__,
        "seed": recipe.seed,
        "train_seed": training_seed(recipe.train, recipe.seed),
        "device": started[-1]["device"] if started else None,
        "machine": str(this_machine()),
        "parameters": planned.get("parameters"),
        "steps": trained.get("step"),
        "tokens": trained.get("tokens"),
        "train_tokens_prepared": read_manifest(Path(_result(records["prepare"])["folder"])).tokens("train"),
        "seconds": {**seconds, "total": round(sum(seconds.values()), 3)},
        "warnings": _result(records["prepare"])["warnings"],
        "train_loss": trained.get("train_loss"),
        "validation_loss": trained.get("validation_loss"),
        "tokens_per_s": paces[len(paces) // 2] if paces else None,
        **({"importance": cached[-1]} if cached else {}),
        **{key: value for key, value in results.items() if key not in ("format", "step", "tokens", *BESIDE)},
        "evaluated_tokens": results.get("tokens"),
    }


def trained_figures(folder: Path) -> Result:
    """The last training figures, from the run's events."""
    events = list(read_events(events_path(folder)))
    trained, validated = steps(events), steps(events, "validation")
    result: Result = {"step": trained[-1]["step"], "tokens": trained[-1]["tokens"], "train_loss": trained[-1]["loss"]}
    return result | ({"validation_loss": validated[-1]["loss"]} if validated else {})


def prepared_result(made: Prepared) -> Result:
    """The result of the stage `prepare`, for later stages."""
    return {
        "folder": str(made.folder),
        **removals(made.manifest),
        "warnings": list(made.manifest.warnings),
        "hash": made.manifest.recipe_hash,
        "train_tokens": made.manifest.tokens("train"),
        "validation_tokens": made.manifest.tokens("validation"),
        "vocabulary": made.manifest.tokenizer.vocabulary,
    }


def removals(manifest: Manifest) -> Result:
    """Documents read, kept and removed by rule, over all sources."""
    removed: dict[str, int] = {}
    for step in (step for source in manifest.sources for step in source.steps):
        for rule, count in step.removed.items():
            removed[rule] = removed.get(rule, 0) + count
    read = sum(source.steps[0].documents_in for source in manifest.sources if source.steps)
    return {"documents": read, "kept": read - sum(removed.values()), "removed": removed}


def removal_line(counts: Result) -> str:
    """The same counts in one line."""
    rules = ", ".join(f"{rule} {count}" for rule, count in sorted(counts["removed"].items(), key=lambda item: -item[1]))
    return f"kept {counts['kept']} of {counts['documents']} documents" + (
        f"; removed by rule: {rules}" if rules else ""
    )


def _result(record: Any) -> Result:
    return dict(record.result) if record and record.result else {}
