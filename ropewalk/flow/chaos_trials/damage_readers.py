"""For each kind of file that is read back (`store/kinds.py`): the product's own way to open it.

A reader returns a value that can be compared, or raises what a user would see.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DamagedCheckpoint, DataError
from ropewalk.base.events import read_events
from ropewalk.checkpoint.format import FILE, identity, read_checkpoint_manifest
from ropewalk.checkpoint.read.model_check import verify_model
from ropewalk.config.resolved import load_resolved
from ropewalk.config.stages import read_stage
from ropewalk.evaluate.answers import read_lines
from ropewalk.evaluate.results import read_documents, read_items, read_results, read_samples
from ropewalk.monitor.report.preparation import write_page
from ropewalk.monitor.run_view import read_run
from ropewalk.plan.plan import load_plan
from ropewalk.prepare.encode import open_chunk
from ropewalk.prepare.ledger import explain
from ropewalk.prepare.lookup import NgramIndex
from ropewalk.prepare.pipeline import plan_inputs
from ropewalk.prepare.prune import prune
from ropewalk.prepare.stages import read_artifact, read_table
from ropewalk.prepare.substring.spans import read_repeats
from ropewalk.prepare.summary import write_summary
from ropewalk.prepare.what_if import what_if
from ropewalk.store.manifest import check_name, check_tokenizer, read_manifest
from ropewalk.store.shards import Shard
from ropewalk.train.settings import read_settings

from ..data_doctor.predictions import read_record as read_predictions
from ..plan_recipe import needs_torch
from ..recipe import Recipe
from .damage_beside import ADOPTED, READERS_BESIDE, DamagedRun, Reader, digest, read_adopted


def _manifest(place: DamagedRun, path: Path) -> Any:
    if _is_adopted(path):
        return read_adopted(place, path)
    manifest = read_manifest(place.data)
    check_name(manifest, place.data)
    return manifest


def _tokenizer(place: DamagedRun, path: Path) -> Any:
    if _is_adopted(path):
        return read_adopted(place, path)
    check_tokenizer(place.data, read_manifest(place.data))
    return digest(path)


def _shard(place: DamagedRun, path: Path) -> Any:
    if _is_adopted(path):
        return read_adopted(place, path)
    entry = next(entry for entry in read_manifest(place.data).shards if entry.file == path.name)
    return _tokens(Shard(path, checksum=entry.checksum))


def _table(place: DamagedRun, path: Path) -> Any:
    """As those of `prepare explain`, `what-if` and `report` that open it."""
    told: list[Any] = [explain(place.data, place.document, sources=place.recipe.prepare.sources)]
    if path.name != "repeats.parquet":
        told.append(write_summary(place.data, place.recipe.prepare).read_bytes())
    if path.name in ("ledger.parquet", "statistics.parquet"):
        told.append(what_if(place.data, place.recipe.prepare, place.recipe.prepare))
    return told


def _page(place: DamagedRun, path: Path) -> Any:
    """As `prepare report`, which rewrites the file each time."""
    write_summary(place.data, place.recipe.prepare)
    return write_page(place.data).read_bytes()


def _ngrams(place: DamagedRun, path: Path) -> Any:
    return NgramIndex(path.parent).verified()


def _layout(place: DamagedRun, path: Path) -> Any:
    """As training opens its sequences."""
    settings = read_settings(place.run)
    device = needs_torch("torch", "training").device("cpu")
    opened = needs_torch("ropewalk.train.data", "training").open_data(
        settings, settings.phases[0], verify=False, device=device
    )
    try:
        rows = opened.loader.order.rows(0, settings.phases[0].batch_size)
        return [rows.begin.tolist(), rows.length.tolist(), digest(path)]
    finally:
        opened.loader.close()


def _inputs(place: DamagedRun, path: Path) -> Any:
    return plan_inputs(place.recipe.prepare, seed=place.recipe.seed).hash


def _used(place: DamagedRun, path: Path) -> Any:
    return prune(path.parent.parent, path.stem, dry_run=True)


def _encoded(place: DamagedRun, path: Path) -> Any:
    return _tokens(open_chunk(path))


def _substring(place: DamagedRun, path: Path) -> Any:
    found = read_repeats(path.parent)
    return None if found is None else [found.spans.to_pylist(), found.documents.to_pylist()]


def _artifact(place: DamagedRun, path: Path) -> Any:
    return read_table(path).to_pylist()


def _made_tokenizer(place: DamagedRun, path: Path) -> Any:
    return read_artifact(path)


def _config(place: DamagedRun, path: Path) -> Any:
    return load_resolved(place.run, Recipe).value


def _stage(place: DamagedRun, path: Path) -> Any:
    return {**read_stage(place.run, path.stem), "seconds": None}


def _plan(place: DamagedRun, path: Path) -> Any:
    return load_plan(place.run)


def _results(place: DamagedRun, path: Path) -> Any:
    return read_results(place.run)


def _samples(place: DamagedRun, path: Path) -> Any:
    return read_samples(place.run)


def _scores(place: DamagedRun, path: Path) -> Any:
    return read_documents(place.run)


def _items(place: DamagedRun, path: Path) -> Any:
    return read_items(place.run)


def _answers(place: DamagedRun, path: Path) -> Any:
    """As evaluation does, which tells of damaged lines and asks the model again."""
    return read_lines(path)


def _pages(place: DamagedRun, path: Path) -> Any:
    """As the report and the monitor show it; they name what is missing."""
    view = read_run(place.run)
    left_out = [line for line in view.missing if line.startswith(path.name)]
    if left_out:
        raise DataError(left_out[0])
    return view.summary


def _predictions(place: DamagedRun, path: Path) -> Any:
    return read_predictions(place.run)


def _checkpoint(place: DamagedRun, path: Path) -> Any:
    wrong = verify_model(path.parent)
    if wrong:
        raise DamagedCheckpoint("\n".join(wrong))
    # The manifest names the checkpoint before it, which differs when an interrupted run continues.
    return identity(read_checkpoint_manifest(path.parent)) if path.name == FILE else digest(path)


def _events(place: DamagedRun, path: Path) -> Any:
    return list(read_events(path))


READERS: dict[str, Reader] = {
    "prepared/*/manifest.json": _manifest,
    "prepared/*/tokenizer.json": _tokenizer,
    "prepared/*/*.tokens": _shard,
    "prepared/*/ledger.parquet": _table,
    "prepared/*/statistics.parquet": _table,
    "prepared/*/samples.parquet": _table,
    "prepared/*/repeats.parquet": _table,
    "prepared/*/report.json": _page,
    "prepared/*/ngrams-*/index.json": _ngrams,
    "prepared/*/ngrams-*/*.hashes": _ngrams,
    "prepared/*/ngrams-*/*.places": _ngrams,
    "prepared/*/layouts/*.bin": _layout,
    "prepared/stages/checksums/files.arrow": _inputs,
    "prepared/stages/used/*.json": _used,
    "prepared/stages/encode/*.tokens": _encoded,
    "prepared/stages/substring/*/*.parquet": _substring,
    "prepared/stages/*/*.arrow": _artifact,
    "prepared/stages/tokenizer/*.json": _made_tokenizer,
    "run/config.toml": _config,
    "run/stages/*.json": _stage,
    "run/plan.json": _plan,
    "run/evaluation/results.json": _results,
    "run/evaluation/documents.jsonl": _scores,
    "run/evaluation/items.jsonl": _items,
    "run/evaluation/answers.jsonl": _answers,
    "run/samples.jsonl": _samples,
    "run/summary.json": _pages,
    "run/doctor.json": _predictions,
    "run/checkpoints/*/manifest.json": _checkpoint,
    "run/checkpoints/*/*": _checkpoint,
    "run/events*.jsonl": _events,
    **READERS_BESIDE,
}
"""By the pattern of `store/kinds.py`."""


def _tokens(shard: Shard) -> str:
    shard.verify()
    every: npt.NDArray[np.int64] = np.arange(len(shard), dtype=np.int64)
    run = shard.run(every)
    return hashlib.blake2b(np.ascontiguousarray(run.tokens).tobytes()).hexdigest()


def _is_adopted(path: Path) -> bool:
    return path.parent.parent.name == ADOPTED
