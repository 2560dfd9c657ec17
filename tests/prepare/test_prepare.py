"""Laws of the whole of prepare: nothing lost, nothing invented, the same bytes always."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ropewalk.base.errors import ConfigError, DamagedTokenizer, DataError
from ropewalk.base.files import locked
from ropewalk.base.progress import Silent
from ropewalk.prepare import build, chunks, tokenizer
from ropewalk.prepare.config import Deduplicate, Filter, Near, Prepare, Source, Tokenizer
from ropewalk.prepare.pipeline import plan_inputs, prepare
from ropewalk.store.shards import Shard, document_key


def raw_documents(settings: Prepare) -> dict[str, bytes | None]:
    """Every document by id, in canonical order, read without any of our code; None for a line without text."""
    found: dict[str, bytes | None] = {}
    for path in sorted(p.as_posix() for p in Path("texts").rglob("*") if p.suffix in {".md", ".txt"}):
        found[f"texts:{path}"] = Path(path).read_bytes()
    for name, path, key, lines in (
        ("lines", "lines.jsonl", "text", Path("lines.jsonl").read_bytes().split(b"\n")),
        ("packed", "lines.jsonl.gz", "body", gzip.decompress(Path("lines.jsonl.gz").read_bytes()).split(b"\n")),
    ):
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    text = json.loads(line)[key].encode("utf-8", "surrogatepass")
                except (ValueError, TypeError, KeyError, AttributeError):
                    text = None
                found[f"{name}:{path}:{number}"] = text
    return found


def kept_texts(settings: Prepare) -> dict[str, str]:
    """Ids and texts that should remain, by brute force."""
    kept: dict[str, str] = {}
    for name, data in raw_documents(settings).items():
        try:
            text = data.decode() if data is not None and b"\0" not in data else ""
        except UnicodeDecodeError:
            continue
        text = text.removeprefix("\ufeff").replace("\r\n", "\n")
        if len(text.encode()) >= settings.filter.min_characters and text not in kept.values():
            kept[name] = text
    return kept


def test_every_kept_document_decodes_to_its_text_and_no_other_is_in_a_shard(settings: Prepare) -> None:
    result = prepare(settings, seed=1)
    coder = tokenizer.load(result.folder / "tokenizer.json")
    end = result.manifest.tokenizer.end_of_text
    decoded = {}
    for entry in result.manifest.shards:
        shard = Shard(result.folder / entry.file, checksum=entry.checksum)
        shard.verify()
        for index in range(len(shard)):
            *tokens, last = shard.document(index).tolist()
            assert last == end
            assert end not in tokens
            decoded[int(shard.ids[index])] = coder.decode(tokens, skip_special_tokens=False)
    assert decoded == {document_key(name): text for name, text in kept_texts(settings).items()}


def test_counts_equal_an_independent_recount(settings: Prepare) -> None:
    result = prepare(settings, seed=1)
    raw, kept = raw_documents(settings), kept_texts(settings)
    for source in result.manifest.sources:
        mine = [name for name in kept if name.startswith(f"{source.name}:")]
        shards = [shard for shard in result.manifest.shards if shard.source == source.name]
        assert source.steps[0].documents_in == sum(name.startswith(f"{source.name}:") for name in raw)
        assert source.steps[-1].documents_out == len(mine) == sum(shard.documents for shard in shards)
        assert source.steps[-1].bytes_out == sum(len(kept[name].encode()) for name in mine)
        assert source.steps[-1].bytes_out == sum(shard.text_bytes for shard in shards)
        for before, after in zip(source.steps, source.steps[1:], strict=False):
            assert (before.documents_out, before.bytes_out) == (after.documents_in, after.bytes_in)


def test_every_hostile_document_is_counted_under_its_rule(settings: Prepare) -> None:
    manifest = prepare(settings, seed=1).manifest
    removed: collections.Counter[tuple[str, str]] = collections.Counter()
    for source in manifest.sources:
        for step in source.steps:
            removed.update({(source.name, rule): count for rule, count in step.removed.items()})
    assert removed == {
        ("texts", "binary"): 1,
        ("texts", "not_utf8"): 1,
        ("texts", "empty"): 1,
        ("texts", "min_characters"): 1,
        ("texts", "exact"): 1,
        ("lines", "not_json"): 1,
        ("lines", "not_object"): 1,
        ("lines", "no_text_key"): 1,
        ("lines", "text_not_string"): 1,
        ("lines", "not_utf8"): 2,
        ("lines", "exact"): 2,
    }
    assert manifest.sources[0].steps[1].edited == {"byte_order_mark": 1, "newlines": 1}


def test_the_ledger_has_one_row_a_document_and_agrees_with_the_manifest(settings: Prepare) -> None:
    result = prepare(settings, seed=1)
    rows = pq.read_table(result.folder / "ledger.parquet").to_pylist()
    assert [row["id"] for row in rows] == list(raw_documents(settings))
    by_split = collections.Counter(row["split"] for row in rows if row["outcome"] != "removed")
    assert by_split == {
        split: sum(shard.documents for shard in result.manifest.shards_of(split)) for split in ("train", "validation")
    }


def test_the_bytes_do_not_depend_on_workers_or_chunks(settings, tree, monkeypatch) -> None:
    alone = prepare(settings, seed=1)
    monkeypatch.setattr(build, "SPAWN_BYTES", 0)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3000)
    many = prepare(dataclasses.replace(settings, workers=2, folder="other"), seed=1)
    assert alone.folder.name == many.folder.name
    assert tree(alone.folder) == tree(many.folder)


# A file passes four points: every fifth is another of them each time.
@pytest.mark.parametrize(("every", "kills"), [(5, 8), pytest.param(1, 40, marks=pytest.mark.slow)])
def test_a_kill_at_any_point_is_harmless(corpus: Path, every: int, kills: int) -> None:
    script = Path(__file__).with_name("kill_everywhere.py")
    done = subprocess.run([sys.executable, script, corpus, str(every)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > kills


def test_a_second_call_reuses_everything(settings: Prepare, tree) -> None:
    first = prepare(settings, seed=1)
    before = tree(first.folder)
    second = prepare(dataclasses.replace(settings, workers=2), seed=1)
    assert (first.reused, second.reused) == (False, True)
    assert second.manifest == first.manifest
    assert tree(second.folder) == before


@pytest.mark.parametrize("name", ["texts-train-00000.tokens", "tokenizer.json", "ledger.parquet"])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_damaged_output_is_made_again(settings: Prepare, tree, name: str, damage: str) -> None:
    first = prepare(settings, seed=1)
    before = tree(first.folder)
    path = first.folder / name
    path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:-1])
    assert not prepare(settings, seed=1).reused
    assert tree(first.folder) == before


def test_the_hash_follows_what_matters_and_nothing_else(settings: Prepare) -> None:
    original = plan_inputs(settings, seed=1).hash
    assert len(original) == 16
    assert plan_inputs(dataclasses.replace(settings, workers=7, folder="x"), seed=1).hash == original
    assert plan_inputs(settings, seed=2).hash != original
    assert plan_inputs(dataclasses.replace(settings, shard_tokens=9999), seed=1).hash != original
    Path("texts/00.md").write_text("other")
    assert plan_inputs(settings, seed=1).hash != original


def test_shards_are_no_longer_than_asked_unless_one_document_is(settings: Prepare) -> None:
    Path("texts/long.txt").write_text("\n".join(f"line {number * 7919}" for number in range(2000)))
    for shard in prepare(settings, seed=1).manifest.shards:
        assert shard.tokens <= settings.shard_tokens or shard.documents == 1


def test_without_deduplication_equal_texts_stay_in_one_split(settings: Prepare) -> None:
    off = Deduplicate(documents="off", near=Near(kind="off"))
    result = prepare(dataclasses.replace(settings, deduplicate=off), seed=1)
    rows = {row["id"]: row for row in pq.read_table(result.folder / "ledger.parquet").to_pylist()}
    assert rows["texts:texts/03.md"]["split"] == rows["texts:texts/deep/copy.txt"]["split"] is not None


def test_weights_are_those_given_or_the_training_tokens(settings: Prepare) -> None:
    counted = prepare(settings, seed=1).manifest
    for source in counted.sources:
        assert source.weight == sum(shard.tokens for shard in counted.shards_of("train", source.name))
    weighted = tuple(dataclasses.replace(source, weight=0.5) for source in settings.sources)
    given = prepare(dataclasses.replace(settings, sources=weighted), seed=1).manifest
    assert {source.weight for source in given.sources} == {0.5}


@pytest.mark.parametrize("hostile", ["a regular expression without end", "a pipe"])
def test_a_hostile_tokenizer_is_refused_before_anything_is_read(settings: Prepare, hostile: str) -> None:
    prepared = prepare(settings, seed=1)
    path = Path("theirs.json")
    if hostile == "a pipe":
        os.mkfifo(path)
    else:
        tree = json.loads((prepared.folder / "tokenizer.json").read_text())
        split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
        path.write_text(json.dumps({**tree, "pre_tokenizer": split}))
    with pytest.raises(DamagedTokenizer, match=r"^theirs\.json: this tokenizer"):
        prepare(dataclasses.replace(settings, tokenizer=Tokenizer(file=str(path))), seed=1)


def test_a_given_tokenizer_is_used_as_it_is(settings: Prepare) -> None:
    first = prepare(settings, seed=1)
    Path("mine.json").write_bytes((first.folder / "tokenizer.json").read_bytes() + b"\n")
    again = prepare(dataclasses.replace(settings, tokenizer=Tokenizer(file="mine.json")), seed=1)
    assert (again.folder / "tokenizer.json").read_bytes() == Path("mine.json").read_bytes()
    assert again.manifest.shards == first.manifest.shards


def test_compressed_shards_hold_the_same_documents(settings: Prepare) -> None:
    plain = prepare(settings, seed=1)
    packed = prepare(dataclasses.replace(settings, compression="zstd"), seed=1)
    assert plain.folder != packed.folder
    for one, two in zip(plain.manifest.shards, packed.manifest.shards, strict=True):
        assert (one.file, one.documents, one.tokens, two.compression) == (two.file, two.documents, two.tokens, "zstd")
        first, second = Shard(plain.folder / one.file), Shard(packed.folder / two.file, checksum=two.checksum)
        second.verify()
        assert first.tokens.tolist() == second.tokens.tolist()
        assert first.offsets.tolist() == second.offsets.tolist()


def test_a_second_writer_says_so_and_waits_for_the_first(settings: Prepare) -> None:
    folder = Path(settings.folder) / plan_inputs(settings, seed=1).hash
    first = contextlib.ExitStack()
    first.enter_context(locked(folder))
    said: list[str] = []

    class Second(Silent):
        def say(self, text: str) -> None:
            said.append(text)
            if "waiting" in text:
                first.close()  # the first one ends: the second now gets on

    assert not prepare(settings, seed=1, progress=Second()).reused
    assert any(f"process {os.getpid()} is making the same; waiting for it" in text for text in said)


def test_when_nothing_is_left_the_error_names_the_rule(settings: Prepare) -> None:
    strict = dataclasses.replace(settings, filter=Filter(min_characters=100_000))
    with pytest.raises(
        DataError, match=r"no document is left.*`min_characters`.*relax `prepare.filter.min_characters`"
    ):
        prepare(strict, seed=1)


def test_one_short_document_is_too_small_a_corpus(settings: Prepare) -> None:
    Path("texts/00.md").write_text("The rope of hemp was laid in the long hall by the river. " * 2)
    alone = dataclasses.replace(settings, sources=(Source(name="one", paths=("texts/00.md",)),))
    with pytest.raises(DataError, match="too small"):
        prepare(alone, seed=1)


def test_settings_that_contradict_each_other_are_refused(settings: Prepare) -> None:
    with pytest.raises(ConfigError, match="two sources are named"):
        plan_inputs(dataclasses.replace(settings, sources=settings.sources[:1] * 2), seed=1)


def test_prepare_does_not_import_torch() -> None:
    code = "import sys, ropewalk.prepare.pipeline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_is_committed_is_not_done_again(settings: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build.ledger, "write_ledger", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings, seed=1)
    for name in ("read_chunk", "measure_chunk", "encode_chunk"):
        monkeypatch.setattr(build, name, fail)
    monkeypatch.setattr(build.tokenizer, "train", fail)
    monkeypatch.setattr("ropewalk.prepare.pack.write_runs", fail)
    assert not prepare(settings, seed=1).reused
