"""Batches: the same for any world size and any interruption, and the tokens that were written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.load.batch import Batch
from ropewalk.load.loader import Loader, held_out_rows
from ropewalk.load.mixture import Mixture
from ropewalk.load.order import Order, Rows
from ropewalk.store.manifest import read_manifest, write_manifest
from ropewalk.store.shards import Document, write_shard
from tests.tiny import write_corpus, write_prepared

LENGTH = 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "prepared")


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """One source whose token i is i, in documents of 1 to 20 tokens over four shards; with the documents."""
    draw = np.random.default_rng(0)
    cuts = np.cumsum(draw.integers(1, 21, 60))
    documents = [list(range(start, end)) for start, end in zip([0, *cuts], cuts, strict=False)]
    shards = [documents[:15], documents[15:16], documents[16:40], documents[40:]]
    folder = write_prepared(tmp_path_factory.mktemp("numbered"), {"a": shards}, {})
    return folder, documents


def loader(folder: Path, **changes: Any) -> Loader:
    arguments: dict[str, Any] = {"sequence_length": LENGTH, "batch_size": 8, "seed": 4, **changes}
    return Loader(folder, **arguments)


def same_batch(left: Batch, right: Batch) -> bool:
    names = ("tokens", "targets", "weight", "positions", "documents")
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_global_batch_is_the_same_for_any_world_size(corpus: Path, world: int) -> None:
    whole = loader(corpus).batch(40, 8).tokens
    parts = [loader(corpus, rank=rank, world=world).batch(40, 8).tokens for rank in range(world)]
    assert torch.equal(torch.stack(parts, dim=1).flatten(0, 1), whole)


@settings(max_examples=25, deadline=None)
@given(stop=st.integers(0, 320), sizes=st.lists(st.sampled_from([1, 2, 8]), min_size=1, max_size=5))
def test_resume_at_any_row_yields_the_same_batches_of_any_size(corpus: Path, stop: int, sizes: list[int]) -> None:
    straight, first, second = loader(corpus), loader(corpus), loader(corpus)
    for _ in range(stop % 7):
        first.next()
    first.seek({"row": stop})
    second.seek(first.state())
    row = stop
    for rows in sizes:
        assert same_batch(second.next(rows), straight.batch(row, rows))
        row += rows
    assert second.state()["row"] == row
    for each in (straight, first, second):
        each.close()


def test_rows_are_windows_of_the_stream_and_targets_come_one_later(numbered: tuple[Path, list[list[int]]]) -> None:
    folder, documents = numbered
    batches = [loader(folder).batch(8 * step, 8) for step in range(20)]
    tokens = torch.cat([batch.tokens for batch in batches])
    assert (tokens[:, 0] % LENGTH == 0).all()
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(LENGTH))
    assert all(torch.equal(batch.targets, batch.tokens + 1) for batch in batches)
    # 160 rows are more than an epoch: every window of the stream is among them, those over shard boundaries too.
    windows = (sum(map(len, documents)) - 1) // LENGTH
    assert set(tokens[:, 0].tolist()) == {LENGTH * window for window in range(windows)}


def test_documents_are_numbered_from_the_first_of_each_row(numbered: tuple[Path, list[list[int]]]) -> None:
    folder, documents = numbered
    owner = {token: number for number, document in enumerate(documents) for token in document}
    for step in range(10):
        batch = loader(folder).batch(8 * step, 8)
        for tokens, numbers in zip(batch.tokens.tolist(), batch.documents.tolist(), strict=True):
            assert numbers == [owner[token] - owner[tokens[0]] for token in tokens]


def test_positions_count_from_zero_and_every_target_weighs_one(corpus: Path) -> None:
    batch = loader(corpus).batch(0, 8)
    assert torch.equal(batch.positions, torch.arange(LENGTH).repeat(8, 1))
    assert torch.equal(batch.weight, torch.ones(8, LENGTH))
    assert (batch.tokens.dtype, batch.documents.dtype, len(batch)) == (torch.int64, torch.int32, 8)


def test_an_error_of_the_reading_thread_reaches_the_caller(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = loader(corpus)
    read = Order.rows

    def failing(self: Order, first: int, count: int, *, stride: int = 1) -> Rows:
        if first <= 16 < first + count:
            raise OSError("the disk went away")
        return read(self, first, count, stride=stride)

    monkeypatch.setattr(Order, "rows", failing)
    reader.next()
    reader.next()
    with pytest.raises(OSError, match="the disk went away"):
        reader.next()
    assert reader.state()["row"] == 16
    reader.close()


def test_the_state_is_readable_and_says_what_was_read(corpus: Path) -> None:
    reader = loader(corpus)
    for rows in (2, 2, 8):
        reader.next(rows)
    reader.skip(8)
    reader.next()
    assert reader.state() == {
        "step": 4,
        "row": 28,
        "batches": [[0, 0, 2], [2, 4, 8], [3, 20, 8]],
        "skipped": [[12, 20]],
        "mixtures": [{"row": 0, "weights": {"notes": 1.0, "code": 0.5}}],
        "order": reader.order.identity(),
    }
    assert json.loads(json.dumps(reader.state())) == reader.state()
    reader.close()


def test_a_state_of_another_order_is_refused_with_the_difference(corpus: Path) -> None:
    reader, other = loader(corpus), loader(corpus, sequence_length=16)
    with pytest.raises(DataError, match="sequence_length was 16, now is 8"):
        reader.seek(other.state())
    for each in (reader, other):
        each.close()


def test_a_mixture_changed_on_the_way_is_known_by_its_row(corpus: Path) -> None:
    first, same, changed = loader(corpus), loader(corpus), loader(corpus, mixture={"code": 1.0})
    first.next()
    for each in (same, changed):
        each.seek(first.state())
    assert (same.mixture_changed_at, changed.mixture_changed_at) == (None, 8)
    assert [entry["row"] for entry in changed.state()["mixtures"]] == [0, 8]
    again = loader(corpus, mixture={"code": 1.0})
    changed.next()
    again.seek(changed.state())
    assert again.mixture_changed_at is None
    assert same_batch(again.next(), changed.next())
    for each in (first, same, changed, again):
        each.close()


def test_reading_beyond_the_last_row_of_the_sources_is_an_error_of_the_step_that_does(corpus: Path) -> None:
    reader = loader(corpus, mixture=Mixture.constant({"notes": 1.0}, max_epochs={"notes": 1.0}))
    rows = reader.order.source_rows["notes"]
    for _ in range(rows // 8):
        reader.next()
    with pytest.raises(DataError, match=f"the sources have only {rows} rows"):
        reader.next()
    reader.close()


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("offset", "words"), [(3, "are not what was written"), (-30, "its footer")])
def test_a_corrupt_shard_is_named_at_open(tmp_path: Path, offset: int, words: str) -> None:
    folder = write_corpus(tmp_path / "prepared")
    flip(folder / "notes-train-00001.tokens", offset)
    with pytest.raises(DataError, match=rf"notes-train-00001\.tokens.*{words}"):
        loader(folder)


def test_a_shard_of_another_corpus_is_named_by_its_checksum(tmp_path: Path) -> None:
    folder, other = write_corpus(tmp_path / "one"), write_corpus(tmp_path / "two", seed=1)
    (folder / "code-train-00000.tokens").write_bytes((other / "code-train-00000.tokens").read_bytes())
    with pytest.raises(DataError, match=r"code-train-00000\.tokens.*the manifest says"):
        loader(folder, verify=False)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "prepared")
    (folder / "notes-train-00002.tokens").unlink()
    with pytest.raises(DataError, match=r"notes-train-00002\.tokens: this shard is missing"):
        loader(folder)


def test_a_source_too_short_for_a_row_is_named_with_its_size(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path, {"long": [[range(50)]], "short": [[range(5), range(3)]]}, {})
    with pytest.raises(DataError, match=r"one row of 8: short \(8 tokens\); shorten `load.sequence_length`"):
        loader(folder)
    assert loader(folder, sequence_length=7, batch_size=1).batch(0, 1).tokens.shape == (1, 7)


def test_a_corpus_without_training_tokens_says_so(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path, {}, {"a": [[range(50)]]})
    with pytest.raises(DataError, match="no source has training tokens"):
        loader(folder)


def test_held_out_rows_are_the_same_every_time_and_from_every_source(corpus: Path) -> None:
    first, second = (held_out_rows(corpus, sequence_length=LENGTH, rows=6) for _ in range(2))
    everything = held_out_rows(corpus, sequence_length=LENGTH, rows=10_000)
    assert same_batch(first, second)
    assert len(first) == 6
    assert {tuple(row) for row in first.tokens.tolist()} <= {tuple(row) for row in everything.tokens.tolist()}


def test_held_out_rows_are_taken_evenly_over_the_sources(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path, {}, {"low": [[range(81)]], "high": [[range(1000, 1081)]]})
    rows = held_out_rows(folder, sequence_length=LENGTH, rows=4).tokens[:, 0]
    assert sorted((rows >= 1000).tolist()) == [False, False, True, True]


def test_too_little_held_out_text_says_what_to_change(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path, {"a": [[range(50)]]}, {"a": [[range(8)]]})
    with pytest.raises(DataError, match=r"8 validation tokens do not fill one row of 8; raise `prepare"):
        held_out_rows(folder, sequence_length=LENGTH, rows=4)


def test_microbatches_are_the_rows_in_order(corpus: Path) -> None:
    batch = loader(corpus).batch(0, 8)
    pieces = batch.split(3)
    assert [len(piece) for piece in pieces] == [3, 3, 2]
    assert torch.equal(torch.cat([piece.targets for piece in pieces]), batch.targets)


def test_rows_are_cut_without_losing_a_token_and_know_their_own_positions(corpus: Path) -> None:
    batch = loader(corpus).batch(0, 8)
    short = batch.cut(4)
    assert torch.equal(short.tokens.flatten(), batch.tokens.flatten())
    assert torch.equal(short.targets.flatten(), batch.targets.flatten())
    assert torch.equal(short.positions, torch.arange(4).repeat(16, 1))
    assert batch.cut(LENGTH) is batch


def test_a_mixture_reads_the_named_sources_by_their_weights(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path, {"a": [[range(100)]], "b": [[range(200, 300)]], "c": [[range(400, 500)]]}, {})
    reader = Loader(folder, sequence_length=LENGTH, batch_size=8, seed=4, mixture={"a": 3.0, "c": 1.0})
    first = reader.batch(0, 1024).tokens[:, 0]
    assert ((first < 100).sum().item(), (first >= 400).sum().item()) == (768, 256)
    assert reader.tokens == 200


def test_targets_that_do_not_count_weigh_nothing(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path, {"a": [[range(17)]]}, {})
    counts = np.arange(17) % 3 == 0
    path = folder / "a-train-00000.tokens"
    written = write_shard(path, [Document(1, np.arange(17, dtype=np.uint16), counts)], dtype="uint16")
    manifest = read_manifest(folder)
    (entry,) = manifest.shards
    shards = (dataclasses.replace(entry, checksum=written.checksum, file_bytes=written.bytes),)
    write_manifest(folder, dataclasses.replace(manifest, shards=shards))
    batch = loader(folder).batch(0, 4)
    assert torch.equal(batch.weight, (batch.targets % 3 == 0).float())
