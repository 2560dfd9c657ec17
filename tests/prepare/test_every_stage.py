"""A recipe with every stage switched on: exactly once, the same bytes for any number of workers and after any kill."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ropewalk.prepare import build, chunks
from ropewalk.prepare.holdout import part_id
from ropewalk.prepare.pipeline import prepare
from ropewalk.store.shards import Shard, document_key
from tests.prepare.every_stage import every_stage, write_corpus

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("every")
    write_corpus(folder)
    return folder


@pytest.fixture
def here(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(corpus)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 8000)
    return corpus


def test_every_stage_has_something_to_do_and_every_document_is_accounted_for(here: Path, tmp_path: Path) -> None:
    made = prepare(every_stage(folder=str(tmp_path)), seed=1)
    touched = {
        count.step for source in made.manifest.sources for count in source.steps if count.removed or count.edited
    }
    assert touched == {
        *("collect", "normalise", "correct", "filter", "deduplicate", "paragraphs", "lines", "near", "substring"),
        "holdout",
    }
    rows = pq.read_table(made.folder / "ledger.parquet").to_pylist()
    assert len(rows) == sum(source.steps[0].documents_in for source in made.manifest.sources)
    for source in made.manifest.sources:
        mine = [row for row in rows if row["source"] == source.name]
        kept = [row for row in mine if row["outcome"] != "removed"]
        assert len(kept) == source.steps[-1].documents_out
        assert sum(row["bytes"] for row in kept) == source.steps[-1].bytes_out
        for count in source.steps:
            gone = [row for row in mine if row["stage"] == count.step]
            assert len(gone) == sum(count.removed.values())
            assert {row["rule"] for row in gone} == set(count.removed)
    for row in rows:
        assert (row["outcome"] == "removed") == (row["rule"] is not None) == (row["split"] is None)
        assert (row["outcome"] == "edited") == (row["rule"] is None and bool(row["edits"]))
        assert row["rule"] not in ("exact", "minhash") or row["partner"] in {other["id"] for other in rows}


def test_what_edits_took_is_what_the_text_lost(here: Path, tmp_path: Path) -> None:
    made = prepare(every_stage(folder=str(tmp_path)), seed=1)
    for row in pq.read_table(made.folder / "ledger.parquet").to_pylist():
        if row["outcome"] != "removed":
            assert row["raw_bytes"] - row["bytes"] == sum(edit["bytes"] for edit in row["edits"]), row["id"]


def masked_names(repeats: list[dict[str, Any]], ledger: pa.Table) -> Iterator[str]:
    """What shards call the documents, and the parts of documents, that hold a repeat."""
    parts = {row["id"]: row["parts"] for row in ledger.to_pylist()}
    for span in repeats:
        if parts[span["id"]] is None:
            yield span["id"]
        for part in parts[span["id"]] or ():
            if part["start"] < span["stop"] and span["start"] < part["stop"]:
                yield part_id(span["id"], part["start"], part["stop"])


def test_masked_spans_stay_in_the_text_and_are_not_counted(here: Path, tmp_path: Path) -> None:
    settings = every_stage(folder=str(tmp_path))
    substring = dataclasses.replace(settings.deduplicate.substring, action="mask")
    masking = dataclasses.replace(settings, deduplicate=dataclasses.replace(settings.deduplicate, substring=substring))
    made = prepare(masking, seed=1)
    repeats = pq.read_table(made.folder / "repeats.parquet").to_pylist()
    steps = [count for source in made.manifest.sources for count in source.steps if count.step == "substring"]
    assert not any(count.removed or count.edited for count in steps)
    masked = {document_key(name) for name in masked_names(repeats, pq.read_table(made.folder / "ledger.parquet"))}
    assert masked
    for entry in made.manifest.shards:
        shard = Shard(made.folder / entry.file)
        for place in range(len(shard)) if entry.source != "talk" else ():
            counts = shard.counts(int(shard.offsets[place]), int(shard.offsets[place + 1]))
            assert counts.all() == (int(shard.ids[place]) not in masked)
            assert counts.any()


@pytest.mark.parametrize("workers", [2, pytest.param(7, marks=pytest.mark.slow)])
def test_the_bytes_do_not_depend_on_workers(here: Path, tmp_path: Path, tree, monkeypatch, workers: int) -> None:
    alone = prepare(every_stage(folder=str(tmp_path / "alone")), seed=1)
    monkeypatch.setattr(build, "SPAWN_BYTES", 0)
    many = prepare(every_stage(folder=str(tmp_path / "many"), workers=workers), seed=1)
    assert alone.folder.name == many.folder.name
    assert tree(alone.folder) == tree(many.folder)


def kill(corpus: Path, *, kills: int, workers: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("random_kills.py")), str(corpus), str(kills), str(workers)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= kills


def test_random_kills_are_harmless(corpus: Path) -> None:
    kill(corpus, kills=8, workers=1)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_hundred_random_kills_are_harmless(corpus: Path, workers: int) -> None:
    kill(corpus, kills=100, workers=workers)
