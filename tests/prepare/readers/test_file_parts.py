"""One large file for several workers: the output is that of one worker, and of the file read as a whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from format_samples import jsonl, parquet

from ropewalk.prepare import build, chunks, fingerprint
from ropewalk.prepare.config import Filter, Prepare, Source, Tokenizer
from ropewalk.prepare.pipeline import prepare

TEXTS = ["\n".join(f"word{(number * 7919 + place * 104729) % 997}" for place in range(40)) for number in range(300)]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(jsonl([{"text": text} for text in TEXTS]))
    Path("b.parquet").write_bytes(parquet({"text": [f"{text}\nagain" for text in TEXTS]}, row_group_size=40))
    return Prepare(
        sources=(Source(name="lines", paths=("a.jsonl",)), Source(name="rows", paths=("b.parquet",))),
        filter=Filter(min_characters=1),
        tokenizer=Tokenizer(vocab_size=300, train_bytes=5000),
        workers=1,
        folder="whole",
    )


def test_the_output_does_not_depend_on_who_reads_which_part(settings: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(result) -> dict[str, bytes]:
        files = [path for path in result.folder.iterdir() if path.is_file() and not path.name.startswith(".")]
        return {path.name: path.read_bytes() for path in files}

    whole = prepare(settings, seed=1)
    monkeypatch.setattr(build, "SPAWN_BYTES", 0)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(fingerprint, "PART_BYTES", 10_000)
    divided = prepare(dataclasses.replace(settings, workers=2, folder="divided"), seed=1)
    assert kept(divided) == kept(whole)
    rows = pq.read_table(whole.folder / "ledger.parquet", columns=["id"])["id"].to_pylist()
    assert rows == [f"{name}:{number}" for name in ("lines:a.jsonl", "rows:b.parquet") for number in range(1, 301)]
