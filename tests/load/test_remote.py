"""Tokens behind a URL or compressed: the same batches as from the mapped shards, whatever the store does."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.load import remote
from ropewalk.load.config import Mirror, Remote
from ropewalk.load.expected import Expected
from ropewalk.load.foresight import Foresight
from ropewalk.load.loader import Loader
from ropewalk.load.remote import RemoteShards, Stores
from ropewalk.store.items import Item
from ropewalk.store.manifest import read_manifest, write_manifest
from ropewalk.store.origin import Origin
from ropewalk.store.shards import Run, write_runs
from tests.load.throttled import Throttle, serving
from tests.tiny import write_prepared

LENGTH = 512
"""Tokens a row; a piece of 1 MiB holds a thousand rows."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of two shards each, about 2 MiB of tokens a shard; of the second, a tenth of the tokens does not
    count."""
    folder = write_prepared(tmp_path_factory.mktemp("mapped"), {"a": [[[1, 2]]] * 2, "b": [[[3, 4]]] * 2}, {})
    manifest = read_manifest(folder)
    draw = np.random.default_rng(3)
    entries = []
    for entry in manifest.shards:
        lengths = draw.integers(1, 40_000, 60)
        tokens = draw.integers(0, 1 << 16, lengths.sum(), dtype=np.uint16)
        keys = draw.integers(0, 1 << 60, 60, dtype=np.uint64)
        counts = draw.random(len(tokens)) < 0.9 if entry.source == "b" else None
        written = write_runs(folder / entry.file, [Run(keys, lengths, tokens, counts)], dtype="uint16")
        sizes = {"documents": 60, "tokens": written.tokens, "file_bytes": written.bytes, "checksum": written.checksum}
        entries.append(dataclasses.replace(entry, **sizes))
    write_manifest(folder, dataclasses.replace(manifest, shards=tuple(entries)))
    return folder


def remote_folder(corpus: Path, target: Path, url: str) -> Path:
    """A folder whose manifest says that the shards of `corpus` lie at `url`."""
    manifest = read_manifest(corpus)
    target.mkdir(exist_ok=True)
    shards = tuple(dataclasses.replace(entry, file=f"{url}/{entry.file}") for entry in manifest.shards)
    write_manifest(target, dataclasses.replace(manifest, shards=shards))
    return target


def loader(folder: Path, **changes: object) -> Loader:
    arguments = {"sequence_length": LENGTH, "batch_size": 8, "seed": 4, "shuffle": "blocks", **changes}
    return Loader(folder, **arguments)  # type: ignore[arg-type]


def tokens_of(folder: Path, batches: int, **changes: object) -> list[torch.Tensor]:
    reader = loader(folder, **changes)
    try:
        return [torch.stack([b.tokens, b.weight.long()]) for b in (reader.next() for _ in range(batches))]
    finally:
        reader.close()


def equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("packing", ["windows", "best-fit"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_remote_corpus_gives_the_same_batches(corpus: Path, tmp_path: Path, packing: str, threads: int) -> None:
    with serving(corpus, Throttle()) as store:
        there = remote_folder(corpus, tmp_path / "remote", store.url)
        expected = tokens_of(corpus, 30, packing=packing)
        assert equal(tokens_of(there, 30, packing=packing, threads=threads), expected)


def test_injected_faults_are_all_retried_and_change_nothing(corpus: Path, tmp_path: Path) -> None:
    throttle = Throttle(status_share=0.05, short_share=0.05, jitter_s=0.001, seed=5)
    with serving(corpus, throttle) as store:
        there = remote_folder(corpus, tmp_path / "remote", store.url)
        reader = loader(there, shuffle="all")
        found = [torch.stack([b.tokens, b.weight.long()]) for b in (reader.next() for _ in range(40))]
        reader.close()
        assert equal(found, tokens_of(corpus, 40, shuffle="all"))
        faults = reader._remote.stores.faults()
        assert sum(store.injected.values()) == faults.retried + faults.reported > 0
        assert faults.reported == 0


def test_a_run_continues_on_a_remote_corpus_with_another_number_of_readers(corpus: Path, tmp_path: Path) -> None:
    with serving(corpus, Throttle()) as store:
        there = remote_folder(corpus, tmp_path / "remote", store.url)
        whole = loader(corpus)
        whole.seek({"row": 4})
        expected = whole.next(8).tokens
        whole.close()
        parts = []
        for rank in range(8):
            # Row 4 does not begin a turn of 8 readers.
            part = loader(there, rank=rank, world=8)
            part.seek({"row": 4})
            parts.append(part.next(8).tokens)
            assert part._remote.foresight.describe()["batches_ahead"] > 0
            part.close()
        assert torch.equal(torch.cat(parts), expected)


def test_ramps_and_rows_left_out_read_the_right_rows(corpus: Path, tmp_path: Path) -> None:
    with serving(corpus, Throttle()) as store:
        there = remote_folder(corpus, tmp_path / "remote", store.url)
        found = []
        for folder in (corpus, there):
            reader = loader(folder, prefetch_bytes=1 << 16)
            rows = []
            for size, left_out in ((2, 0), (2, 0), (16, 4000), (4, 0), (4, 48), (32, 0), (8, 0)):
                reader.skip(left_out)
                rows.append(reader.next(size).tokens)
            found.append(rows)
            reader.close()
        assert equal(*found)


def test_retuning_and_what_is_expected_change_no_batch(corpus: Path, tmp_path: Path) -> None:
    with serving(corpus, Throttle()) as store:
        there = remote_folder(corpus, tmp_path / "remote", store.url)
        reader, expected = loader(there), tokens_of(corpus, 24)
        knobs = reader.knobs()
        assert [knob.name for knob in knobs] == [
            "load.prefetch_bytes",
            "load.remote.max_requests",
            "load.remote.prefetch_bytes",
            "load.threads",
        ]
        found = []
        for step in range(24):
            knob = knobs[step % 4]
            knob.apply(3 if knob.name in ("load.threads", "load.remote.max_requests") else 1 << (16 + step // 2))
            reader.expect(Expected(kind="checkpoint", at=8 * step, seconds=0.1))
            batch = reader.next()
            found.append(torch.stack([batch.tokens, batch.weight.long()]))
        stores, hedging, ahead, overlap = reader.describe()
        assert "of 3 requests in flight (hill-climb)" in stores
        assert "asked for again" in hedging
        assert "may be ahead of the steps" in ahead
        assert "batches waited for them" in overlap
        reader.close()
        assert equal(found, expected)


def test_a_mapped_corpus_has_no_stores_to_describe(corpus: Path) -> None:
    reader = loader(corpus)
    assert reader.describe() == []
    assert [knob.name for knob in reader.knobs()] == ["load.prefetch_bytes", "load.threads"]
    reader.close()


def test_a_damaged_piece_is_told_with_its_documents(corpus: Path, tmp_path: Path) -> None:
    entry = read_manifest(corpus).shards_of("train", "a")[0]
    data = bytearray((corpus / entry.file).read_bytes())
    data[5] ^= 1
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / entry.file).write_bytes(data)
    source = RemoteShards(damaged, [entry], fetch=Origin())
    with pytest.raises(DataError, match=r"bytes 0 to 1048576 \(document 0 to \d+\): not what was written"):
        source.read(np.array([0]), np.array([10], np.int32))
    fine = RemoteShards(corpus, [entry], fetch=Origin()).read(np.array([600_000]), np.array([10], np.int32))
    assert (source.read(np.array([600_000]), np.array([10], np.int32)) == fine).all()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is asked once."""
    monkeypatch.setattr(remote, "Reading", functools.partial(remote.Reading, attempts=1))


@pytest.mark.usefixtures("_impatient")
def test_what_touches_a_damaged_piece_is_skipped_when_asked(corpus: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(corpus, damaged)
    entry = read_manifest(corpus).shards_of("train", "a")[0]
    data = bytearray((corpus / entry.file).read_bytes())
    data[5] ^= 1
    (damaged / entry.file).write_bytes(data)
    with serving(damaged, Throttle()) as store:
        found = []
        for folder in (damaged, remote_folder(damaged, tmp_path / "remote", store.url)):
            reader = loader(folder, on_damage="skip", mixture={"a": 1.0}, remote=Remote(hedge=0))
            found.append([reader.next().weight for _ in range(3)])
            assert reader.take_warnings()
            reader.close()
    assert equal(*found)
    assert any((weight == 0).all(dim=1).any() for weight in found[0])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_ranges_are_read_across_pieces_and_shards(corpus: Path, data: st.DataObject) -> None:
    entries = read_manifest(corpus).shards_of("train", "b")
    source = RemoteShards(corpus, entries, fetch=Origin())
    line = np.concatenate([np.fromfile(corpus / e.file, np.uint16, count=e.tokens) for e in entries])
    assert int(source.lengths.sum()) == len(line)
    first = data.draw(st.lists(st.integers(0, len(line) - 1), max_size=4))
    begin = np.array(first, np.int64)
    count = np.array([data.draw(st.integers(0, min(700_000, len(line) - place))) for place in first], np.int32)
    expected = [line[b : b + c] for b, c in zip(begin, count, strict=True)]
    assert (source.read(begin, count) == np.concatenate([np.zeros(0, np.uint16), *expected])).all()
    counted = source.counts(begin, count)
    assert counted is not None
    assert len(counted) == count.sum()


class Counting:
    """A `Fetch` of zeros that counts how often each item was asked for."""

    def __init__(self) -> None:
        self.asked: list[Item] = []

    def fetch(self, items: Sequence[Item]) -> list[bytes | memoryview]:
        self.asked += items
        return [bytes(len(item)) for item in items]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("block", [3, 8, 40])
def test_blocks_of_any_size_read_each_strip_once_and_hold_no_more_than_the_budget(block: int) -> None:
    behind = Counting()
    foresight = Foresight(behind, strip_rows=8, prefetch_bytes=64, requests=2)
    needs = {row: Item("a", row, row + 1) for row in range(2000)}
    foresight.begin(lambda first, rows: [needs[row] for row in range(first, first + rows)], row=0)
    for first in range(0, 1200, block):
        with foresight.reading(first, block) as fetched:
            foresight.fetch([needs[row] for row in range(first, first + block)])
            assert fetched.bytes >= block
            assert foresight.describe()["planned_bytes"] <= 64 + block + 8
        foresight.advance(first)
    foresight.close()
    assert len(behind.asked) == len(set(behind.asked)), "read twice"


@pytest.mark.usefixtures("_impatient")
def test_stores_say_what_they_do(corpus: Path, tmp_path: Path) -> None:
    entry = read_manifest(corpus).shards[0]
    mirrors = (Mirror(of="http://127.0.0.1:9/none", at=str(corpus)),)
    stores = Stores(Remote(policy="fixed", max_requests=3, timeout_s=5.0, mirrors=mirrors))
    item = Item(f"http://127.0.0.1:9/none/{entry.file}", 0, 4)
    stores.allow(2)
    found = [bytes(stores.fetch([item])[0]) for _ in range(2)]
    assert found == [(corpus / entry.file).read_bytes()[:4]] * 2
    first, second, hedging = stores.lines()
    assert first.startswith("http://127.0.0.1:9/none/: left alone after failures, 0 of 2 requests in flight (fixed)")
    assert second.startswith(f"{corpus}/: up, 0 of 2 requests in flight (fixed)")
    assert "0 of 2 requests" in hedging
    stores.close()
