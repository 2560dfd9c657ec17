"""Every token leads back to its document and file, and fertility is what a recount gives."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ropewalk.base.errors import DataError, UserError
from ropewalk.prepare import tokenizer as tokenizers
from ropewalk.prepare.config import Chat, Language, Prepare
from ropewalk.prepare.fertility import fertility
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.trace import Tracer, file_of
from ropewalk.store.manifest import read_manifest
from ropewalk.store.shards import Shard, document_key


def test_every_token_leads_to_its_document_and_file(settings: Prepare) -> None:
    folder = prepare(settings, seed=1).folder
    ids = {document_key(name): name for name in pq.read_table(folder / "ledger.parquet")["id"].to_pylist()}
    tracer = Tracer(folder)
    seen = 0
    for entry in read_manifest(folder).shards:
        shard = Shard(folder / entry.file)
        documents = np.repeat(np.arange(len(shard)), np.diff(shard.offsets)).tolist()
        for token, document in enumerate(documents):
            origin = tracer.trace(entry.file, token)
            assert (origin.id, origin.document) == (ids[int(shard.ids[document])], document)
            assert origin.start <= token < origin.stop
            assert (origin.source, origin.split, origin.shard) == (entry.source, entry.split, entry.file)
            assert Path(origin.file).exists()
            assert origin.id.startswith(f"{origin.source}:{origin.file}")
            seen += 1
    assert seen == sum(entry.tokens for entry in read_manifest(folder).shards)


def test_what_is_not_there_is_named(settings: Prepare) -> None:
    folder = prepare(settings, seed=1).folder
    file = read_manifest(folder).shards[0].file
    tracer = Tracer(folder)
    with pytest.raises(UserError, match=r"no shard none.tokens; the manifest names texts-train-00000"):
        tracer.trace("none.tokens", 0)
    with pytest.raises(UserError, match="there is no number -1"):
        tracer.trace(file, -1)


def test_a_ledger_of_other_data_is_noticed(settings: Prepare) -> None:
    folder = prepare(settings, seed=1).folder
    other = prepare(dataclasses.replace(settings, folder="other"), seed=2).folder
    (folder / "ledger.parquet").write_bytes((other / "ledger.parquet").read_bytes())
    tracer = Tracer(folder)
    entry = next(entry for entry in read_manifest(folder).shards if entry.split == "validation")
    with pytest.raises(DataError, match="this ledger is damaged"):
        tracer.origin(entry, 0)


@pytest.mark.parametrize(
    ("document", "file"),
    [
        ("a:texts/b.md", "texts/b.md"),
        ("a:lines.jsonl:12", "lines.jsonl"),
        ("a:x:y.jsonl:3", "x:y.jsonl"),
        ("a:all.zip!in/b.txt", "all.zip"),
        ("a:all.zip!in/b.jsonl:7", "all.zip"),
        ("a:bad.gz:rest", "bad.gz"),
    ],
)
def test_the_file_of_an_id_is_without_place_and_member(document: str, file: str) -> None:
    assert file_of(document) == file


def measured(folder: Path) -> list[dict[str, Any]]:
    return fertility(folder, pq.read_table(folder / "ledger.parquet"))


def recount(folder: Path, name: str) -> dict[str, float]:
    """Fertility of a source from its tokens alone."""
    manifest = read_manifest(folder)
    tokenizer = tokenizers.load(folder / "tokenizer.json")
    tokens, texts = 0, []
    for entry in (entry for entry in manifest.shards if entry.source == name):
        shard = Shard(folder / entry.file)
        for document in range(len(shard)):
            ids = shard.document(document)[:-1].tolist()
            tokens += len(ids)
            texts.append(tokenizer.decode(ids, skip_special_tokens=False))
    words = sum(len(re.findall(r"[^\W_]+", re.sub(r"([\u4e00-\u9fff])", r" \1 ", text))) for text in texts)
    return {
        "documents": len(texts),
        "tokens": tokens,
        "bytes_per_token": round(sum(len(text.encode()) for text in texts) / tokens, 4),
        "characters_per_token": round(sum(map(len, texts)) / tokens, 4),
        "tokens_per_word": round(tokens / words, 4),
    }


def test_fertility_equals_a_recount(settings: Prepare) -> None:
    folder = prepare(settings, seed=1).folder
    rows = measured(folder)
    for row in (row for row in rows if row["by"] == "source"):
        assert {key: row[key] for key in recount(folder, row["name"])} == recount(folder, row["name"])
    by_domain = {row["name"]: row["tokens"] for row in rows if row["by"] == "domain"}
    by_source = {row["name"]: row["tokens"] for row in rows if row["by"] == "source"}
    assert by_domain == {"prose": by_source["texts"], "lines": by_source["lines"], "packed": by_source["packed"]}
    languages = [row for row in rows if row["by"].startswith("language")]
    assert sum(row["tokens"] for row in languages) == sum(by_source.values())


def test_fertility_by_language_uses_what_was_measured(settings: Prepare) -> None:
    rules = dataclasses.replace(settings.filter, language=Language(min_confidence=0.0))
    folder = prepare(dataclasses.replace(settings, filter=rules), seed=1).folder
    rows = [row for row in measured(folder) if row["by"] == "language"]
    column = pq.read_table(folder / "statistics.parquet")["language"].to_pylist()
    assert {row["name"] for row in rows} <= {name or "unknown" for name in column}


def test_dialogues_have_bytes_and_no_words(settings: Prepare) -> None:
    turns = [[("user", f"rope {number}"), ("assistant", f"{number} hemp")] for number in range(20)]
    lines = [{"messages": [{"role": role, "content": content} for role, content in turn]} for turn in turns]
    Path("talk.jsonl").write_text("\n".join(map(json.dumps, lines)))
    talk = dataclasses.replace(settings.sources[0], name="talk", paths=("talk.jsonl",), format="chat")
    made = dataclasses.replace(
        settings,
        sources=(*settings.sources, talk),
        filter=dataclasses.replace(settings.filter, min_characters=0),
        chat=Chat(template="plain"),
    )
    rows = {row["name"]: row for row in measured(prepare(made, seed=1).folder) if row["by"] == "source"}
    assert rows["talk"]["bytes_per_token"] > 0
    assert (rows["talk"]["characters_per_token"], rows["talk"]["tokens_per_word"]) == (None, None)
