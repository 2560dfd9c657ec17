"""Results of stages: found again by what they depend on, redone when that changes, whole or not there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ropewalk.prepare import build, chunks, measures, pipeline, screen
from ropewalk.prepare.config import Gopher, Language, Near, Prepare, Substring, Tokenizer
from ropewalk.prepare.cuts import Spans
from ropewalk.prepare.decide import near, state, substring
from ropewalk.prepare.pipeline import plan_inputs, prepare
from ropewalk.prepare.stages import batch_writer, drop, filled, key_of, read_artifact, read_batches, read_table, sharing
from ropewalk.prepare.texts import LAYER, Texts, layer_batch, read_texts

SCHEMA = pa.schema([("text", pa.large_string())])


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What was really done since the last call: names of the functions that workers ran and of files read."""
    calls: list[str] = []

    def watch(module: object, name: str) -> None:
        function = getattr(module, name)

        def watched(*arguments: object, **options: object) -> object:
            calls.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, watched)

    watch(screen, "read_records")
    watch(screen, "measure")
    watch(near, "sketch")
    watch(build.tokenizer, "train")
    watch(build, "encode_chunk")
    watch(state, "cut_texts")

    def take() -> list[str]:
        taken = sorted(set(calls))
        calls.clear()
        return taken

    return take


ALL = ["encode_chunk", "measure", "read_records", "sketch", "train"]


def changed(settings: Prepare, **values: object) -> Prepare:
    return dataclasses.replace(settings, **values)


def test_only_what_depends_on_a_changed_setting_is_done_again(settings: Prepare, done) -> None:
    prepare(settings, seed=1)
    assert done() == ALL
    stricter = changed(settings, filter=dataclasses.replace(settings.filter, min_characters=325))
    assert prepare(stricter, seed=1).manifest != prepare(settings, seed=1).manifest
    assert not {"read_records", "measure"} & set(done())
    prepare(changed(settings, filter=dataclasses.replace(settings.filter, max_mean_line_length=190.0)), seed=1)
    assert done() == []  # a threshold that no document meets changes nothing
    prepare(
        changed(settings, filter=dataclasses.replace(settings.filter, gopher=Gopher(min_words=1, min_stop_words=0))),
        seed=1,
    )
    assert not {"read_records", "measure"} & set(done())
    prepare(changed(settings, tokenizer=Tokenizer(vocab_size=290)), seed=1)
    assert done() == ["encode_chunk", "train"]
    prepare(changed(settings, shard_tokens=4000), seed=1)
    assert done() == []
    sensitive = dataclasses.replace(settings.deduplicate, near=Near(threshold=0.9))
    prepare(changed(settings, deduplicate=sensitive), seed=1)
    assert done() == []
    wider = dataclasses.replace(settings.deduplicate, near=Near(shingle_words=3))
    prepare(changed(settings, deduplicate=wider), seed=1)
    assert done() == ["sketch"]
    shorter = dataclasses.replace(settings.deduplicate, substring=Substring(action="remove", length=30))
    prepare(changed(settings, deduplicate=shorter), seed=1)
    assert not {"read_records", "measure", "sketch"} & set(done())


def test_another_definition_of_words_measures_again_under_another_name(settings: Prepare, done, monkeypatch) -> None:
    first = prepare(settings, seed=1)
    done()
    for module in (chunks, pipeline, substring):
        monkeypatch.setattr(module, "WORDS_ID", "words-0")
    second = prepare(settings, seed=1)
    assert second.folder != first.folder
    assert done() == ["measure"]


def test_another_model_of_languages_measures_again_under_another_name(settings: Prepare, done, monkeypatch) -> None:
    settings = changed(settings, filter=dataclasses.replace(settings.filter, language=Language(keep=("en", "zh"))))
    first = plan_inputs(settings, seed=1).hash
    before = measures.measuring(settings.filter)
    for module in (measures, pipeline):
        monkeypatch.setattr(module, "language_id", lambda: "another")
    assert plan_inputs(settings, seed=1).hash != first
    assert measures.measuring(settings.filter) != before


def test_a_new_file_among_many_is_read_with_its_neighbours_alone(settings: Prepare, monkeypatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3000)
    read: list[str] = []
    real = screen.read_records

    def watched(file):
        read.append(file.name)
        return real(file)

    monkeypatch.setattr(screen, "read_records", watched)
    prepare(settings, seed=1)
    every = len(read)
    read.clear()
    Path("texts/05b.md").write_text(Path("texts/05.md").read_text("utf-8") + "and more\n", "utf-8")
    prepare(settings, seed=1)
    assert "texts/05b.md" in read
    assert len(read) < every / 2


def test_stages_can_be_deleted_at_any_time_or_at_once(settings: Prepare, tree) -> None:
    first = prepare(settings, seed=1)
    expected = tree(first.folder)
    for path in (Path(settings.folder) / "stages").rglob("*"):
        if path.is_file() and path.name != ".lock" and sum(path.name.encode()) % 2:
            path.unlink()
    (first.folder / "manifest.json").unlink()
    assert tree(prepare(changed(settings, artifacts="drop"), seed=1).folder) == expected
    assert list((Path(settings.folder) / "stages").iterdir()) == [Path(settings.folder) / "stages" / ".lock"]


def test_what_a_crash_left_is_swept_away_by_the_only_process_there(tmp_path: Path) -> None:
    left = tmp_path / "4711.partial"
    left.mkdir()
    with sharing(tmp_path):
        assert not left.exists()
        left.mkdir()
        with sharing(tmp_path):
            assert left.exists()
        assert not drop(tmp_path)
    assert drop(tmp_path)


def test_a_file_is_there_when_its_block_has_ended_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "read" / "x.arrow"
    with contextlib.suppress(ZeroDivisionError), filled(path) as place:
        place.write_text("half")
        1 / 0  # noqa: B018 - the block fails
    assert not path.exists()
    with filled(path) as place:
        place.write_text("whole")
        assert not path.exists()
    assert read_artifact(path) == b"whole"
    assert os.listdir(tmp_path) == ["read"]


def test_a_key_depends_on_values_and_not_on_the_order_of_names() -> None:
    assert key_of({"a": 1, "b": (2, 3)}) == key_of({"b": [2, 3], "a": 1})
    assert len({key_of(1), key_of("1"), key_of([1]), key_of(1, 1)}) == 4


def test_columns_are_read_by_name_and_a_file_without_batches_is_empty(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    with batch_writer(tmp_path / "s" / "x.arrow", schema) as writer:
        writer.write_batch(pa.record_batch([[1, 2], ["x", "y"]], schema=schema))
    assert [batch.to_pydict() for batch in read_batches(tmp_path / "s" / "x.arrow", ["b"])] == [{"b": ["x", "y"]}]
    with batch_writer(tmp_path / "s" / "y.arrow", schema):
        pass
    assert read_table(tmp_path / "s" / "y.arrow").schema == schema


def test_the_last_layer_of_edits_wins(tmp_path: Path) -> None:
    texts = Texts(tmp_path / "read" / "x.arrow")
    with batch_writer(texts.documents, SCHEMA) as writer:
        for run in (["a", "b"], [], ["c"]):
            writer.write_batch(pa.record_batch([pa.array(run, pa.large_string())], schema=SCHEMA))
    for number, runs in enumerate([[["A", "B"], [], ["c"]], [["A", "bb"], [], ["cc"]]]):
        path = tmp_path / "layer" / f"{number}.arrow"
        before = [text for batch in read_texts(texts) for text in batch["text"].to_pylist()]
        with batch_writer(path, LAYER) as writer:
            for run in runs:
                old, before = before[: len(run)], before[len(run) :]
                mask = np.array([a != b for a, b in zip(old, run, strict=True)], bool)
                writer.write_batch(layer_batch(pa.array(run, pa.large_string()), mask))
        texts = texts.under(path)
    assert [batch["text"].to_pylist() for batch in read_texts(texts)] == [["A", "bb"], [], ["cc"]]
    assert texts.name == "x+0+1"


def test_no_spans_have_a_name_too() -> None:
    assert Spans.none().name == Spans(*(np.zeros(0, np.int64) for _ in range(3))).name
